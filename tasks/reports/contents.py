"""Sections on what went in and what came out: data, augmented examples, model, and its card."""

import base64
from collections.abc import Mapping

from tasks.records import PreparedDataset
from tasks.reports import svg
from tasks.reports.blocks import Block, Cell, Figure, Picture, Pictures, ReportSection, TableBlock, Text, facts
from tasks.reports.columns import describe_columns
from tasks.reports.material import Material, layers

BARS = 30
"""Classes up to which they are drawn."""
INTENDED_USE = "intended_use.txt"
"""A text of the user's, in the folder ``report`` of a run."""


def augmented(material: Material) -> ReportSection | None:
    """Return the picture of training images and what augmentation makes of them, where there is one."""
    path = material.folder / "report" / "augmented_examples.png"
    if not path.is_file():
        return None
    uri = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    alt = "a row an image: as it is, then as it may be trained on"
    return ReportSection("Augmented examples", [Pictures([Picture(uri, alt)], large=True)])


def data(material: Material) -> ReportSection:
    """Return what the dataset has: splits, classes, features, what is missing."""
    prepared = material.prepared
    if prepared is None:
        return ReportSection("Data", [Text("The prepared data are not here any more.")])
    facts_of: dict[str, Cell] = {
        "kind": f"{prepared.kind}, version {prepared.version}",
        "task": f"{prepared.target.task}, {_outputs(prepared)}",
        "licence": svg.escaped(prepared.licence or "not known"),
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
    """Return what a model of these data tells, counted."""
    num, names = prepared.target.num_outputs, prepared.target.class_names
    if prepared.target.task == "classification":
        return f"{num:,} classes"
    one = "label" if names else "number"
    return f"{num:,} {one}{'s' * (num > 1)}"


def _splits(prepared: PreparedDataset) -> TableBlock:
    what = "label" if prepared.target.task == "multilabel" else "class"
    ends = [f"smallest {what}", f"largest {what}"] if prepared.target.class_names else []
    rows: list[list[Cell]] = []
    for name, split in prepared.splits.items():
        counts = split.class_counts
        known = [f"{min(counts):,}", f"{max(counts):,}"] if counts else ["-", "-"]
        rows.append([name, f"{split.num_examples:,}", *known[: len(ends)]])
    return TableBlock(("split", "examples", *ends), rows)


def _columns(prepared: PreparedDataset) -> TableBlock:
    """Return what each input is: its kind, what the training split says of it, and how many values are missing."""
    kinds = {name: feature for name, feature in prepared.features.items() if not feature.columns}
    is_any_missing = any(split.num_missing for split in prepared.splits.values())
    rows: list[list[Cell]] = []
    for name, feature in prepared.features.items():
        for column, kind, told in describe_columns(name, feature):
            shape = f" {' x '.join(map(str, feature.shape))}" if name in kinds else ""
            missing = [f"{split.num_missing.get(column, 0):,}" for split in prepared.splits.values()]
            rows.append([svg.escaped(column), f"{kind}{shape}", told or "-", *(missing if is_any_missing else [])])
    header = ("input", "kind", "in the training split")
    more = [f"missing in {split}" for split in prepared.splits] if is_any_missing else []
    return TableBlock((*header, *more), rows, 3, f"Inputs: {len(rows):,}", folded=len(rows) > BARS)


def _counts(counts: Mapping[str, int], what: str) -> Block:
    ordered = dict(sorted(counts.items(), key=lambda item: -item[1]))
    if len(ordered) <= BARS:
        return Figure([svg.bars(f"Training examples by {what}", ordered)])
    rows: list[list[Cell]] = [[svg.escaped(name), f"{count:,}"] for name, count in ordered.items()]
    return TableBlock((what, "examples"), rows, title=f"Training examples by {what}, of {len(rows):,}", folded=True)


def model(material: Material) -> ReportSection | None:
    """Return the layers that have parameters, and how many."""
    training = material.training
    if training is None:
        return None
    found = layers(material)
    rows: list[list[Cell]] = [[svg.escaped(name), kind, f"{size:,}"] for name, kind, size in found]
    told = f"{training.num_parameters:,} parameters, with those that are not trained."
    blocks: list[Block] = [Text(told)]
    if rows:
        title = f"{len(rows)} layers that have parameters"
        blocks.append(TableBlock(("layer", "kind", "parameters"), rows, 2, title, folded=len(rows) > BARS))
    rows_of: dict[str, Cell] = {"model": training.final_model, "sha256 of its weights": training.weights_digest}
    if training.best_model != training.final_model:
        rows_of["model of the best checkpoint"] = training.best_model
    return ReportSection("Model", [*blocks, facts(rows_of)])


def card(material: Material) -> ReportSection:
    """Return what Mitchell et al., Model Cards for Model Reporting (2019), ask of one who gives a model away; what it
    is meant for, only its maker knows."""
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
    rows: dict[str, Cell] = {
        "intended use": svg.escaped(use),
        "model": svg.escaped(f"{settings['model']['name']}, trained from {_beginning(material)}"),
        "training data": svg.escaped(
            f"{settings['dataset']['name']}, version {material.run.lineage.data_version or 'not known'}"
        ),
        "licence of the data": svg.escaped((material.prepared.licence if material.prepared else None) or "not known"),
    }
    if evaluation is not None:
        name = f"test/{material.headline}"
        rows["evaluation"] = f"{name} {evaluation.metrics[name]:.4f} on {evaluation.num_examples:,} examples"
        rows["where it fails"] = "see its mistakes and slices above" if material.predictions else "not known"
    return ReportSection(
        "Model card", [facts(rows), Text("Sections after Mitchell et al., Model Cards for Model Reporting (2019).")]
    )


def _beginning(material: Material) -> str:
    initial = material.run.settings["model"].get("initial")
    return f"the weights of {initial}" if initial else "random weights"
