"""Sections on what went in and what came out: settings, time, data, augmented examples, model, and its card."""

import base64
import json
from collections.abc import Mapping
from typing import Any

from tasks import config
from tasks.records import PreparedDataset
from tasks.reports import charts
from tasks.reports.blocks import Block, Figure, Picture, Pictures, ReportSection, TableBlock, Text, facts
from tasks.reports.material import Material, layers
from tasks.reports.tables import describe_columns
from tasks.system.errors import UserError

MOST_SETTINGS = 40
BARS = 30
"""Up to so many classes are drawn, and so many columns or layers shown unfolded."""
INTENDED_USE = "intended_use.txt"
"""The user writes it in the folder ``report`` of a run."""


def origin(material: Material) -> ReportSection:
    """Return which model was trained on which data, and the settings that differ from params.yaml."""
    run, training = material.run, material.training
    lineage, settings = run.lineage, run.settings
    package = {"code": f"stratagem {lineage.package_version}"} if lineage.package_version else {}
    rows = {
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
    blocks: list[Block] = [facts({name: str(value) for name, value in rows.items() if value})]
    judged = {name: rows[name] for name in ("champion", "registered") if rows.get(name)}
    brief = dict(list(judged.items())[:1]) or {"champion": "not judged: the run registered no model yet"}
    return ReportSection("Model, data and settings", [*blocks, *_settings(settings)], brief=brief)


def _settings(settings: dict[str, Any]) -> list[Block]:
    own = config.flat(settings)
    every = [[key, _written(value)] for key, value in sorted(own.items())]
    folded = TableBlock(("setting", "value"), every, 2, f"All {len(every)} settings", folded=True)
    try:
        defaults = config.load().flat()
    except UserError:
        return [Text("params.yaml cannot be read now, so nothing is said of what differs from it."), folded]
    rows = [
        [key, _written(value), _written(defaults[key]) if key in defaults else "-"]
        for key, value in sorted(own.items())
        if value != defaults.get(key)
    ]
    if not rows:
        return [Text("All settings are those of params.yaml."), folded]
    title = "Settings that are not those that params.yaml had when this page was written"
    return [TableBlock(("setting", "this run", "params.yaml"), rows[:MOST_SETTINGS], 3, title), folded]


def _optimizer(kind: str, class_name: str) -> str:
    """Return the optimizer's kind, and its class if that has another name, as this project's for TensorFlow."""
    return kind if class_name.lower() == kind else f"{kind} ({class_name})"


def _written(value: Any) -> str:
    """Return a setting as it is written in params.yaml: null, true, 0.1, or a text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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
        blocks.append(Figure([charts.bars(title, parts, ",.2f")], told))
    if training is not None:
        rows = {"preparing the training: model, input, checkpoint": f"{training.setup_seconds:,.2f} s"}
        if training.first_call_seconds is not None:
            rows["first training step, which traces and compiles"] = f"{training.first_call_seconds:,.2f} s"
        if training.epoch_seconds:
            mean = sum(training.epoch_seconds) / len(training.epoch_seconds)
            rows["each epoch, on average, with its validation"] = f"{mean:,.2f} s"
        if training.examples_per_second is not None:
            rows["training examples a second, after the first step"] = f"{training.examples_per_second:,.0f}"
        blocks.append(facts(rows))
    return ReportSection("Where the time went", blocks) if blocks else None


def augmented(material: Material) -> ReportSection | None:
    """Return the picture of augmented training images, if there is one."""
    path = material.folder / "report" / "augmented_examples.png"
    if not path.is_file():
        return None
    uri = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    alt = "a row an image: as it is, then as it may be trained on"
    return ReportSection("Augmented examples", [Pictures([Picture(uri, alt)], large=True)])


def data(material: Material) -> ReportSection:
    """Return splits, classes, features and missing values of the dataset."""
    prepared = material.prepared
    if prepared is None:
        return ReportSection("Data", [Text("The prepared data are not here any more.")])
    facts_of = {
        "kind": f"{prepared.kind}, version {prepared.version}",
        "task": f"{prepared.target.task}, {_outputs(prepared)}",
        "licence": prepared.licence or "not known",
    }
    if prepared.held_out is not None:
        held = prepared.held_out
        facts_of["test split"] = f"{held.num_examples:,} examples drawn from the training split with seed {held.seed}"
    blocks: list[Block] = []
    if material.evaluation is not None and material.test is None:
        blocks.append(Text("These data are others than those that this run was evaluated on."))
    blocks += [facts(facts_of), _splits(prepared), _columns(prepared)]
    counts = dict(zip(prepared.target.class_names, prepared.splits["train"].class_counts, strict=False))
    if counts:
        blocks.append(_counts(counts, "label" if prepared.target.task == "multilabel" else "class"))
    return ReportSection("Data", blocks)


def _outputs(prepared: PreparedDataset) -> str:
    """Return the number of outputs in words."""
    num, names = prepared.target.num_outputs, prepared.target.class_names
    if prepared.target.task == "classification":
        return f"{num:,} classes"
    one = "label" if names else "number"
    return f"{num:,} {one}{'s' * (num > 1)}"


def _splits(prepared: PreparedDataset) -> TableBlock:
    what = "label" if prepared.target.task == "multilabel" else "class"
    ends = [f"smallest {what}", f"largest {what}"] if prepared.target.class_names else []
    rows: list[list[str]] = []
    for name, split in prepared.splits.items():
        counts = split.class_counts
        known = [f"{min(counts):,}", f"{max(counts):,}"] if counts else ["-", "-"]
        rows.append([name, f"{split.num_examples:,}", *known[: len(ends)]])
    return TableBlock(("split", "examples", *ends), rows)


def _columns(prepared: PreparedDataset) -> TableBlock:
    """Return kind, statistics in the training split, and number of missing values of each input."""
    kinds = {name: feature for name, feature in prepared.features.items() if not feature.columns}
    is_any_missing = any(split.num_missing for split in prepared.splits.values())
    rows: list[list[str]] = []
    for name, feature in prepared.features.items():
        for column, kind, told in describe_columns(name, feature):
            shape = f" {' x '.join(map(str, feature.shape))}" if name in kinds else ""
            missing = [f"{split.num_missing.get(column, 0):,}" for split in prepared.splits.values()]
            rows.append([column, f"{kind}{shape}", told or "-", *(missing if is_any_missing else [])])
    header = ("input", "kind", "in the training split")
    more = [f"missing in {split}" for split in prepared.splits] if is_any_missing else []
    return TableBlock((*header, *more), rows, 3, f"Inputs: {len(rows):,}", folded=len(rows) > BARS)


def _counts(counts: Mapping[str, int], what: str) -> Block:
    ordered = dict(sorted(counts.items(), key=lambda item: -item[1]))
    if len(ordered) <= BARS:
        return Figure([charts.bars(f"Training examples by {what}", ordered)])
    rows = [[name, f"{count:,}"] for name, count in ordered.items()]
    return TableBlock((what, "examples"), rows, title=f"Training examples by {what}, of {len(rows):,}", folded=True)


def model(material: Material) -> ReportSection | None:
    """Return the layers that have parameters, with their number."""
    training = material.training
    if training is None:
        return None
    found = layers(material)
    rows = [[name, kind, f"{size:,}"] for name, kind, size in found]
    told = f"{training.num_parameters:,} parameters, with those that are not trained."
    blocks: list[Block] = [Text(told)]
    if rows:
        title = f"{len(rows)} layers that have parameters"
        blocks.append(TableBlock(("layer", "kind", "parameters"), rows, 2, title, folded=len(rows) > BARS))
    rows_of = {"model": training.final_model, "sha256 of its weights": training.weights_digest}
    if training.best_model != training.final_model:
        rows_of["model of the best checkpoint"] = training.best_model
    return ReportSection("Model", [*blocks, facts(rows_of)])


def card(material: Material) -> ReportSection:
    """Return the card of Mitchell et al., Model Cards for Model Reporting (2019); the user writes the intended use."""
    path = material.folder / "report" / INTENDED_USE
    place = f"{material.run.folder}/report/{INTENDED_USE}"
    try:
        intended = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        intended = ""
    use = intended or (
        f"Left to you. Write what the model is for, for whom, and what it must not be used for into {place}, and run "
        f"`stratagem report {material.run.run_id}`."
    )
    settings, evaluation = material.run.settings, material.evaluation
    initial = settings["model"].get("initial")
    beginning = f"the weights of {initial}" if initial else "random weights"
    rows = {
        "intended use": use,
        "model": f"{settings['model']['name']}, trained from {beginning}",
        "training data": f"{settings['dataset']['name']}, version {material.run.lineage.data_version or 'not known'}",
        "licence of the data": (material.prepared.licence if material.prepared else None) or "not known",
    }
    if evaluation is not None:
        name = f"test/{material.headline}"
        rows["evaluation"] = f"{name} {evaluation.metrics[name]:.4f} on {evaluation.num_examples:,} examples"
        rows["where it fails"] = "see its mistakes and slices above" if material.predictions else "not known"
    return ReportSection(
        "Model card", [facts(rows), Text("Sections after Mitchell et al., Model Cards for Model Reporting (2019).")]
    )
