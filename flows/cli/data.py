"""`stratagem data`: datasets of the user's own and of TFDS, added, listed, shown, compared, shared and taken away."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli import completion
from flows.cli.command import NO_SETTINGS, Debug, Json, command
from flows.cli.explanation import Explain
from flows.cli.explanation import show as show_explanation

if TYPE_CHECKING:
    from tasks.records import PreparedDataset

app = typer.Typer(
    help="Add your own data or a dataset of TFDS; list, show, compare, share and remove what is there.",
    no_args_is_help=True,
)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Of the dataset: the folder data/NAME.", autocompletion=completion.datasets),
]


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
        from flows.cli import data_tables
        from tasks import config
        from tasks.operations import dvc_data, explanation, preconditions

        values = _described(overrides)
        if target is not None:
            values["target"] = target
        if explain:
            show_explanation(explanation.add(source, name, values), json)
            return
        preconditions.check_writable()
        prepared = dvc_data.add(source, name, values)
        if json:
            print(prepared.model_dump_json())
            return
        data_tables.print_dataset(prepared)
        train = f"stratagem run --set dataset.name={prepared.name}"
        # Without a recipe, its settings are chosen for it, and validate on such a split.
        if "validation" in prepared.splits and config.choices(None, {"dataset": {"name": prepared.name}}) is None:
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
        if group not in ("columns", "checks", "metadata") or not inner:
            values[own] = value
        elif isinstance(values.setdefault(group, {}), dict):
            values[group][inner] = value
    return values


@app.command("list")
def list_datasets(json: Json = False, debug: Debug = False) -> None:
    """List the datasets in data/."""
    with command(debug):
        from json import dumps

        from flows.cli import data_tables
        from tasks.operations import data_folders

        found = data_folders.list_datasets()
        if json:
            print(dumps({name: one.model_dump(mode="json") if one else None for name, one in found.items()}))
            return
        data_tables.print_datasets(found)


@app.command()
def show(name: Name, json: Json = False, debug: Debug = False) -> None:
    """Show what a prepared dataset holds: its features, its splits and its classes, and what the checks found."""
    with command(debug):
        from json import dumps

        from flows.cli import data_tables
        from tasks.operations import data_folders

        prepared, quality = data_folders.show(name), data_folders.quality(name)
        if json:
            told = quality.model_dump(mode="json") if quality else None
            kept = {column: one.model_dump(mode="json") for column, one in data_folders.metadata(prepared).items()}
            print(dumps({**prepared.model_dump(mode="json"), "kept": kept, "quality": told}))
            return
        data_tables.print_dataset(prepared)
        data_tables.print_metadata(data_folders.metadata(prepared))
        data_tables.print_quality(name, quality)


Which = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="Of the dataset: the folder data/NAME; without it, all.",
        autocompletion=completion.datasets,
    ),
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
    from json import dumps

    if json:
        print(dumps({name: one.model_dump(mode="json") for name, one in datasets.items()}))
        return
    for name, one in datasets.items():
        print(f"{how} data/{name}: data version {one.data_version}")


@app.command()
def diff(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A dataset: NAME, or NAME@COMMIT as it was in a commit.",
            autocompletion=completion.datasets,
        ),
    ],
    second: Annotated[
        str,
        typer.Argument(
            metavar="B", help="Another one, or the same in another commit.", autocompletion=completion.datasets
        ),
    ],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell what differs between two prepared datasets: examples, classes, columns, statistics."""
    with command(debug):
        from flows.cli import data_tables
        from tasks.operations import data_folders

        found = data_folders.diff(first, second)
        print(found.model_dump_json()) if json else data_tables.print_difference(found)


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
