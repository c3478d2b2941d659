"""A run's report: one page that holds all that it shows, and asks no other machine for anything."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tasks import files
from tasks.records import Run
from tasks.report import blocks, calibration, classes, contents, curves, mistakes, numbers, overview, slices
from tasks.report.blocks import ReportSection
from tasks.report.material import Material, load

SECTIONS: tuple[Callable[[Material], ReportSection | None], ...] = (
    overview.origin,
    overview.headline,
    curves.curves,
    classes.by_class,
    classes.confusion,
    calibration.calibration,
    numbers.residuals,
    mistakes.mistakes,
    slices.slices,
    overview.time,
    contents.augmented,
    contents.data,
    contents.model,
    contents.card,
)
"""In the order of the page; one that has nothing to say of a run is None."""
ENDED = ("FAILED", "KILLED")


def write(run: Run, seconds: Mapping[str, float] | None = None) -> Path:
    """Write report/report.html into a run's folder, from its records, what its model gave for the test examples, and
    the prepared data; return where to. No framework is imported, so it can be written again in a second.

    Args:
        run: also one that is unfinished, whose report is then partial, and says so.
        seconds: by stage; without them those of the run's summary, if it has one.

    Raises:
        UserError: a record cannot be read.
    """
    material = load(run, seconds)
    path = material.folder / "report" / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as temporary:
        temporary.write_text(render(material), encoding="utf-8")
    return path


def render(material: Material) -> str:
    """Return the page."""
    sections = [section for make in SECTIONS if (section := make(material)) is not None]
    title = material.run.name
    if material.evaluation is not None:
        title += f": test {material.headline} {material.evaluation.metrics[f'test/{material.headline}']:.4f}"
    return blocks.render(title, sections, partial(material))


def partial(material: Material) -> str:
    """Return why the report of a run is not whole; nothing where it is."""
    status, missing = material.status, material.missing
    ended = status is not None and status.status in ENDED
    if not missing and not ended:
        return ""
    told = f"the run is {status.status}" if status is not None else "nothing is known of how the run ended"
    if status is not None and status.reason:
        told += f" ({status.reason})"
    left = f"; it was not {', '.join(missing)}" if missing else ""
    return f"Partial report: {told}{left}. `stratagem report {material.run.run_id}` writes it again."
