"""The data for a report: the records of a run, and the test examples with their outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.data.encoding.answers import probabilities
from tasks.evaluation import predictions, slices
from tasks.evaluation.predictions import Bins, Predictions, bins
from tasks.evaluation.slices import TestExamples
from tasks.records import (
    HEADLINES,
    EvaluationResult,
    PreparedDataset,
    RegisteredModel,
    Run,
    RunStatus,
    RunSummary,
    Task,
    TrainingResult,
    load_or_none,
)
from tasks.runs import outcome


@dataclass(frozen=True)
class Material:
    """The data of a run that are known."""

    run: Run
    folder: Path
    """The absolute path of the run's folder."""
    status: RunStatus
    training: TrainingResult | None
    evaluation: EvaluationResult | None
    registered: RegisteredModel | None
    prepared: PreparedDataset | None
    """None if the data are gone."""
    predictions: Predictions | None
    test: TestExamples | None
    """None if the evaluation had other test rows."""
    seconds: Mapping[str, float]
    """The seconds by stage; empty if the run is not finished."""

    @property
    def task(self) -> Task:
        """The task; classification if the run was not evaluated and its data are gone."""
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
        """The predictions, for sections that have checked that they exist."""
        if self.predictions is None:
            raise ValueError("there are no predictions")
        return self.predictions

    @cached_property
    def scores(self) -> npt.NDArray[np.float64]:
        """The score of each test example, (n,): 1 for a correct class, else 0; the share of correct labels; or the mean
        absolute error of a regression."""
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
        """The names of the classes or labels."""
        return [entry.name for entry in self.evaluation.classes] if self.evaluation else []


def load(run: Run, seconds: Mapping[str, float] | None = None) -> Material:
    """Read the available data of a run.

    Args:
        run: the run, finished or not.
        seconds: the seconds by stage; None uses those of the run's summary.
    """
    root = config.project_root()
    evaluation = outcome.load(run, EvaluationResult)
    name = str(run.settings.get("dataset", {}).get("name"))
    prepared = load_or_none(PreparedDataset, root / "data" / name / "prepared" / "manifest.json")
    found = None
    if evaluation is not None:
        found = predictions.load(root / evaluation.outputs, evaluation.outputs_sha256)
    if seconds is None:
        summary = outcome.load_readable(run, RunSummary)
        seconds = summary.seconds if summary is not None else {}
    same = prepared is not None and evaluation is not None and evaluation.test_rows == predictions.test_rows(prepared)
    return Material(
        run=run,
        folder=root / run.folder,
        status=outcome.status(run),
        training=outcome.load(run, TrainingResult),
        evaluation=evaluation,
        registered=outcome.load(run, RegisteredModel),
        prepared=prepared,
        predictions=found,
        test=slices.load(prepared) if prepared is not None and same else None,
        seconds=seconds,
    )
