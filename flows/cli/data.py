"""`stratagem data`: datasets of the user's own and of TFDS, added, listed, shown, compared, shared and taken away."""

import math
from json import dumps
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli import completion, tables
from flows.cli.command import NO_SETTINGS, Debug, Explain, Json, command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tasks.records import DataDifference, DataQuality, KeptColumn, PreparedDataset

app = typer.Typer(
    help="Add your own data or a dataset of TFDS; list, show, compare, share and remove what is there.",
    no_args_is_help=True,
)


def dataset_argument(metavar: str, help: str) -> Any:
    """Return the declaration of an argument that names a dataset; a shell completes it."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=completion.datasets)


Name = Annotated[str, dataset_argument("NAME", "Of the dataset: the folder data/NAME.")]
Which = Annotated[str | None, dataset_argument("[NAME]", "Of the dataset: the folder data/NAME; without it, all.")]

MAX_CLASSES = 30
"""That are printed of a dataset."""
MAX_DIFFERENCES = 60
MAX_COLUMNS = 60
OUTPUTS = {
    "classification": ("class", "classes"),
    "multilabel": ("label", "labels"),
    "regression": ("number", "numbers"),
}


@app.command()
def add(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder of images (FOLDER/<class>/* or FOLDER/<split>/<class>/*), a table (.csv, .tsv, .parquet, "
            ".jsonl), a .npz file or a folder of .npy files, or a dataset of TFDS (NAME, NAME/CONFIG, NAME:VERSION; "
            "MODULE:CLASS for a builder of your own).",
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of the dataset; without it, that of the source.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="COLUMN", help="Of a table: what a model learns to tell; several as A,B."),
    ] = None,
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="What data/NAME/params.yaml is to say, such as "
            "dataset.image_size=[96,96], dataset.test=0.1 or dataset.on_broken=skip.",
        ),
    ] = NO_SETTINGS,
    explain: Explain = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Make the folder data/NAME for a dataset, and prepare it: `stratagem run --set dataset.name=NAME` trains on it."""
    with command(debug):
        from tasks import config
        from tasks.operations import dvc_data, explanation, preconditions

        values = _described(overrides)
        if target is not None:
            values["target"] = target
        if explain:
            tables.print_explanation(explanation.add(source, name, values), json)
            return
        preconditions.check_writable()
        prepared = dvc_data.add(source, name, values)
        if json:
            print(prepared.model_dump_json())
            return
        print_dataset(prepared)
        train = f"stratagem run --set dataset.name={prepared.name}"
        # Without a recipe, its settings are chosen for it, and validate on such a split.
        settings = config.load(None, {"dataset.name": prepared.name})
        if "validation" in prepared.splits and not config.follows_data(None, settings):
            train = f"\n  {train} --set input.validation=validation"
        print(f"\nTrain on it: {train}".replace(": \n", ":\n"))


def _described(overrides: list[str]) -> dict[str, Any]:
    """Return what data/NAME/params.yaml is to say.

    Raises:
        UserError: a setting of something else.
    """
    from tasks import config
    from tasks.system.errors import UserError

    values: dict[str, Any] = {}
    for key, value in config.read_texts(overrides).items():
        section, _, own = key.partition(".")
        if section != "dataset" or not own:
            raise UserError(f"--set {key}: `data add` takes keys of the dataset alone, such as dataset.test=0.1")
        group, _, inner = own.partition(".")
        if group not in ("columns", "checks", "metadata", "splits") or not inner:
            values[own] = value
        elif isinstance(values.setdefault(group, {}), dict):
            values[group][inner] = value
    return values


@app.command("list")
def list_datasets(json: Json = False, debug: Debug = False) -> None:
    """List the datasets in data/."""
    with command(debug):
        from tasks.operations import data_folders

        found = data_folders.list_datasets()
        if json:
            print(dumps({name: one.model_dump(mode="json") if one else None for name, one in found.items()}))
            return
        print_datasets(found)


def print_datasets(found: "Mapping[str, PreparedDataset | None]") -> None:
    """Print a line for each dataset."""
    rows = []
    for name, one in found.items():
        if one is None:
            rows.append((name, "", "not prepared", "", ""))
            continue
        total = sum(split.num_examples for split in one.splits.values())
        rows.append((name, one.kind, ", ".join(_features(one)), f"{total:,}", (one.data_version or "")[:12]))
    tables.print_table(("name", "kind", "features", "examples", "data version"), rows, right=("examples",))


@app.command()
def show(name: Name, json: Json = False, debug: Debug = False) -> None:
    """Show what a prepared dataset holds: its features, its splits and its classes, and what the checks found."""
    with command(debug):
        from tasks.operations import data_folders

        prepared, quality = data_folders.show(name), data_folders.quality(name)
        if json:
            told = quality.model_dump(mode="json") if quality else None
            kept = {column: one.model_dump(mode="json") for column, one in data_folders.metadata(prepared).items()}
            print(dumps({**prepared.model_dump(mode="json"), "kept": kept, "quality": told}))
            return
        print_dataset(prepared)
        print_metadata(data_folders.metadata(prepared))
        print_quality(name, quality)


def print_dataset(prepared: "PreparedDataset") -> None:
    """Print what a prepared dataset holds: its features, its splits, and the examples of each class."""
    from tasks.system.errors import cut

    splits, count = prepared.splits, prepared.target.num_outputs
    one, many = OUTPUTS[prepared.target.task]
    tables.print_rows(
        {
            "name": prepared.name,
            "kind": f"{prepared.kind}, version {prepared.version}",
            "data version": prepared.data_version or "not under DVC",
            "folder": prepared.folder,
            "features": ", ".join(_features(prepared)),
            "task": f"{prepared.target.task}, {count:,} {one if count == 1 else many}",
        }
    )
    print()
    rows = [("all", *(f"{split.num_examples:,}" for split in splits.values()))]
    for number, name in enumerate(prepared.target.class_names[:MAX_CLASSES]):
        rows.append((cut(name), *(f"{split.class_counts[number]:,}" for split in splits.values())))
    tables.print_table(("examples", *splits), rows, right=splits)
    tables.print_more(len(prepared.target.class_names) - MAX_CLASSES, "classes")
    print()
    _print_columns(prepared)


def _print_columns(prepared: "PreparedDataset") -> None:
    """Print what each column holds: its kind, how many values are missing, and what the training split says of it."""
    from tasks import reports
    from tasks.system.errors import cut

    rows = [row for name, feature in prepared.features.items() for row in reports.describe_columns(name, feature)]
    missing = {name: sum(split.num_missing.get(name, 0) for split in prepared.splits.values()) for name, *_ in rows}
    target = prepared.target
    names = target.columns or ("",) * len(target.mean)
    rows += [
        (name, "target", reports.moments((mean,), (deviation,)))
        for name, mean, deviation in zip(names, target.mean, target.deviation, strict=False)
    ]
    cells = [(cut(name), kind, f"{missing.get(name, 0):,}", told) for name, kind, told in rows[:MAX_COLUMNS]]
    tables.print_table(("column", "kind", "missing", "in the training split"), cells, right=("missing",))
    tables.print_more(len(rows) - MAX_COLUMNS, "columns")


def print_metadata(kept: "Mapping[str, KeptColumn]") -> None:
    """Print what lies beside the test examples, a line a column; nothing where that is nothing."""
    from tasks.system.errors import cut

    if not kept:
        return
    print()
    rows = []
    for name, one in list(kept.items())[:MAX_COLUMNS]:
        told = f"{one.num_different:,} different values"
        if one.lowest is not None and one.highest is not None:
            told = f"from {_value(one.lowest, one.kind)} to {_value(one.highest, one.kind)}"
        rows.append((cut(name), one.kind, f"{one.num_missing:,}", told))
    tables.print_table(("metadata", "kind", "missing", "in the test split"), rows, right=("missing",))
    tables.print_more(len(kept) - MAX_COLUMNS, "columns")


def _value(value: float, kind: str) -> str:
    """Return a number, or the day of a datetime, which is in days since 1970."""
    import numpy as np  # Here and not above: no other table needs it. Python's own dates end with the year 9999.

    return str(np.datetime64(math.floor(value), "D")) if kind == "datetime" else f"{value:.4g}"


def print_quality(name: str, quality: "DataQuality | None") -> None:
    """Print what each check says of a dataset, the findings first, and where the pictures lie."""
    print()
    if quality is None:
        print(f"not checked yet: stratagem prepare --set dataset.name={name} --force")
        return
    told = sorted(quality.checks.items(), key=lambda one: not one[1].is_finding)
    tables.print_rows({check: ("warning: " if result.is_finding else "") + result.text for check, result in told})
    print(f"data/{name}/report")
    for picture in quality.pictures:
        print(f"data/{name}/report/{picture}")


def _features(prepared: "PreparedDataset") -> list[str]:
    return [
        f"{name} ({feature.kind} {' x '.join(map(str, feature.shape))})" for name, feature in prepared.features.items()
    ]


@app.command()
def push(name: Which = None, json: Json = False, debug: Debug = False) -> None:
    """Copy prepared data to DVC's remote: `dvc remote add --default storage URL` adds one."""
    with command(debug):
        from tasks.operations import data_folders

        _print_moved("pushed", data_folders.push(name), json)


@app.command()
def pull(name: Which = None, json: Json = False, debug: Debug = False) -> None:
    """Bring the data that data/NAME/dvc.lock names from DVC's remote: nothing is downloaded or prepared then."""
    with command(debug):
        from tasks.operations import data_folders, preconditions

        preconditions.check_writable()
        _print_moved("pulled", data_folders.pull(name), json)


def _print_moved(how: str, datasets: "dict[str, PreparedDataset]", json: bool) -> None:
    if json:
        print(dumps({name: one.model_dump(mode="json") for name, one in datasets.items()}))
        return
    for name, one in datasets.items():
        print(f"{how} data/{name}: data version {one.data_version}")


@app.command()
def diff(
    first: Annotated[str, dataset_argument("A", "A dataset: NAME, or NAME@COMMIT as it was in a commit.")],
    second: Annotated[str, dataset_argument("B", "Another one, or the same in another commit.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell what differs between two prepared datasets: examples, classes, columns, statistics."""
    with command(debug):
        from tasks.operations import data_folders

        found = data_folders.diff(first, second)
        print(found.model_dump_json()) if json else print_difference(found)


def print_difference(found: "DataDifference") -> None:
    """Print what differs between two datasets, a line each."""
    if not found.differences:
        print(f"{found.first} and {found.second} are the same data")
        return
    rows = [
        (what, *("-" if value is None else value for value in values))
        for what, values in list(found.differences.items())[:MAX_DIFFERENCES]
    ]
    tables.print_table(("", found.first, found.second), rows)
    tables.print_more(len(found.differences) - MAX_DIFFERENCES, "differences")


@app.command()
def remove(name: Name, debug: Debug = False) -> None:
    """Remove data/NAME with what was made of the dataset; its source, its runs and models, and files of yours stay."""
    with command(debug):
        from tasks import runs
        from tasks.operations import data_folders

        for left in data_folders.remove(name):
            print(f"left alone: {left}")
        if made := [run for run in runs.list_runs(runs.RunFilter()).runs if run.dataset == name]:
            print(f"left alone: what was trained on it ({len(made):,}): stratagem runs --dataset {name}")
        print(f"removed data/{name}")
