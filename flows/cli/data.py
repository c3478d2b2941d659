"""`stratagem data`: datasets of the user's own and of TFDS, added, listed, shown, compared, shared and removed."""

from typing import TYPE_CHECKING, Any

from flows.cli import completion, tables
from flows.cli.command import DRY_RUN, RECIPES, SETTINGS, Result, argument, option
from tasks.system.errors import UserError, cut

if TYPE_CHECKING:
    from tasks.records import PreparedDataset


def dataset_argument(metavar: str, help: str, **given: Any) -> Any:
    """Return the declaration of an argument that names a dataset; a shell completes it."""
    return argument(metavar, help, complete=completion.datasets, **given)


NAME = dataset_argument("NAME", "The dataset in data/NAME.")
NAME_OR_ALL = dataset_argument("NAME", "The dataset in data/NAME; by default all.", default=None)

MAX_CLASSES = 30
"""The maximum number of classes that `data show` prints."""
MAX_DIFFERENCES = 60
MAX_COLUMNS = 60


def add(
    source: str = argument(
        "SOURCE",
        "A folder of images (FOLDER/<class>/* or FOLDER/<split>/<class>/*), a table (.csv, .tsv, "
        ".parquet, .jsonl), a .npz file or a folder of .npy files, or a dataset of TFDS (NAME, "
        "NAME/CONFIG, NAME:VERSION; MODULE:CLASS for your own builder).",
    ),
    name: str | None = option("--name", "Name of the dataset; by default that of the source.", "NAME"),
    target: str | None = option(
        "--target", "For a table: the column to predict; separate several with commas.", "COLUMN"
    ),
    overrides: list[str] = option(
        "--set -S",
        "An entry of data/NAME/params.yaml, such as dataset.image_size=[96,96], dataset.test=0.1 or "
        "dataset.on_broken=skip.",
        "KEY=VALUE",
        default=[],
    ),
    dry_run: bool = DRY_RUN,
) -> Result:
    """Add a dataset and prepare it.

    Creates the folder data/NAME; `stratagem run -S dataset.name=NAME` trains on it.
    """
    from flows import plan
    from tasks.operations import dvc_data, preconditions

    values = _described(overrides)
    if target is not None:
        values["target"] = target
    if dry_run:
        yield from tables.show_plan(plan.of_addition(source, name, values))
        return
    preconditions.check_writable()
    prepared = dvc_data.add(source, name, values)
    yield prepared
    print_dataset(prepared)
    print(f"\nTrain on it: stratagem run --set dataset.name={prepared.name}")


def _described(overrides: list[str]) -> dict[str, Any]:
    """Return the entries of data/NAME/params.yaml; refuse other settings."""
    from tasks import config

    values: dict[str, Any] = {}
    for key, value in config.read_texts(overrides).items():
        section, _, own = key.partition(".")
        if section != "dataset" or not own:
            raise UserError(f"--set {key}: `data add` accepts only keys of the dataset, such as dataset.test=0.1")
        group, _, inner = own.partition(".")
        if group not in ("columns", "checks", "metadata", "splits") or not inner:
            values[own] = value
        elif isinstance(values.setdefault(group, {}), dict):
            values[group][inner] = value
    return values


def list_() -> Result:
    """List the datasets in data/."""
    from tasks.operations import data_folders

    found = data_folders.list_datasets()
    yield found
    rows = []
    for name, one in found.items():
        if one is None:
            rows.append((name, "", "not prepared", "", ""))
            continue
        total = sum(split.num_examples for split in one.splits.values())
        rows.append((name, one.kind, ", ".join(_features(one)), f"{total:,}", (one.data_version or "")[:12]))
    tables.print_table(("name", "kind", "features", "examples", "data version"), rows, right=("examples",))


def show(name: str = NAME) -> Result:
    """Show a dataset's features, splits, classes and check results."""
    from tasks.operations import data_folders

    prepared, quality = data_folders.show(name), data_folders.quality(name)
    yield {**prepared.model_dump(), "quality": quality}
    print_dataset(prepared)
    print()
    if quality is None:
        print(f"not checked yet: stratagem data prepare --set dataset.name={name} --force")
        return
    told = sorted(quality.checks.items(), key=lambda one: not one[1].is_finding)
    tables.print_rows({check: ("warning: " if result.is_finding else "") + result.text for check, result in told})
    print(f"data/{name}/report")
    for picture in quality.pictures:
        print(f"data/{name}/report/{picture}")


def print_dataset(prepared: "PreparedDataset") -> None:
    """Print the features, splits and examples per class of a prepared dataset."""
    from tasks.reports.tables import outputs_in_words

    splits = prepared.splits
    tables.print_rows(
        {
            "name": prepared.name,
            "kind": f"{prepared.kind}, version {prepared.version}",
            "data version": prepared.data_version or "not under DVC",
            "folder": prepared.folder,
            "features": ", ".join(_features(prepared)),
            "task": outputs_in_words(prepared.target),
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
    from tasks.reports.tables import describe_columns, moments

    rows = [row for name, feature in prepared.features.items() for row in describe_columns(name, feature)]
    missing = {name: sum(split.num_missing.get(name, 0) for split in prepared.splits.values()) for name, *_ in rows}
    target = prepared.target
    names = target.columns or ("",) * len(target.mean)
    rows += [
        (name, "target", moments((mean,), (deviation,)))
        for name, mean, deviation in zip(names, target.mean, target.deviation, strict=False)
    ]
    cells = [(cut(name), kind, f"{missing.get(name, 0):,}", told) for name, kind, told in rows[:MAX_COLUMNS]]
    tables.print_table(("column", "kind", "missing", "in the training split"), cells, right=("missing",))
    tables.print_more(len(rows) - MAX_COLUMNS, "columns")


def _features(prepared: "PreparedDataset") -> list[str]:
    return [
        f"{name} ({feature.kind} {' x '.join(map(str, feature.shape))})" for name, feature in prepared.features.items()
    ]


def push(name: str | None = NAME_OR_ALL) -> Result:
    """Copy prepared data to DVC's remote.

    `dvc remote add --default storage URL` adds a remote.
    """
    from tasks.operations import data_folders

    yield from _show_moved("pushed", data_folders.push(name))


def pull(name: str | None = NAME_OR_ALL) -> Result:
    """Fetch prepared data from DVC's remote.

    Fetches the data that data/NAME/dvc.lock names, instead of downloading the source and preparing them.
    """
    from tasks.operations import data_folders, preconditions

    preconditions.check_writable()
    yield from _show_moved("pulled", data_folders.pull(name))


def _show_moved(how: str, datasets: "dict[str, PreparedDataset]") -> Result:
    yield datasets
    for name, one in datasets.items():
        print(f"{how} data/{name}: data version {one.data_version}")


def diff(
    first: str = dataset_argument("A", "A dataset: NAME, or NAME@COMMIT for its state in a commit."),
    second: str = dataset_argument("B", "Another dataset, or the same one in another commit."),
) -> Result:
    """Compare two datasets: examples, classes, columns, statistics."""
    from tasks.operations import data_folders

    found = data_folders.diff(first, second)
    yield found
    if not found.differences:
        print(f"{found.first} and {found.second} are the same data")
        return
    shown = dict(list(found.differences.items())[:MAX_DIFFERENCES])
    tables.print_differences((found.first, found.second), shown)
    tables.print_more(len(found.differences) - MAX_DIFFERENCES, "differences")


def remove(name: str = NAME) -> None:
    """Remove data/NAME and the prepared data.

    Keeps the source, the runs and models that used the data, and your own files.
    """
    from tasks.operations import data_folders
    from tasks.runs import listing

    for left in data_folders.remove(name):
        print(f"kept: {left}")
    if made := [run for run in listing.list_runs(listing.RunFilter()).runs if run.dataset == name]:
        print(f"kept: its runs ({len(made):,}): stratagem runs --dataset {name}")
    print(f"removed data/{name}")


def download(recipes: list[str] = RECIPES, overrides: list[str] = SETTINGS) -> Result:
    """Download the dataset and verify its archives."""
    yield from _make("download", recipes, overrides)


def prepare(
    recipes: list[str] = RECIPES,
    overrides: list[str] = SETTINGS,
    force: bool = option("--force", "Prepare again even if nothing has changed."),
) -> Result:
    """Prepare the dataset for training, after a download if needed."""
    yield from _make("prepare", recipes, overrides, force)


def _make(stage: str, recipes: list[str], overrides: list[str], force: bool = False) -> Result:
    from tasks import config
    from tasks.operations import dvc_data, preconditions

    preconditions.check_writable()
    record = dvc_data.prepare_data(config.load(recipes, overrides), stage, force)
    if record is not None:
        yield from tables.show_record(record, ("name", "version", "data_version", "folder"))
