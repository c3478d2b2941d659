"""`--explain`: what a command would do, and where each of its settings comes from, in place of doing it."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

Explain = Annotated[
    bool, typer.Option("--explain", help="Only tell what would run, what is cached, and where each setting comes from.")
]


def explain(recipe: str | None, overrides: Sequence[str], json: bool, stages: Sequence[str] = ()) -> None:
    """Print what a command would do.

    Args:
        recipe: as the command takes it.
        overrides: as the command takes them.
        json: print a record.
        stages: that the command has; without one, all.
    """
    from tasks import explanation

    found = explanation.explain(recipe, overrides, stages or explanation.STAGES)
    if json:
        print(found.model_dump_json())
        return
    console = Console(highlight=False, markup=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for stage in found.stages:
        table.add_row(stage.stage, stage.does, stage.why)
    console.print(table)
    console.print()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for setting in found.settings:
        table.add_row(setting.key, str(setting.value), setting.source)
    console.print(table)
