"""What the commands print for a person: short tables that fit 80 columns."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks import config, reports, runs
from tasks.records import (
    HEADLINES,
    LEVELS,
    Comparison,
    EvaluationResult,
    ExportedModel,
    Health,
    Judgement,
    Record,
    Run,
    RunSummary,
    TensorShape,
)
from tasks.system.errors import cut


def print_rows(rows: Mapping[str, str]) -> None:
    """Print a name and a value a line."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)


def print_health(health: Health) -> None:
    """Print a finding a line, and below one that is no good what mends it."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    colours = {"ok": "green", "warning": "yellow", "error": "red"}
    for finding in health.findings:
        level = Text(finding.level, style=colours[finding.level])
        table.add_row(level, finding.check, Text(finding.text))
        if finding.mend is not None:
            table.add_row("", "", Text(f"-> {finding.mend}"))
    Console(highlight=False, markup=False).print(table)
    counts = Counter(finding.level for finding in health.findings)
    print(", ".join(f"{counts[level]} {level}" for level in reversed(LEVELS) if counts[level]))


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
        elif isinstance(value, Judgement):
            field, value = "champion", value.told
        rows[field.replace("_", " ")] = f"{value:,.0f}" if isinstance(value, float) else str(value)
    print_rows(rows)


def print_run(summary: RunSummary, changed: bool = True) -> None:
    """Print what a run ends with: how good it is for each class, the run itself, where its pictures are.

    Args:
        changed: False for a run of before, after which nothing was to do.
    """
    run = runs.find(summary.run_id)
    if evaluated := runs.load_result(run, EvaluationResult):
        print_classes(evaluated)
        print()
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
        **_test_metrics(summary.metrics),
        "checkpoint": summary.checkpoint,
        "model": f"{summary.model_version} {' '.join('@' + alias for alias in summary.aliases)}"
        if summary.model_version
        else f"not registered: {summary.reason}",
        **({"champion": summary.judgement.told} if summary.judgement else {}),
        **({"note": "; ".join(summary.notes)} if summary.notes else {}),
        "run": summary.run_id,
        "finished": summary.finished_at,
        "seconds": f"{summary.seconds['total']:.1f}",
        # Together with the total they would need a second line.
        "of these": ", ".join(f"{name} {seconds:.1f}" for name, seconds in summary.seconds.items() if name != "total"),
        "next": "stratagem ui",
    }
    print_rows(rows)
    print_pictures(run)


def print_export(result: ExportedModel) -> None:
    """Print what an export ends with: what the model takes and gives, how far it is from Keras, where it lies."""
    rows = {
        "run": result.run_id,
        "checkpoint": result.checkpoint,
        "format": result.format,
        "takes": ", ".join(f"{one.name}: {_shape(one)}" for one in result.inputs),
        "gives": ", ".join(map(_shape, result.outputs)),
        "checked": f"{result.num_examples:,} test examples, at most {result.max_difference:.2g} from Keras",
        "files": ", ".join(result.files),
    }
    if result.metrics and result.keras_metrics:
        name = next(f"test/{name}" for name in HEADLINES.values() if f"test/{name}" in result.metrics)
        rows["rounded"] = f"{name} {result.metrics[name]:.4f}, Keras' {result.keras_metrics[name]:.4f}"
    print_rows(rows)
    print(result.folder)  # On a line of its own, as nothing shorter can be opened.


def _shape(one: TensorShape) -> str:
    return f"{one.dtype} ({', '.join(str(size or 'any') for size in one.shape)})"


def _test_metrics(metrics: dict[str, float]) -> dict[str, str]:
    """Return a row for the headline of a test, and one for what else was measured."""
    measured = {name.removeprefix("test/"): f"{value:.4f}" for name, value in metrics.items() if name != "test/loss"}
    headline = next(name for name in HEADLINES.values() if name in measured)
    rows = {f"test {headline}": measured.pop(headline)}
    return rows | ({"others": ", ".join(map(" ".join, measured.items()))} if measured else {})


def print_classes(result: EvaluationResult) -> None:
    """Print precision, recall, f1 and the number of test examples of each class, or label."""
    if not result.classes:
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("class", "precision", "recall", "f1", "examples"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for entry in result.classes:
        table.add_row(
            cut(entry.name), f"{entry.precision:.4f}", f"{entry.recall:.4f}", f"{entry.f1:.4f}", str(entry.support)
        )
    Console(highlight=False, markup=False).print(table)


def print_pictures(run: Run) -> None:
    """Print the paths of the pictures that a run has in its folder, and of its report: a line each, as nothing shorter
    can be opened."""
    root = config.project_root()
    folder = root / run.folder / "report"
    for path in (*sorted(folder.glob("*.png")), *folder.glob("report.html")):
        print(path.relative_to(root))


def print_comparison(result: Comparison) -> None:
    """Print the table that a comparison ends with, in 80 columns."""
    columns, cells = reports.comparison_cells(result, narrow=True)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("strategy", "loop"):
        table.add_column(heading, vertical="bottom")
    for column in columns:
        table.add_column(column.narrow, justify="right")
    for row in cells:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)  # A reason may hold [gpu:0].
    console.print(table)
    headings, steps = reports.step_cells(result, narrow=True)
    if len(headings) > 2:
        parts = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for place, heading in enumerate(headings):
            parts.add_column(heading, justify="right" if place > 1 else "left", vertical="bottom")
        for row in steps:
            parts.add_row(*row)
        console.print()
        console.print(parts)
    for remark in reports.comparison_remarks(result):
        console.print(remark)
    for sentence in result.finding:
        console.print(f"- {sentence}")
    console.print(
        f"{result.model} on {result.dataset}, {result.epochs} epochs, {result.global_batch_size} examples a step"
    )
    console.print(f"page: {result.folder}/comparison.html")
    console.print(f"runs: stratagem ui, under the run {result.run_id}")


def print_strategies() -> None:
    """Print what each strategy offers, with the reasons for what it does not."""
    rows, reasons = reports.offers_cells()
    kinds = config.strategy_kinds()
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("--set")
    for kind in kinds:
        table.add_column(kind.replace("_", "_\n"), vertical="bottom")
    for feature, *marks in rows:
        table.add_row(_fold(feature, 22), *marks)
    Console(highlight=False).print(table)
    print_rows(reasons)
    for backend in dict.fromkeys(section.backend for section in kinds.values()):
        print(f"on {backend}: {', '.join(kind for kind in kinds if kinds[kind].backend == backend)}")


def _fold(name: str, width: int) -> str:
    """Return a long name in two lines, broken after `=`, `_` or `.`."""
    if len(name) <= width:
        return name
    cut = max(name.rfind(sign, 0, width) for sign in "=_.") + 1
    return f"{name[:cut]}\n {name[cut:]}"


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
