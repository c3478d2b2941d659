"""`stratagem trace` tells what something was made of, `stratagem reproduce` makes a run once more."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import tables
from flows.cli.command import Debug, Json, command, run_argument

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from tasks.records import Link, Provenance, Reproduction

DIFFERS = 1
"""The exit code where something else came out."""
MAX_LINKS = 30
DIGESTS = ("code", "settings")
# Facts that need no name of their own.
PLAIN = ("status", "dataset", "model", "strategy", "aliases", "subject", "state")


def trace(
    reference: Annotated[
        str,
        run_argument(
            "A version of a model (NAME@ALIAS, NAME/3); a run, a flow run, a data version or a commit, by its id "
            "or the first letters of it; a dataset; or the path of a checkpoint, prepared data, a report or an export.",
            "X",
        ),
    ],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell what something was made of, and what was made of it: from the source of the data to the model's versions."""
    with command(debug):
        from tasks.operations import trace

        found = trace.trace(reference)
        print(found.model_dump_json()) if json else print_provenance(found)


def print_provenance(found: "Provenance") -> None:
    """Print a chain as a tree: what a thing was made of, and what was made of it."""
    from rich.tree import Tree

    link = found.link
    root = Tree(_label(link, whole=True), guide_style="none", highlight=False)
    for title, links in (("made of", link.up), ("made of it", link.down)):
        if links:
            _grow(root.add(title), links)
    tables.print_text(root)
    if found.registry is not None:
        tables.print_text(f"Versions and aliases are as the runs' records have them: {found.registry}")


def _grow(branch: "Tree", links: "Iterable[Link]") -> None:
    """Add links to a branch, each with what it was made of, or what was made of it."""
    from rich.text import Text

    for number, link in enumerate(links):
        if number == MAX_LINKS:
            branch.add(Text("and more: --json has all"))
            return
        _grow(branch.add(_label(link)), (*link.up, *link.down))


def _label(link: "Link", whole: bool = False) -> "Text":
    """Return what a tree says of a thing; digests in it whole, or as many letters of them as tell them apart."""
    from rich.text import Text

    from tasks.system.errors import printable

    name = link.name if whole else tables.shorten_digest(link.name) if link.kind in DIGESTS else link.name
    facts = (text if what in PLAIN else f"{what} {tables.shorten_digest(text)}" for what, text in link.facts.items())
    said = printable(", ".join(facts))
    return Text.assemble((printable(f"{link.kind} {name}"), "bold"), f"\n{said}" if said else "", overflow="fold")


def reproduce(
    name: Annotated[str, run_argument("A run by its id, the first letters of it, or `latest`.")] = "latest",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what has changed since the run; train nothing.")
    ] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Also with other packages, or on another machine.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a run once more, and tell whether the same comes out: the weights, else each metric within its interval.

    Code, settings and data are those of the run, in a folder of its own. Exit code 0: the same; 1: something else.
    """
    with command(debug):
        from tasks.operations import reproduce

        done = reproduce.reproduce(name, allow_changes, dry_run)
        print(done.model_dump_json()) if json else print_reproduction(done)
    if done.same is False:
        sys.exit(DIFFERS)


def print_reproduction(done: "Reproduction") -> None:
    """Print what has changed since a run, and the result of training it again."""
    if done.changes:
        changes = [
            (one.what, tables.format_value(one.then), tables.format_value(one.now), one.effect) for one in done.changes
        ]
        tables.print_table(("", "the run", "today", ""), changes)
    else:
        print("Nothing has changed since this run.")
    if done.metrics:
        print()
        tables.print_metrics(done.metrics, (done.run_id[: tables.SHORT], (done.reproduced_by or "")[: tables.SHORT]))
    verdict = {None: "", True: "reproduced: ", False: "not reproduced: "}[done.same]
    by = f" (run {done.reproduced_by[: tables.SHORT]})" if done.reproduced_by else ""
    tables.print_text(f"\n{verdict}{done.reason}{by}")
