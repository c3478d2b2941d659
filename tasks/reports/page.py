"""Writes a run's report: one self-contained page with its sections after a short summary."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tasks.records import Run
from tasks.reports.blocks import ReportSection, facts
from tasks.reports.blocks import write as write_page
from tasks.reports.charts import Chart
from tasks.reports.material import Material, load
from tasks.reports.sections import SECTIONS
from tasks.system import units


class Written(NamedTuple):
    """A report, and the parts of it that are logged to MLflow."""

    page: Path
    title: str
    metrics: dict[str, float]
    pictures: dict[str, Chart]
    """By file name."""


def write(run: Run, seconds: Mapping[str, float] | None = None) -> Written:
    """Write report/report.html into a run's folder, from its records, its predictions and prepared data, in a second
    and without a framework.

    Args:
        run: the run; the report of an unfinished run is marked as partial.
        seconds: the seconds by stage; None uses those of the run's summary.

    Raises:
        UserError: a record cannot be read.
    """
    material = load(run, seconds)
    sections = [section for make in SECTIONS if (section := make(material)) is not None]
    brief = {name: told for section in sections for name, told in section.brief.items()}
    in_short = ReportSection("In short", [facts(brief)])
    path, title = material.folder / "report" / "report.html", run.name
    if material.evaluation is not None:
        value = material.evaluation.metrics[f"test/{material.headline}"]
        title = f"{run.name}: test {material.headline} {units.metric(value)}"
    write_page(path, title, [in_short, *sections], partial(material))
    metrics = {name: value for section in sections for name, value in section.metrics.items()}
    pictures = {name: chart for section in sections for name, chart in section.pictures.items()}
    return Written(path, title, metrics, pictures)


def partial(material: Material) -> str:
    """Return why the report of a run is partial; an empty text if it is complete."""
    status, missing = material.status, material.missing
    if not missing and status.status not in ("FAILED", "KILLED"):
        return ""
    told = f"the run is {status.status}" + (f" ({status.reason})" if status.reason else "")
    left = f"; it was not {', '.join(missing)}" if missing else ""
    return f"Partial report: {told}{left}. `stratagem report {material.run.run_id}` writes it again."
