"""The weights that a new run begins with: another run's, those of a file, or of a registered model.

They are read once, when a run starts, and kept in its folder: a resume needs neither the file nor the registry.
"""

import logging
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tasks import config, runs
from tasks.modeling import models
from tasks.records import PreparedDataset
from tasks.runs import lineage
from tasks.system import files, upstream
from tasks.system.errors import UserError, listed, one_line
from tasks.tracking import trained_models
from tasks.training import model_state
from tasks.training.checkpoints import Checkpoints
from tasks.training.model import in_host_memory
from tasks.training.model_state import Arrays

log = logging.getLogger(__name__)


def find_weights(settings: config.Settings, prepared: PreparedDataset) -> Arrays:
    """Return all weights of the settings' model by their keys in a checkpoint; nothing where they are random.

    With ``model.new_head`` those of its last layer are random.

    Raises:
        UserError: there is no such run, file or model, it cannot be read, or it does not fit: another architecture,
            other shapes, other constants that normalise.
    """
    initial = settings.model.initial
    if initial is None:
        return {}
    keras.utils.set_random_seed(settings.train.seed)
    with in_host_memory():
        own = models.build(settings.model, prepared, settings.input.normalization)
        mine = {key: variable for key, variable in model_state.variables(own).items() if key.startswith("model/")}
        if runs.is_id(initial):
            found = _best_of_run(initial, settings.input.normalization)
        elif initial.endswith(".h5"):
            _load_backbone(initial, own)
            found = {key: keras.ops.convert_to_numpy(one) for key, one in mine.items()}
        else:
            start = _load_model(initial, _file(initial))
            _check_normalization(initial, own, start)
            by_path = {one.path: keras.ops.convert_to_numpy(one) for one in start.weights}
            # What only the start has keeps its path for a key, which no variable of this model has.
            places = {variable.path: key for key, variable in mine.items()}
            found = {places.get(path, path): array for path, array in by_path.items()}
    random: Arrays = {}
    if settings.model.new_head:
        head = own.weights[-1].path.rpartition("/")[0]
        random = {
            key: keras.ops.convert_to_numpy(one) for key, one in mine.items() if one.path.rpartition("/")[0] == head
        }
        log.info("head      %s begins with random weights (model.new_head=true)", head)
    wrong = [
        _told(mine[key].path if key in mine else key, there, here)
        for key in sorted((mine.keys() | found.keys()) - random.keys())
        if (there := found[key].shape if key in found else None)
        != (here := tuple(mine[key].shape) if key in mine else None)
    ]
    if wrong:
        raise UserError(
            f"model.initial = {initial} is of another model: {listed(wrong, 3)}. Give the model.name and the "
            "model.options that it was made with, or model.new_head=true if nothing but the last layer is another"
        )
    arrays = {key: (found | random)[key].astype(one.dtype) for key, one in mine.items()}
    log.info("initial   %s, weights %s", initial, lineage.weights_digest(list(arrays.items()))[:12])
    return arrays


def _told(name: str, there: tuple[int, ...] | None, here: tuple[int, ...] | None) -> str:
    """Return how a variable differs between the start model and this one."""
    if there is None or here is None:
        return f"{name} is {'here' if there is None else 'there'} alone"
    return f"{name} has the shape {there} there and {here} here"


def save(arrays: Arrays, folder: Path) -> None:
    """Write what a run begins with into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    members: dict[str, Any] = arrays
    with files.replacing(folder / "initial.npz", ".npz") as temporary:
        np.savez(temporary, **members)


def load(settings: config.Settings, prepared: PreparedDataset, folder: Path) -> Arrays:
    """Return what ``save`` wrote into a run's folder; what is not there, or damaged, is looked for anew, and kept.

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
    run = runs.find_run(run_id)
    runs.refuse_pruned(run)
    before = run.settings["input"]["normalization"]
    if before != normalization:
        raise UserError(
            f"model.initial = {run_id}: that run was trained with input.normalization = {before}, and this one "
            f"has {normalization}. Give input.normalization={before}"
        )
    folder = config.project_root() / run.folder / "checkpoints"
    with Checkpoints(folder, monitor=run.settings["checkpoint"]["monitor"], read_only=True) as saved:
        arrays, _ = saved.restore(saved.find("best"))
    return {key: array for key, array in arrays.items() if key.startswith("model/")}


def _file(initial: str) -> Path:
    """Return the ``.keras`` file that ``model.initial`` means."""
    root = config.project_root()
    if not initial.startswith("models:"):
        return root / initial
    from tasks.tracking.models import find_model  # MLflow takes a second to import.

    found = find_model(initial)
    folder = root / "mlruns" / "runs" / found.run_id / "models"
    for path in (folder / "best.keras", folder / "final.keras"):
        if path.is_file() and files.digest(path) == found.keras_file_sha256:
            return path
    raise UserError(
        f"model.initial = {initial}: it is a model of run {found.run_id}, and {folder} does not hold it (any more). "
        "Give the command where the run is, or a .keras file"
    )


def _load_backbone(initial: str, own: Any) -> None:
    """Give the backbone of a model of keras.applications the weights of an HDF5 file."""
    backbone = next((one for one in upstream.layers_of(own) if one.name == "backbone"), None)
    if backbone is None:
        raise UserError(
            f"model.initial = {initial}: a file of weights alone is for model.name=keras_applications. Give that, or a "
            ".keras file"
        )
    path = _existing(initial, config.project_root() / initial)
    try:
        backbone.load_weights(path)
    except Exception as error:  # Whatever HDF5 and Keras make of a file.
        raise UserError(
            f"model.initial = {initial}: Keras cannot load {path} into this architecture ({one_line(error)[:300]}). "
            "Give the weights of model.options.architecture without the top, with the same model.options.arguments"
        ) from None


def _existing(initial: str, path: Path) -> Path:
    if not path.is_file():
        raise UserError(
            f"model.initial = {initial}: there is no file {path}. Give another one; a run that has begun with it needs "
            "it no more: --resume RUN"
        )
    return path


def _load_model(initial: str, path: Path) -> Any:
    trained_models.check_unpacked(f"model.initial = {initial}", _existing(initial, path))
    try:
        return keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as error:  # Whatever a class or a file of somebody else's raises.
        raise UserError(
            f"model.initial = {initial}: Keras cannot load {path} ({one_line(error)[:300]}). Classes of your own must "
            "be registered (keras.saving.register_keras_serializable) by the module that model.name names"
        ) from None


def _check_normalization(initial: str, own: Any, start: Any) -> None:
    """Raise ``UserError`` when a start model that was made here normalises its features with other constants."""
    theirs, ours = ({one.name: one for one in upstream.layers_of(model) if _rescales(one)} for model in (start, own))
    if not theirs.keys() & ours.keys():
        log.warning(
            "model.initial = %s does not say how its features are to be normalised: that is not checked", initial
        )
    for name in theirs.keys() & ours.keys():
        there, here = _constants(theirs[name]), _constants(ours[name])
        if there.shape != here.shape or not np.allclose(there, here, rtol=1e-5):
            raise UserError(
                f"model.initial = {initial}: its layer {name} multiplies with {_short(there[0])} and adds "
                f"{_short(there[1])}, and this run's multiplies with {_short(here[0])} and adds {_short(here[1])}. "
                "Give the input.normalization that it was trained with; where the statistics of other data make the "
                "difference, its run's id takes the weights alone"
            )


def _rescales(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Rescaling) and layer.name.endswith("normalization")


def _constants(layer: Any) -> Any:
    """Return what a ``Rescaling`` multiplies with and what it adds: float64 (2, n)."""
    return np.stack(np.broadcast_arrays(np.ravel(layer.scale), np.ravel(layer.offset))).astype(float)


def _short(values: Any) -> str:
    return listed([f"{value:.5g}" for value in values], 6)
