"""A run's report: one self-contained page."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tasks.records import Run
from tasks.reports import blocks, contents, examples, results
from tasks.reports.blocks import ReportSection
from tasks.reports.charts import Chart
from tasks.reports.material import Material, load

SECTIONS: tuple[Callable[[Material], ReportSection | None], ...] = (
    results.headline,
    contents.origin,
    results.curves,
    results.by_class,
    results.confusion,
    results.calibration,
    results.residuals,
    examples.mistakes,
    examples.slices,
    contents.time,
    contents.augmented,
    contents.data,
    contents.model,
    contents.card,
)
"""In the order of the page, after what it says in short; each returns None if it has nothing to say about a run."""
ENDED = ("FAILED", "KILLED")


class Written(NamedTuple):
    """A report, and the parts of it that are logged to MLflow."""

    page: Path
    title: str
    metrics: dict[str, float]
    pictures: dict[str, Chart]
    """By file name."""


def write(run: Run, seconds: Mapping[str, float] | None = None) -> Written:
    """Write report/report.html into a run's folder, from its records, its predictions and the prepared data. No
    framework is imported, so it can be written again in a second.

    Args:
        run: the report of an unfinished run is partial, and says so.
        seconds: by stage; None takes those of the run's summary, if it has one.

    Raises:
        UserError: a record cannot be read.
    """
    material = load(run, seconds)
    sections = [section for make in SECTIONS if (section := make(material)) is not None]
    brief = {name: told for section in sections for name, told in section.brief.items()}
    in_short = ReportSection("In short", [blocks.facts(brief)])
    path = material.folder / "report" / "report.html"
    blocks.write(path, _title(material), [in_short, *sections], partial(material))
    metrics = {name: value for section in sections for name, value in section.metrics.items()}
    pictures = {name: chart for section in sections for name, chart in section.pictures.items()}
    return Written(path, _title(material), metrics, pictures)


def _title(material: Material) -> str:
    if material.evaluation is None:
        return material.run.name
    value = material.evaluation.metrics[f"test/{material.headline}"]
    return f"{material.run.name}: test {material.headline} {value:.4f}"


def partial(material: Material) -> str:
    """Return why the report of a run is partial; an empty text if it is complete."""
    status, missing = material.status, material.missing
    ended = status is not None and status.status in ENDED
    if not missing and not ended:
        return ""
    told = f"the run is {status.status}" if status is not None else "nothing is known of how the run ended"
    if status is not None and status.reason:
        told += f" ({status.reason})"
    left = f"; it was not {', '.join(missing)}" if missing else ""
    return f"Partial report: {told}{left}. `stratagem report {material.run.run_id}` writes it again."
