"""What the commands print for a person: short tables that fit 80 columns."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tasks import config
from tasks.records import EvaluationResult, Record, RunSummary


def print_rows(rows: Mapping[str, str]) -> None:
    """Print a name and a value a line."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)


def print_record(record: Record | None, json: bool, fields: tuple[str, ...]) -> None:
    """Print a record as JSON, or some of its fields as a short table."""
    if record is None:
        return
    if json:
        print(record.model_dump_json())
        return
    rows = {}
    for field in fields:
        value = getattr(record, field)
        if isinstance(value, dict):
            value = ", ".join(f"{name} {number:.4f}" for name, number in value.items())
        elif isinstance(value, tuple):
            value = ", ".join(map(str, value))
        rows[field.replace("_", " ")] = f"{value:,.0f}" if isinstance(value, float) else str(value)
    print_rows(rows)


def print_summary(summary: RunSummary, changed: bool = True) -> None:
    """Print the short table that a run ends with."""
    if not changed:
        print("Nothing to do: data, settings and code are those of this finished run:")
    speed = (
        "one call of the step function only"
        if summary.examples_per_second is None
        else f"{summary.examples_per_second:,.0f}"
    )
    replicas = f"{summary.num_replicas} replica{'s' * (summary.num_replicas > 1)}"
    rows = {
        "dataset": f"{summary.dataset}, data version {(summary.data_version or 'not under DVC')[:12]}",
        "strategy": f"{summary.strategy}, {replicas}, loop {summary.loop}",
        "trained": f"{summary.epochs} epochs, {summary.steps:,} steps",
        "examples/s": speed,
        **{f"test {name}": f"{summary.metrics[f'test/{name}']:.4f}" for name in config.names_of("metrics")},
        "checkpoint": summary.checkpoint,
        "model": f"{summary.model_version} {' '.join('@' + alias for alias in summary.aliases)}"
        if summary.model_version
        else f"not registered: {summary.reason}",
        **({"note": "; ".join(summary.notes)} if summary.notes else {}),
        "run": summary.run_id,
        "finished": summary.finished_at,
        "seconds": ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in summary.seconds.items()),
        "next": "stratagem ui",
    }
    print_rows(rows)


def print_classes(result: EvaluationResult) -> None:
    """Print precision, recall, f1 and the number of test examples of each class."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("class", "precision", "recall", "f1", "examples"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for entry in result.classes:
        table.add_row(
            entry.name, f"{entry.precision:.4f}", f"{entry.recall:.4f}", f"{entry.f1:.4f}", str(entry.support)
        )
    Console(highlight=False, markup=False).print(table)


def print_pictures(folder: Path, root: Path) -> None:
    """Print the paths of the pictures that a run has in its folder: a line each, as nothing shorter can be opened."""
    for path in sorted((folder / "report").glob("*.png")):
        print(path.relative_to(root))


def print_recipes(recipes: Mapping[str, Path]) -> None:
    """Print each recipe's name and what it is."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("recipe")
    table.add_column("what it is", overflow="fold")
    for name, path in recipes.items():
        table.add_row(name, _description(path))
    Console(highlight=False, markup=False).print(table)


def _description(recipe: Path) -> str:
    """Return what a recipe's first comment says it is: all of its lines, up to the first command to type."""
    lines = []
    for line in recipe.read_text(encoding="utf-8").splitlines():
        said = line.removeprefix("#")
        if said == line or said.startswith("  ") or not said.strip():
            break
        lines.append(said.strip())
    return " ".join(lines)
