"""What `stratagem sweep` prints for a person, in 80 columns."""

from rich.console import Console
from rich.table import Table

from flows.cli.tables import print_rows
from tasks import reports
from tasks.records import Sweep

MOST_TRIALS = 10


def print_sweep(result: Sweep) -> None:
    """Print the best trials, what mattered, and what became of the best."""
    ranked = reports.ranked(result)
    header, rows = reports.sweep_cells(result, ranked[:MOST_TRIALS])
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for place, heading in enumerate(reports.short_names(header)):
        text = place == 1
        table.add_column(_narrow(heading), justify="left" if text else "right", vertical="bottom", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.print(table)
    if (more := len(ranked) - MOST_TRIALS) > 0:
        console.print(f"and {more:,} more: {result.folder}/sweep.csv")
    for remark in reports.sweep_remarks(result):
        console.print(remark)
    final = result.final
    if final is None:
        return
    aliases = " ".join(f"@{alias}" for alias in final.aliases)
    print()
    print_rows(
        {
            "best": f"trial {result.best}, chosen by {result.plan.metric}",
            "trained again": f"on all examples, {final.epochs} epochs, run {final.run_id}",
            **{name.replace("/", " "): f"{value:.4f}" for name, value in final.metrics.items() if name != "test/loss"},
            "model": f"{final.model_version} {aliases}" if final.model_version else f"not registered: {final.reason}",
            **({"champion": final.judgement.told} if final.judgement else {}),
            "sweep": result.run_id,
            "seconds": f"{result.seconds:,.1f}",
            "next": "stratagem ui",
        }
    )
    print(f"{result.folder}/sweep.html")


def _narrow(heading: str) -> str:
    """Return a key in lines that are short, as many columns have to fit."""
    return heading.replace("/", "/\n").replace(".", ".\n").replace("_", "_\n")
