"""What MLflow is told of a comparison and of its runs, beside what it is told of every run."""

from collections.abc import Sequence
from pathlib import Path

from tasks import records, runs
from tasks.tracking.lifecycle import log_files, set_tags
from tasks.tracking.metrics import log_metrics
from tasks.tracking.outbox import MAX_TAG_LENGTH


def log_comparison(run: records.Run, comparison: records.Comparison, page: Path, others: Sequence[Path]) -> None:
    """Give a comparison its table, as files and as its description, and each of its runs the figures of its row.

    They have the same names in all runs, so that MLflow's page for comparing runs shows them in one chart each.

    Args:
        run: the comparison's.
        comparison: its rows name the runs.
        page: the table in Markdown.
        others: files to keep with it.
    """
    for row in comparison.rows:
        if row.reason is not None:
            continue
        figures = {
            "num_replicas": row.num_replicas,
            "seconds_per_epoch": row.seconds_per_epoch,
            "total_seconds": row.total_seconds,
            "speed_up": row.speed_up,
            "efficiency": row.efficiency,
            "start_seconds": row.start_seconds,
            "setup_seconds": row.setup_seconds,
            "tracing_seconds": row.tracing_seconds,
            "peak_memory_bytes": row.peak_memory_bytes,
            **({f"{name}_ms": value for name, value in row.step_time.parts.items()} if row.step_time else {}),
        }
        known = {f"performance/{name}": value for name, value in figures.items() if value is not None}
        for repeat in row.repeats:
            log_metrics(runs.find(repeat.run_id), known | {"performance/load": repeat.load})
    log_files(run, [page, *others], "comparison")
    # MLflow shows a few lines of a description: those of the table, not its heading.
    description = page.read_text(encoding="utf-8").partition("\n\n")[2]
    set_tags(run, {"mlflow.note.content": description[:MAX_TAG_LENGTH]})
