"""What changes in a model while it trains: its arrays by key, taken from it and given back to one built anew."""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from tasks.system.errors import UserError
from tasks.training import shards
from tasks.training.shards import Pieces

Arrays = dict[str, npt.NDArray[Any]]
GROUPS = ("model", "seed", "optimizer", "metric")


def variables(model: Any) -> dict[str, Any]:
    """Return every Keras variable that training changes, by key: model, seed generators, optimizer, metrics.

    Keys are places (``model/0003``), because Keras numbers names on within a process (``adam_1``).
    """
    optimizer = getattr(model, "optimizer", None)  # A model that was never compiled has no such attribute.
    weights = {id(variable) for variable in model.weights}
    groups = {
        "model": model.weights,
        # Dropout's seeds: neither `.keras` nor `.weights.h5` restores them, and a resumed run then draws other masks.
        "seed": [variable for variable in model.variables if id(variable) not in weights],
        "optimizer": optimizer.variables if optimizer is not None else [],
        "metric": model.metrics_variables,
    }
    return {f"{group}/{i:04d}": variable for group, members in groups.items() for i, variable in enumerate(members)}


def snapshot(model: Any, groups: tuple[str, ...] = GROUPS) -> Arrays:
    """Return a host copy of some groups of ``variables``; a copy, because the training goes on while it is written.

    Under ``multi_worker`` a metric is the sum over all workers, so each of them must ask for it. What no one process
    holds is left out: ``snapshot_pieces`` has it.
    """
    chosen = {key: variable for key, variable in variables(model).items() if key.split("/")[0] in groups}
    return {
        key: np.array(keras.ops.convert_to_numpy(variable))
        for key, variable in chosen.items()
        if not shards.in_pieces(variable.value)
    }


def snapshot_pieces(model: Any) -> dict[str, Pieces]:
    """Return a host copy of what this process has to write of the variables that no one process holds."""
    found = {key: shards.pieces_of(variable.value) for key, variable in variables(model).items()}
    return {key: pieces for key, pieces in found.items() if pieces is not None}


def assign(model: Any, arrays: Mapping[str, npt.NDArray[Any]], groups: tuple[str, ...]) -> None:
    """Give a built model the saved values of some groups (``model``, ``seed``, ``optimizer``, ``metric``).

    Raises:
        UserError: another model was saved: a variable is missing or has another shape.
    """
    own = {key: variable for key, variable in variables(model).items() if key.split("/")[0] in groups}
    saved = {key: array for key, array in arrays.items() if key.split("/")[0] in groups}
    for key in sorted(own.keys() | saved.keys()):
        name = own[key].path if key in own else "nothing"
        here = tuple(own[key].shape) if key in own else None
        there = tuple(saved[key].shape) if key in saved else None
        if here != there:
            raise UserError(
                f"the checkpoint is of another model or optimizer: {key} ({name}) has shape {here} here and {there} "
                "in the checkpoint. Use the settings that the run was trained with"
            )
    for key, variable in own.items():
        variable.assign(shards.as_laid_out(variable.value, saved[key]))
