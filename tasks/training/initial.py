"""Initial weights of a new run: from another run, a file or a registered model.

They are read once, when the run starts, and stored in its folder: a resume needs neither the file nor the registry.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tasks import config
from tasks.modeling import models
from tasks.records import PreparedDataset
from tasks.runs import entries, lineage, outcome
from tasks.system import files, upstream
from tasks.system.errors import UserError, listed, one_line
from tasks.tracking import trained_models
from tasks.training import model_state
from tasks.training.checkpoints import Checkpoints
from tasks.training.model_state import Arrays

log = logging.getLogger(__name__)


def find_weights(settings: config.Settings, prepared: PreparedDataset) -> Arrays:
    """Return all weights of the configured model by checkpoint key, or an empty dict for random initial weights.

    With ``model.new_head`` the weights of the last layer are random.

    Raises:
        UserError: the run, file or model does not exist, cannot be read, or does not fit: its architecture, shapes or
            normalisation constants differ.
    """
    initial = settings.model.initial
    if initial is None:
        return {}
    keras.utils.set_random_seed(settings.train.seed)
    with models.in_host_memory():
        own = models.build(settings.model, prepared, settings.input.normalization)
        mine = {key: variable for key, variable in model_state.variables(own).items() if key.startswith("model/")}
        if entries.is_id(initial):
            found = _best_of_run(initial, settings.input.normalization)
        elif initial.endswith(".h5"):
            _load_backbone(initial, own)
            found = {key: keras.ops.convert_to_numpy(one) for key, one in mine.items()}
        else:
            start = _load_model(initial, own_code=":" in settings.model.name)
            _check_normalization(initial, own, start)
            by_path = {one.path: keras.ops.convert_to_numpy(one) for one in start.weights}
            # A variable that only the initial model has keeps its path as its key; this model has no such key.
            places = {variable.path: key for key, variable in mine.items()}
            found = {places.get(path, path): array for path, array in by_path.items()}
    random: Arrays = {}
    if settings.model.new_head:
        head = own.weights[-1].path.rpartition("/")[0]
        random = {
            key: keras.ops.convert_to_numpy(one) for key, one in mine.items() if one.path.rpartition("/")[0] == head
        }
        log.info("head      %s begins with random weights (model.new_head=true)", head)
    wanted = {key: variable for key, variable in mine.items() if key not in random}
    wrong = model_state.differences(wanted, {key: array for key, array in found.items() if key not in random})
    if wrong:
        raise UserError(
            f"model.initial = {initial} belongs to a different model: {listed(wrong, 3)}. Set the model.name and "
            "model.options that it was built with, or model.new_head=true if only the last layer differs"
        )
    arrays = {key: (found | random)[key].astype(one.dtype) for key, one in mine.items()}
    log.info("initial   %s, weights %s", initial, lineage.weights_digest(list(arrays.items()))[:12])
    return arrays


def save(arrays: Arrays, folder: Path) -> None:
    """Write the initial weights into the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    members: dict[str, Any] = arrays
    with files.replacing(folder / "initial.npz", ".npz") as temporary:
        np.savez(temporary, **members)


def load(settings: config.Settings, prepared: PreparedDataset, folder: Path) -> Arrays:
    """Return the weights that ``save`` wrote into the run's folder; if missing or damaged, find and save them again.

    Raises:
        UserError: see ``find_weights``.
    """
    if settings.model.initial is None:
        return {}
    try:
        with np.load(folder / "initial.npz") as content:
            return {name: content[name] for name in content.files}
    except files.DAMAGED_FILE:
        arrays = find_weights(settings, prepared)
        save(arrays, folder)
        return arrays


def _best_of_run(run_id: str, normalization: str) -> Arrays:
    """Return the weights of a run's best checkpoint."""
    run = entries.find_run(run_id)
    outcome.refuse_pruned(run)
    before = run.settings["input"]["normalization"]
    if before != normalization:
        raise UserError(
            f"model.initial = {run_id}: that run was trained with input.normalization = {before}, and this one "
            f"has {normalization}. Set input.normalization={before}"
        )
    folder = config.project_root() / run.folder / "checkpoints"
    with Checkpoints(folder, monitor=run.settings["checkpoint"]["monitor"], read_only=True) as saved:
        arrays, _ = saved.restore(saved.find("best"))
    return {key: array for key, array in arrays.items() if key.startswith("model/")}


def _load_backbone(initial: str, own: Any) -> None:
    """Load an HDF5 weights file into the backbone of a keras.applications model."""
    backbone = next((one for one in upstream.layers_of(own) if one.name == "backbone"), None)
    if backbone is None:
        raise UserError(
            f"model.initial = {initial}: only model.name=keras_applications accepts a file with only weights. "
            "Set that, or use a .keras file"
        )
    path = _existing(initial)
    try:
        backbone.load_weights(path)
    except Exception as error:  # HDF5 and Keras raise many types.
        raise UserError(
            f"model.initial = {initial}: Keras cannot load {path} into this architecture ({one_line(error)[:300]}). "
            "Use the weights of model.options.architecture without the top, with the same model.options.arguments"
        ) from None


def _existing(initial: str) -> Path:
    path = config.project_root() / initial
    if not path.is_file():
        raise UserError(
            f"model.initial = {initial}: {path} does not exist. Choose another file; a run that has started no longer "
            "needs it: --resume RUN"
        )
    return path


def _load_model(initial: str, own_code: bool) -> Any:
    """Return the model of a ``.keras`` file or of the registry; for ``own_code`` see ``models.load``."""
    path = None if initial.startswith("models:") else _existing(initial)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if path is None:
                from tasks.tracking.models import fetch_model  # MLflow takes a second to import.

                path = fetch_model(initial, folder).keras_file
            else:
                trained_models.find_trained_model(str(path))
        except UserError as error:
            raise UserError(f"model.initial = {initial}: {error}") from None
        advice = (
            ". Register your own classes (keras.saving.register_keras_serializable) in the module that model.name names"
        )
        return models.load(f"model.initial = {initial}", path, advice, own_code)


def _check_normalization(initial: str, own: Any, start: Any) -> None:
    """Raise ``UserError`` if an initial model built by this project normalizes its features with other constants."""
    theirs, ours = _rescalings(start), _rescalings(own)
    if not theirs.keys() & ours.keys():
        log.warning("model.initial = %s does not name its normalization layers, so we cannot check them", initial)
    for name in theirs.keys() & ours.keys():
        there, here = theirs[name], ours[name]
        if there.shape != here.shape or not np.allclose(there, here, rtol=1e-5):
            raise UserError(
                f"model.initial = {initial}: its layer {name} normalizes with other constants than this run. Set the "
                "input.normalization that it was trained with; if only the statistics of the data differ, name its "
                "run instead, which takes only the weights"
            )


def _rescalings(model: Any) -> dict[str, Any]:
    """Return the scales and offsets of the normalization layers that this project builds, by name."""
    layers = [one for one in upstream.layers_of(model) if isinstance(one, keras.layers.Rescaling)]
    return {
        one.name: np.concatenate([np.ravel(one.scale), np.ravel(one.offset)])
        for one in layers
        if one.name.endswith("normalization")
    }
