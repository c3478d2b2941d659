"""`--explain`: what a command would do, and where each of its settings comes from, in place of doing it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

Explain = Annotated[
    bool, typer.Option("--explain", help="Only tell what would run, what is cached, and where each setting comes from.")
]


def explain(
    recipe: str | None,
    overrides: Sequence[str],
    json: bool,
    stages: Sequence[str] = (),
    beside: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Print what a command would do.

    Args:
        recipe: as the command takes it.
        overrides: as the command takes them.
        json: print a record.
        stages: that the command has; without one, all.
        beside: options of the command that would change what it does, as they were given.

    Raises:
        UserError: one of these was given; or as the command itself.
    """
    from tasks import explanation
    from tasks.errors import UserError

    if given := [option for option, value in beside.items() if value]:
        raise UserError(f"{given[0]} with --explain: what is told is of the command without it; give one of them")
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
