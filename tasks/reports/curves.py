"""Section on what each epoch gave, with the checkpoints that are used."""

from tasks.reports import svg
from tasks.reports.blocks import Figure, ReportSection, Text
from tasks.reports.material import Material


def curves(material: Material) -> ReportSection | None:
    """Return the learning curves: a drawing a metric, a line a split."""
    training = material.training
    if training is None:
        return None
    panels = training.curves
    if not any(len(values) for lines in panels.values() for values in lines.values()):
        return ReportSection("Learning curves", [Text("The training did no whole epoch.")])
    steps = training.steps / max(training.epochs, 1)
    used = {"latest": training.checkpoint, "best": training.best_checkpoint}
    if material.evaluation is not None:
        used = {"evaluated": material.evaluation.checkpoint, **used}
    by_step: dict[int, list[str]] = {}
    for name, path in used.items():
        if (step := path.rpartition("/")[2]).isdigit():
            by_step.setdefault(int(step), []).append(name)
    named = {step: ", ".join(names) for step, names in by_step.items()}
    marks = {name: step / steps for step, name in named.items()} if steps else {}
    drawings = [svg.lines(metric.replace("_", " "), "epoch", lines, marks) for metric, lines in panels.items()]
    told = "; ".join(f"{name} at step {step:,}" for step, name in named.items())
    early = " The training stopped early." if training.stopped_early else ""
    return ReportSection("Learning curves", [Figure(drawings, f"A dashed line is a checkpoint: {told}.{early}")])
