"""`stratagem data`: datasets of the user's own and of TFDS, added, listed, shown and taken away."""

from typing import TYPE_CHECKING, Annotated

import typer

from flows.command import command

if TYPE_CHECKING:
    from tasks.records import PreparedDataset

app = typer.Typer(
    help="Add your own data or a dataset of TFDS; list, show and remove what is there.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the dataset: the folder data/NAME.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON record to standard output, and nothing else there.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
NO_SETTINGS: list[str] = []


@app.command()
def add(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder of images (FOLDER/<class>/* or FOLDER/<split>/<class>/*), a .npz file or a folder of .npy "
            "files, or a dataset of TFDS (NAME, NAME/CONFIG, NAME:VERSION).",
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Of the dataset; without it, that of the source.")
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
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Make the folder data/NAME for a dataset, and prepare it: `stratagem run --set dataset.name=NAME` trains on it."""
    with command(debug):
        from tasks import config, dvc_data, pipeline
        from tasks.errors import UserError

        values = {}
        for key, value in config.read_texts(overrides).items():
            section, _, own = key.partition(".")
            if section != "dataset" or not own:
                raise UserError(f"--set {key}: `data add` takes keys of the dataset alone, such as dataset.test=0.1")
            values[own] = value
        pipeline.check_writable()
        prepared = dvc_data.add(source, name, values)
        if json:
            print(prepared.model_dump_json())
            return
        _print(prepared)
        print(f"\nTrain on it: stratagem run --set dataset.name={prepared.name}")


@app.command("list")
def list_datasets(json: Json = False, debug: Debug = False) -> None:
    """List the datasets in data/."""
    with command(debug):
        from json import dumps

        from rich.console import Console
        from rich.table import Table

        from tasks import dvc_data

        found = dvc_data.list_datasets()
        if json:
            print(dumps({name: one.model_dump(mode="json") if one else None for name, one in found.items()}))
            return
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("name", "kind", "features", "examples", "data version"):
            table.add_column(column, justify="right" if column == "examples" else "left")
        for name, one in found.items():
            if one is None:
                table.add_row(name, "", "not prepared", "", "")
                continue
            total = sum(split.num_examples for split in one.splits.values())
            table.add_row(name, one.kind, ", ".join(_features(one)), f"{total:,}", (one.data_version or "")[:12])
        Console(highlight=False).print(table)


@app.command()
def show(name: Name, json: Json = False, debug: Debug = False) -> None:
    """Show what a prepared dataset holds: its features, its splits and its classes."""
    with command(debug):
        from tasks import dvc_data

        prepared = dvc_data.load_prepared(name)
        print(prepared.model_dump_json()) if json else _print(prepared)


@app.command()
def remove(name: Name, debug: Debug = False) -> None:
    """Remove data/NAME with what was made of the dataset; its source, and files of yours in that folder, stay."""
    with command(debug):
        from tasks import dvc_data

        for left in dvc_data.remove(name):
            print(f"left alone: {left}")
        print(f"removed data/{name}")


def _print(prepared: "PreparedDataset") -> None:
    from rich.console import Console
    from rich.table import Table

    from flows import tables

    splits = prepared.splits
    tables.print_rows(
        {
            "name": prepared.name,
            "kind": f"{prepared.kind}, version {prepared.version}",
            "data version": prepared.data_version or "not under DVC",
            "folder": prepared.folder,
            "features": ", ".join(_features(prepared)),
            "task": f"{prepared.target.task}, {prepared.target.num_outputs} outputs",
        }
    )
    print()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("examples")
    for split in splits:
        table.add_column(split, justify="right")
    table.add_row("all", *(f"{split.num_examples:,}" for split in splits.values()))
    for number, name in enumerate(prepared.target.class_names[:MAX_CLASSES]):
        table.add_row(name, *(f"{split.class_counts[number]:,}" for split in splits.values()))
    Console(highlight=False, markup=False).print(table)
    if (more := len(prepared.target.class_names) - MAX_CLASSES) > 0:
        print(f"and {more:,} classes more: --json has all")


MAX_CLASSES = 30
"""That are printed."""


def _features(prepared: "PreparedDataset") -> list[str]:
    return [
        f"{name} ({feature.kind} {' x '.join(map(str, feature.shape))})".replace(" )", ")")
        for name, feature in prepared.features.items()
    ]
