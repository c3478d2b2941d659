"""Loads a registered model back, and compares its outputs for test rows with those of its evaluation."""

import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.records import EvaluationResult, PreparedDataset, Run
from tasks.runs import lineage
from tasks.system import files
from tasks.system.errors import StratagemError, UserError, one_line
from tasks.tracking import trained_models
from tasks.tracking.models import check_code
from tasks.tracking.registry import fetch_keras_file
from tasks.tracking.store import store_uri

SAMPLE = 64
"""Test rows that a model is loaded back for: they lie evenly in the split."""
TOLERANCE = 1e-4
"""By which what it gives then may differ, in standard deviations of the evaluation's outputs; float32 differs by 1e-6
of a sum's largest part where another number of rows is computed at once."""
COARSE_TOLERANCE = 0.05
"""The same for a model that was evaluated with fewer bits (mixed precision), or on an accelerator, whose float32 may
be TF32, which has 10 bits: it is loaded back on a CPU."""

Loader = Callable[..., Any]
"""``process.model_loader.ModelLoader.ask``: loads a model from its files and computes what it gives."""


def sample(count: int) -> list[int]:
    """Return which of a number of test rows a model is computed for when it is loaded back."""
    rows: list[int] = np.unique(np.linspace(0, count - 1, min(SAMPLE, count)).astype(int)).tolist()
    return rows


def tolerance(run: Run, evaluation: EvaluationResult) -> float:
    """Return by how much a model that is loaded back may differ from its evaluation."""
    on_cpu = all("cpu" in device.lower() for device in evaluation.examples_by_device)
    exact = on_cpu and run.settings["train"]["dtype_policy"] in ("float32", "float64")
    return TOLERANCE if exact else COARSE_TOLERANCE


def through_mlflow(
    place: str, load: Loader, prepared: PreparedDataset | None = None, rows: Sequence[int] | None = None
) -> npt.NDArray[Any]:
    """Return the outputs of a logged model, loaded by ``mlflow.pyfunc`` as a server of models would load it.

    Args:
        place: where its files lie, an address that MLflow reads.
        load: loads it and computes them.
        prepared: whose test rows it is given; without them it is given its own example.
        rows: which of these; all if not given.

    Raises:
        StratagemError: it cannot be loaded, or fails.
    """
    encoded = prepared is not None and any(feature.columns for feature in prepared.features.values())
    return np.asarray(
        load("load_back", _test_files(prepared), rows, place=place, tracking_uri=store_uri(), encoded=encoded)
    )


def of_keras_file(
    name: str,
    version: str,
    tags: Mapping[str, str],
    load: Loader,
    prepared: PreparedDataset | None = None,
    rows: Sequence[int] | None = None,
) -> npt.NDArray[np.float32]:
    """Return the outputs of a version, whose .keras file is loaded in Keras' safe mode.

    Only this project's code runs, and for a model of a server, whose tags others may have written, only modules that
    are allowed (``models.check_code``).

    Args:
        name: of the registered model.
        version: its number.
        tags: of the version.
        load: loads it and computes them.
        prepared: whose test rows it is given; without them it is given zeros.
        rows: which of these; all if not given.

    Raises:
        StratagemError: the outputs cannot be computed; says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        check_code(name, version, tags)
        file = fetch_keras_file(name, version, Path(folder))
        if files.digest(file) != tags["keras_file_sha256"]:
            raise UserError("its .keras file in MLflow is damaged")
        if not zipfile.is_zipfile(file):
            raise UserError("its .keras file in MLflow is not a Keras archive")
        trained_models.check_unpacked(f"{name}/{version}", file)
        own_code = None
        if ":" in tags["model"]:
            own_code = tags["model"].partition(":")[0]
            if _model_digest(file, tags) != tags["model_digest"]:
                raise UserError(f"your code of it, {own_code}, is another one since")
        outputs = load(
            "score",
            _test_files(prepared),
            rows,
            file=str(file),
            own_code=own_code,
            root=str(config.project_root()),
        )
    return np.asarray(outputs, np.float32)


def check(outputs: npt.NDArray[Any], prepared: PreparedDataset, rows: Sequence[int] | None = None) -> None:
    """Refuse what no model of these data gives.

    Raises:
        StratagemError: says what it is.
    """
    count = prepared.splits["test"].num_examples if rows is None else len(rows)
    if outputs.shape != (count, prepared.target.num_outputs):
        raise StratagemError(f"it gives outputs of shape {outputs.shape}")
    check_numbers(outputs)


def check_numbers(outputs: npt.NDArray[Any]) -> None:
    """Refuse outputs that are not finite; those of another program's model may be texts.

    Raises:
        StratagemError: says so.
    """
    if np.issubdtype(outputs.dtype, np.number) and not np.isfinite(outputs).all():
        raise StratagemError("it gives outputs that are not numbers")


def difference(
    found: npt.NDArray[Any], evaluated: npt.NDArray[Any], rows: Sequence[int], tolerance: float
) -> str | None:
    """Return how what a model gives for some rows differs from its evaluation, as the end of a sentence; None where it
    does not.

    Args:
        found: what it gives, (rows, num_outputs).
        evaluated: what it gave for all test rows.
        rows: which of these were computed.
        tolerance: in standard deviations of all.
    """
    expected = evaluated[rows].astype(np.float64)
    if found.shape != expected.shape:
        return f"it gives outputs of shape {found.shape}, not {expected.shape} as evaluated"
    strange = int((~np.isfinite(found)).reshape(len(rows), -1).any(axis=1).sum())
    if strange and np.isfinite(expected).all():
        return (
            f"it gives outputs that are not numbers for {strange} of {len(rows)} test rows, and gave numbers when it "
            "was evaluated"
        )
    spread = float(evaluated.std()) or 1.0
    distance = float((abs(found - expected) / (spread + abs(expected) / 10)).max())
    if distance <= tolerance:
        return None
    return (
        f"it gives other outputs than when it was evaluated: {distance:.2g} standard deviations apart among "
        f"{len(rows)} test rows, and {tolerance:g} is allowed"
    )


def _model_digest(file: Path, tags: Mapping[str, str]) -> str:
    try:
        return lineage.model_digest(file, tags["weights_digest"], tags["model"])
    except (AttributeError, *files.DAMAGED_FILE) as error:  # Its sha256 is right: somebody registered no model.
        raise UserError(f"its .keras file in MLflow cannot be read ({one_line(error)})") from None


def _test_files(prepared: PreparedDataset | None) -> dict[str, Path]:
    if prepared is None:
        return {}
    root = config.project_root()
    return {name: root / path for name, path in prepared.splits["test"].features.items()}
