"""Loads a registered model back, and compares its outputs for test rows with those of its evaluation."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.evaluation import predictions
from tasks.records import EvaluationResult, PreparedDataset, Run
from tasks.runs import lineage
from tasks.system.errors import StratagemError, UserError, listed
from tasks.tracking.models import fetch_model
from tasks.tracking.store import is_own_store, store_uri
from tasks.tracking.trained_models import TrainedModel

SAMPLE = 64
"""The number of test rows for which a model is loaded back; they are evenly spaced in the split."""
TOLERANCE = 1e-4
"""The allowed difference of the outputs, in standard deviations of the evaluation's outputs; float32 differs by 1e-6
of a sum's largest term with another batch size."""
COARSE_TOLERANCE = 0.05
"""The same for a model that was evaluated with lower precision (mixed precision) or on an accelerator, where float32
may be TF32 with 10 bits: models are loaded back on a CPU."""

Loader = Callable[..., Any]
"""``model_loader.ModelLoader.ask``: loads a model from its files and computes its outputs."""


def sample(count: int) -> list[int]:
    """Return the indices of the test rows for which a model is loaded back."""
    rows: list[int] = np.unique(np.linspace(0, count - 1, min(SAMPLE, count)).astype(int)).tolist()
    return rows


def tolerance(run: Run, evaluation: EvaluationResult) -> float:
    """Return how much a model that is loaded back may differ from its evaluation."""
    on_cpu = all("cpu" in device.lower() for device in evaluation.examples_by_device)
    exact = on_cpu and run.settings["train"]["dtype_policy"] in ("float32", "float64")
    return TOLERANCE if exact else COARSE_TOLERANCE


def through_mlflow(place: str, load: Loader, prepared: PreparedDataset, rows: Sequence[int]) -> npt.NDArray[Any]:
    """Return the outputs of the logged model at an artifact location for these test rows. ``mlflow.pyfunc`` loads it,
    as in a model server.

    Raises:
        StratagemError: the model cannot be loaded, is damaged, or fails.
    """
    encoded = any(feature.columns for feature in prepared.features.values())
    return np.asarray(
        load("load_back", _test_files(prepared), rows, place=place, tracking_uri=store_uri(), encoded=encoded)
    )


def of_version(
    name: str,
    version: str,
    tags: Mapping[str, str],
    load: Loader,
    prepared: PreparedDataset | None = None,
    rows: Sequence[int] | None = None,
) -> npt.NDArray[np.float32]:
    """Verify the files of a version, load its .keras file in Keras' safe mode, and return the outputs.

    In the project's own store, the version's user-defined code is used. On a server, where others may have written it,
    only this project's code runs, and only modules that are allowed (``models.fetch_model``).

    Args:
        prepared: the data with the test rows, which are encoded as in the version's training; None uses zeros.
        rows: the indices of the test rows to use; None uses all.

    Raises:
        StratagemError: the outputs cannot be computed; gives the reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = fetch_model(f"models:/{name}/{version}", folder)
        root = config.project_root()
        if found.module is not None and found.code is not None:
            if is_own_store():
                root = found.code
            else:
                digest = lineage.model_digest(found.keras_file, tags.get("weights_digest", ""), tags["model"])
                if digest != tags.get("model_digest"):
                    raise UserError(f"your code for it, {found.module}, has changed")
        inputs = _test_files(prepared)
        if prepared is not None and tags.get("takes_digest") != predictions.takes_digest(prepared):
            inputs = _encode_for(found, prepared, Path(folder))
        outputs = load("score", inputs, rows, file=str(found.keras_file), own_code=found.module, root=str(root))
    return np.asarray(outputs, np.float32)


def _encode_for(found: TrainedModel, prepared: PreparedDataset, folder: Path) -> dict[str, Path]:
    """Write the test rows into a folder in the encoding of a model with other categories, columns or image sizes."""
    from tasks.data import kinds  # With pandas, which no other registration needs.

    theirs, ours = found.target, prepared.target
    names = [list(one.class_names or one.columns) if one is not None else [] for one in (theirs, ours)]
    if theirs is None or theirs.task != ours.task or names[0] != names[1]:
        raise UserError(f"its outputs mean {listed(names[0])}, but those of the data mean {listed(names[1])}")
    if found.encoding is None:
        raise UserError("it expects arrays of another shape or dtype")
    return kinds.encode_test_rows(prepared, found.encoding, folder)


def check(outputs: npt.NDArray[Any], prepared: PreparedDataset | None, rows: Sequence[int] | None = None) -> None:
    """Raise ``StratagemError`` if outputs have a wrong shape, as far as the data are known, or numbers that are not
    finite; the outputs of another program's model may be texts."""
    if prepared is not None:
        count = prepared.splits["test"].num_examples if rows is None else len(rows)
        if outputs.shape != (count, prepared.target.num_outputs):
            raise StratagemError(f"its outputs have the shape {outputs.shape}")
    if np.issubdtype(outputs.dtype, np.number) and not np.isfinite(outputs).all():
        raise StratagemError("its outputs are not finite numbers")


def difference(
    found: npt.NDArray[Any], evaluated: npt.NDArray[Any], rows: Sequence[int], tolerance: float
) -> str | None:
    """Return how a model's outputs for these rows differ from its evaluation's outputs, those for all test rows, as the
    end of a sentence; None if they do not. The tolerance is in standard deviations of the evaluation's outputs."""
    expected = evaluated[rows].astype(np.float64)
    if found.shape != expected.shape:
        return f"its outputs have the shape {found.shape}, not {expected.shape} as in its evaluation"
    strange = int((~np.isfinite(found)).reshape(len(rows), -1).any(axis=1).sum())
    if strange and np.isfinite(expected).all():
        return f"its outputs for {strange} of {len(rows)} test rows are not finite, but they were in its evaluation"
    spread = float(evaluated.std()) or 1.0
    distance = float((abs(found - expected) / (spread + abs(expected) / 10)).max())
    if distance <= tolerance:
        return None
    return (
        f"its outputs differ from those of its evaluation by {distance:.2g} standard deviations among {len(rows)} test "
        f"rows; at most {tolerance:g} is allowed"
    )


def _test_files(prepared: PreparedDataset | None) -> dict[str, Path]:
    if prepared is None:
        return {}
    root = config.project_root()
    return {name: root / path for name, path in prepared.splits["test"].features.items()}
