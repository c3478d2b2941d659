"""What a report is written from: the records of a run, the outputs for the test examples, and these examples."""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config, runs
from tasks.data.encoding.rows import probabilities
from tasks.evaluation import predictions, slices
from tasks.evaluation.predictions import Bins, Predictions, bins
from tasks.evaluation.slices import TestExamples
from tasks.records import (
    HEADLINES,
    EvaluationResult,
    Placement,
    PreparedDataset,
    RegisteredModel,
    Run,
    RunStatus,
    RunSummary,
    Task,
    TrainingResult,
)
from tasks.records.record import load_or_none
from tasks.system import files


@dataclass(frozen=True)
class Material:
    """All that is known of a run."""

    run: Run
    folder: Path
    """Of the run, absolute."""
    status: RunStatus | None
    training: TrainingResult | None
    evaluation: EvaluationResult | None
    registered: RegisteredModel | None
    prepared: PreparedDataset | None
    """None if the data are gone."""
    predictions: Predictions | None
    test: TestExamples | None
    """None if the evaluation had other test rows."""
    seconds: Mapping[str, float]
    """By stage; empty if the run is not finished."""

    @property
    def task(self) -> Task:
        """The task; classification for a run that was not evaluated and whose data are gone."""
        if self.evaluation is None:
            return self.prepared.target.task if self.prepared else "classification"
        if self.evaluation.confusion_matrix:
            return "classification"
        return "multilabel" if self.evaluation.classes else "regression"

    @property
    def headline(self) -> str:
        """The metric of the task."""
        return HEADLINES[self.task]

    @property
    def missing(self) -> list[str]:
        """The stages that the run has not completed."""
        stages = {"trained": self.training, "evaluated": self.evaluation, "registered": self.registered}
        return [name for name, record in stages.items() if record is None]

    @cached_property
    def probabilities(self) -> npt.NDArray[np.float64]:
        """The probability of each class or label, (n, num_outputs)."""
        found: npt.NDArray[np.float64] = probabilities(self.task, self.predicted.outputs)
        return found

    @property
    def predicted(self) -> Predictions:
        """The predictions; only for sections that have checked that there are any."""
        if self.predictions is None:
            raise ValueError("there are no predictions")
        return self.predictions

    @cached_property
    def scores(self) -> npt.NDArray[np.float64]:
        """How good each test example is: 1 where the class is right and 0 where not, the share of labels that are
        right, or of a regression the mean absolute error, (n,)."""
        return slices.scores(self.task, *self.predicted)

    @cached_property
    def binned(self) -> Bins | None:
        """The predictions by confidence; None for a regression, and without predictions."""
        if self.predictions is None or self.task == "regression":
            return None
        labels, shares = self.predictions.labels, self.probabilities
        if self.task == "classification":
            return bins(shares.max(axis=1), self.scores)
        return bins(shares.ravel(), (labels == 1).ravel(), "share that has the label")

    @property
    def class_names(self) -> list[str]:
        """Of classes, or labels."""
        return [entry.name for entry in self.evaluation.classes] if self.evaluation else []


def load(run: Run, seconds: Mapping[str, float] | None = None) -> Material:
    """Read what there is of a run.

    Args:
        run: whole or not.
        seconds: by stage; without them those of the run's summary.
    """
    root = config.project_root()
    evaluation = runs.load_result(run, EvaluationResult)
    name = str(run.settings.get("dataset", {}).get("name"))
    prepared = load_or_none(PreparedDataset, root / "data" / name / "prepared" / "manifest.json")
    found = None
    if evaluation is not None:
        found = predictions.load(root / evaluation.outputs, evaluation.outputs_sha256)
    if seconds is None:
        summary = load_or_none(RunSummary, root / run.folder / "summary.json")
        seconds = summary.seconds if summary is not None else {}
    same = prepared is not None and evaluation is not None and evaluation.test_rows == predictions.test_rows(prepared)
    return Material(
        run=run,
        folder=root / run.folder,
        status=runs.status(run),
        training=runs.load_result(run, TrainingResult),
        evaluation=evaluation,
        registered=runs.load_result(run, RegisteredModel),
        prepared=prepared,
        predictions=found,
        test=slices.load(prepared) if prepared is not None and same else None,
        seconds=seconds,
    )


def layers(material: Material) -> list[tuple[str, str, int]]:
    """Return name, class and number of parameters of each layer that has some, in order; nothing if unknown.

    The state of a random generator, such as that of a Dropout, is a variable of the model and no parameter.
    """
    training = material.training
    placement = load_or_none(Placement, material.folder / "records" / "placement.json")
    if placement is None:
        return []
    kinds = _layer_kinds(config.project_root() / training.final_model) if training else {}
    found: dict[str, int] = {}
    left = training.num_parameters if training else 0
    variables = [one for one in placement.variables if not one.path.endswith("/seed_generator_state")]
    for variable in variables:  # The optimizer's come after the model's.
        size = int(np.prod(variable.shape))
        if size > left:
            break
        left -= size
        layer = variable.path.rpartition("/")[0] or variable.path
        found[layer] = found.get(layer, 0) + size
    return [(name, kinds.get(name.rpartition("/")[2], ""), size) for name, size in found.items()]


def _layer_kinds(path: Path) -> dict[str, str]:
    """Return the class of each layer of a .keras file by the layer's name."""
    try:
        with zipfile.ZipFile(path) as archive:
            written = json.loads(archive.read("config.json"))
    except files.DAMAGED_FILE:
        return {}
    found: dict[str, str] = {}
    parts: list[Any] = [written]
    for part in parts:  # It grows by the parts of each part.
        if isinstance(part, dict):
            inner = part.get("config")
            if isinstance(inner, dict) and isinstance(inner.get("name"), str) and "class_name" in part:
                found.setdefault(inner["name"], str(part["class_name"]))
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return found
