"""Arrays of a model that change in training: read them by key and assign them to a newly built model."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from tasks.system.errors import UserError, listed

Arrays = dict[str, npt.NDArray[Any]]
GROUPS = ("model", "seed", "optimizer", "metric")


def variables(model: Any) -> dict[str, Any]:
    """Return every Keras variable that training changes, by key: model, seed generators, optimizer, metrics.

    Keys are positions (``model/0003``), because Keras numbers repeated names within a process (``adam_1``).
    """
    optimizer = getattr(model, "optimizer", None)  # A model that was never compiled has no such attribute.
    weights = {id(variable) for variable in model.weights}
    groups = {
        "model": model.weights,
        # Dropout's seeds: neither `.keras` nor `.weights.h5` restores them, so a resumed run would draw other masks.
        "seed": [variable for variable in model.variables if id(variable) not in weights],
        "optimizer": optimizer.variables if optimizer is not None else [],
        "metric": model.metrics_variables,
    }
    return {f"{group}/{i:04d}": variable for group, members in groups.items() for i, variable in enumerate(members)}


def snapshot(model: Any, groups: tuple[str, ...] = GROUPS) -> Arrays:
    """Return a host copy of some groups of ``variables``; training continues while the copy is written.

    Every worker must call this: under ``multi_worker`` a metric is the sum over all workers, and a variable that no
    single process holds is gathered from all of them.
    """
    chosen = {key: variable for key, variable in variables(model).items() if key.split("/")[0] in groups}
    return {key: _host_copy(variable) for key, variable in chosen.items()}


def _host_copy(variable: Any) -> npt.NDArray[Any]:
    if not in_pieces(variable):
        return np.array(keras.ops.convert_to_numpy(variable))
    from jax.experimental import multihost_utils

    return np.array(multihost_utils.process_allgather(variable.value, tiled=True))


def in_pieces(variable: Any) -> bool:
    """Return whether no single process has the whole value of a variable."""
    # TensorFlow's distributed variables react to attribute access: a metric would be summed over all workers.
    if keras.backend.backend() != "jax":
        return False
    return not variable.value.is_fully_addressable and not variable.value.is_fully_replicated


def assign(model: Any, arrays: Mapping[str, npt.NDArray[Any]], groups: tuple[str, ...]) -> None:
    """Assign the saved values of some groups (``model``, ``seed``, ``optimizer``, ``metric``) to a built model.

    Raises:
        UserError: the values belong to another model: a variable is missing or has another shape.
    """
    own = {key: variable for key, variable in variables(model).items() if key.split("/")[0] in groups}
    saved = {key: array for key, array in arrays.items() if key.split("/")[0] in groups}
    if wrong := differences(own, saved):
        raise UserError(
            f"the checkpoint belongs to a different model or optimizer: {listed(wrong, 3)}. Use the settings that the "
            "run was trained with"
        )
    for key, variable in own.items():
        variable.assign(_as_laid_out(variable, saved[key]))


def _as_laid_out(variable: Any, saved: npt.NDArray[Any]) -> Any:
    """Return a saved array in the layout of a variable's value. If several processes share the value, each places only
    its own part, without communication."""
    if keras.backend.backend() != "jax" or variable.value.is_fully_addressable:
        return saved
    import jax

    value = variable.value
    return jax.make_array_from_callback(
        value.shape, value.sharding, lambda index: np.asarray(saved[index], value.dtype)
    )


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Return in words how this model's variables differ from saved arrays, both by key."""
    found = []
    for key in sorted(here.keys() | there.keys()):
        name = here[key].path if key in here else key
        if key not in here or key not in there:
            found.append(f"{name} exists only {'here' if key in here else 'there'}")
        elif (own := tuple(here[key].shape)) != there[key].shape:
            found.append(f"{name} has the shape {there[key].shape} there and {own} here")
    return found
