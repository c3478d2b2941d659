"""Sections on the run itself: what was trained on what, how good it is in one number, and where the time went."""

from typing import Any

from tasks import config
from tasks.errors import UserError
from tasks.report import intervals, svg
from tasks.report.blocks import Block, Cell, Figure, ReportSection, TableBlock, Text, facts
from tasks.report.material import Material

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
        rows["optimizer"] = training.optimizer or ""
        rows["restarts"] = "; ".join(training.restarts)
    rows["resumed with"] = "; ".join(f"{one.what} {one.values}" for one in run.changed)
    if material.evaluation is not None:
        rows["evaluated"] = f"{material.evaluation.num_examples:,} test examples, {material.evaluation.checkpoint}"
    if (registered := material.registered) is not None:
        aliases = " ".join(f"@{alias}" for alias in registered.aliases)
        version = f"{registered.model_name}/{registered.model_version} {aliases}"
        rows["registered"] = version if registered.model_version else f"no: {registered.reason}"
        rows["champion"] = registered.judgement.told if registered.judgement is not None else ""
        rows["notes"] = "; ".join(registered.notes)
    rows |= {"run": run.run_id, "experiment": run.experiment}
    blocks: list[Block] = [facts({name: svg.escaped(str(value)) for name, value in rows.items() if value})]
    return ReportSection("What was trained on what", [*blocks, *_settings(settings)])


def _settings(settings: dict[str, Any]) -> list[Block]:
    own = config.flat(settings)
    every: list[list[Cell]] = [[key, svg.escaped(f"{value}")] for key, value in sorted(own.items())]
    folded = TableBlock(("setting", "value"), every, 2, f"All {len(every)} settings", folded=True)
    try:
        defaults = config.load().flat()
    except UserError:
        return [Text("params.yaml cannot be read now, so nothing is said of what differs from it."), folded]
    rows: list[list[Cell]] = [
        [key, svg.escaped(f"{value}"), svg.escaped(f"{defaults.get(key, '-')}")]
        for key, value in sorted(own.items())
        if value != defaults.get(key)
    ]
    if not rows:
        return [Text("All settings are those of params.yaml."), folded]
    title = "Settings that are not those of params.yaml, as it was when this was written"
    return [TableBlock(("setting", "this run", "params.yaml"), rows[:MOST_SETTINGS], 3, title), folded]


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
        f"Each interval has the middle {intervals.CONFIDENCE:.0%} of what the metric is for as many test examples, "
        "drawn again 1,000 times with replacement (the bootstrap; Efron and Tibshirani, 1993). It says how sure the "
        "number is for other examples like these, and nothing about another training."
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
        blocks.append(Figure([svg.bars(title, parts, ",.2f")]))
    if training is not None:
        rows: dict[str, Cell] = {"from the training's beginning to its first step": f"{training.setup_seconds:,.2f} s"}
        if training.first_call_seconds is not None:
            rows["first call of the step function, which traces and compiles"] = f"{training.first_call_seconds:,.2f} s"
        if training.epoch_seconds:
            mean = sum(training.epoch_seconds) / len(training.epoch_seconds)
            rows["an epoch, on average, with its validation"] = f"{mean:,.2f} s"
        if training.examples_per_second is not None:
            rows["examples a second, after the first call"] = f"{training.examples_per_second:,.0f}"
        blocks.append(facts(rows))
    return ReportSection("Where the time went", blocks) if blocks else None
