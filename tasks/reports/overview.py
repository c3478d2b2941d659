"""Sections on the run itself: its model, data and settings, how good it is in one number, and where the time went."""

import json
from typing import Any

from tasks import config
from tasks.reports import intervals, svg
from tasks.reports.blocks import Block, Cell, Figure, ReportSection, TableBlock, Text, facts
from tasks.reports.material import Material
from tasks.system.errors import UserError

MOST_SETTINGS = 40


def origin(material: Material) -> ReportSection:
    """Return which model was trained on which data, and the settings that differ from params.yaml."""
    run, training = material.run, material.training
    lineage, settings = run.lineage, run.settings
    package = {"code": f"stratagem {lineage.package_version}"} if lineage.package_version else {}
    rows: dict[str, Cell] = {
        "dataset": str(settings["dataset"]["name"]),
        "data version": lineage.data_version or "not under DVC",
        "git commit": f"{lineage.git_commit or 'none'}{' with changes' if lineage.git_dirty else ''}",
        **package,
        "model": str(settings["model"]["name"]),
        "strategy": str(settings["strategy"]["kind"]),
        "seed": str(settings["train"]["seed"]),
    }
    if training is not None:
        replicas = f"{training.num_replicas} replica{'s' * (training.num_replicas > 1)}"
        rows["strategy"] = f"{training.strategy}, {replicas} on {', '.join(training.devices)}, loop {training.loop}"
        rows["trained"] = (
            f"{training.epochs} epochs, {training.steps:,} steps of {training.global_batch_size:,} examples"
        )
        rows["optimizer"] = _optimizer(str(settings["optimizer"]["kind"]), training.optimizer)
        rows["restarts"] = "; ".join(training.restarts)
    rows["resumed with"] = "; ".join(f"{one.what} {one.values}" for one in run.changed)
    if material.evaluation is not None:
        rows["evaluated"] = (
            f"{material.evaluation.num_examples:,} test examples, with the weights of {material.evaluation.checkpoint}"
        )
    if (registered := material.registered) is not None:
        aliases = " ".join(f"@{alias}" for alias in registered.aliases)
        version = f"{registered.model_name}/{registered.model_version} {aliases}"
        rows["registered"] = version if registered.model_version else f"no: {registered.reason}"
        rows["champion"] = registered.judgement.told if registered.judgement is not None else ""
        rows["notes"] = "; ".join(registered.notes)
    rows |= {"run": run.run_id, "experiment": run.experiment}
    blocks: list[Block] = [facts({name: svg.escaped(str(value)) for name, value in rows.items() if value})]
    return ReportSection("Model, data and settings", [*blocks, *_settings(settings)])


def _settings(settings: dict[str, Any]) -> list[Block]:
    own = config.flat(settings)
    every: list[list[Cell]] = [[key, _written(value)] for key, value in sorted(own.items())]
    folded = TableBlock(("setting", "value"), every, 2, f"All {len(every)} settings", folded=True)
    try:
        defaults = config.load().flat()
    except UserError:
        return [Text("params.yaml cannot be read now, so nothing is said of what differs from it."), folded]
    rows: list[list[Cell]] = [
        [key, _written(value), _written(defaults[key]) if key in defaults else "-"]
        for key, value in sorted(own.items())
        if value != defaults.get(key)
    ]
    if not rows:
        return [Text("All settings are those of params.yaml."), folded]
    title = "Settings that are not those that params.yaml had when this page was written"
    return [TableBlock(("setting", "this run", "params.yaml"), rows[:MOST_SETTINGS], 3, title), folded]


def _optimizer(kind: str, class_name: str) -> str:
    """Return the kind of the settings, with the class that changed the weights where it has another name: one of this
    project for TensorFlow, or one of a user's own model."""
    return kind if class_name.lower() == kind else f"{kind} ({class_name})"


def _written(value: Any) -> Cell:
    """Return a setting as a user writes it in params.yaml: null, true, 0.1, or a text."""
    return svg.escaped(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def headline(material: Material) -> ReportSection | None:
    """Return the test metrics, with intervals."""
    if material.evaluation is None:
        return None
    rows: list[list[Cell]] = []
    measured = dict(material.evaluation.metrics)
    metrics: dict[str, float] = {}
    first = f"test/{material.headline}"
    for name in sorted(measured, key=lambda name: (name != first, name)):
        found = intervals.of_metric(material, name.removeprefix("test/"))
        rows.append([name, f"{measured[name]:.4f}", f"{found.low:.4f} to {found.high:.4f}" if found else "-"])
        if found is not None:
            metrics |= {f"interval/{name}/low": found.low, f"interval/{name}/high": found.high}
    said = (
        "How an interval is found: as many examples as the test split has are drawn from it with replacement, 1,000 "
        f"times, and the metric is measured on each draw; the interval holds the middle {intervals.CONFIDENCE:.0%} of "
        "these values (the bootstrap; Efron and Tibshirani, 1993). It says how far the metric may be off because the "
        "test split has these examples and no others, and nothing about another training."
    )
    if material.predictions is None:
        said = (
            "There are no intervals, no calibration, no mistakes and no slices: what the model gave for each example "
            f"was not kept, or is gone. `stratagem evaluate --run {material.run.run_id}` makes it again."
        )
    elif any(row[2] == "-" for row in rows):
        said += " A metric without one (-) would take too long, or is a loss of another kind."
    return ReportSection("Test metrics", [TableBlock(("metric", "value", "95 % interval"), rows), Text(said)], metrics)


def time(material: Material) -> ReportSection | None:
    """Return where the time went."""
    training = material.training
    blocks: list[Block] = []
    parts = {name: seconds for name, seconds in material.seconds.items() if name != "total"}
    if parts:
        total = material.seconds.get("total")
        if total is not None and (rest := total - sum(parts.values())) > 0:
            parts["the rest"] = round(rest, 3)
        title = "Seconds by stage" + (f", {total:,.1f} in all" if total is not None else "")
        told = "The rest is the command's start and end, and what Prefect and DVC take." if "the rest" in parts else ""
        blocks.append(Figure([svg.bars(title, parts, ",.2f")], told))
    if training is not None:
        rows: dict[str, Cell] = {"preparing the training: model, input, checkpoint": f"{training.setup_seconds:,.2f} s"}
        if training.first_call_seconds is not None:
            rows["first training step, which traces and compiles"] = f"{training.first_call_seconds:,.2f} s"
        if training.epoch_seconds:
            mean = sum(training.epoch_seconds) / len(training.epoch_seconds)
            rows["each epoch, on average, with its validation"] = f"{mean:,.2f} s"
        if training.examples_per_second is not None:
            rows["training examples a second, after the first step"] = f"{training.examples_per_second:,.0f}"
        blocks.append(facts(rows))
    return ReportSection("Where the time went", blocks) if blocks else None
