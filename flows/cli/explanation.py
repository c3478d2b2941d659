"""`--dry-run`, also called `--explain`: prints what a command would do, and where each of its settings comes from."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tasks.records import Explanation

Explain = Annotated[
    bool,
    typer.Option(
        "--dry-run", "--explain", help="Only tell what would run, what is there, and where each setting comes from."
    ),
]


def explain(recipe: str | None, overrides: Sequence[str], json: bool, beside: Mapping[str, object]) -> None:
    """Print what `stratagem run` would do.

    Args:
        recipe: as the command takes it.
        overrides: as the command takes them.
        json: print a record.
        beside: options of the command that would change what it does, as they were given.

    Raises:
        UserError: one of these was given; or as the command itself.
    """
    from tasks.operations import explanation
    from tasks.system.errors import UserError

    if given := [option for option, value in beside.items() if value]:
        raise UserError(f"{given[0]} with --explain: what is told is of the command without it; give one of them")
    show(explanation.explain(recipe, overrides), json)


def show(found: "Explanation", json: bool) -> None:
    """Print what a command would do."""
    if json:
        print(found.model_dump_json())
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    for rows in (
        [(one.stage, one.does, one.why) for one in found.stages],
        [(one.key, str(one.value), one.source) for one in found.settings],
    ):
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*row)
        console.print(table)
        if rows:
            console.print()
