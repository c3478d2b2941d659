"""What the outputs of a model mean: the class and how likely it is, the labels, or the numbers."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.records import Target

DIGITS = 7
"""Of a number that is told: as many as float32 has."""


class Meaning:
    """What outputs mean, as columns.

    Attributes:
        names: of the columns of a file, ``source``, ``row`` and ``error`` among them.
    """

    def __init__(self, target: Target, top_k: int, probabilities: bool) -> None:
        self._target, self._names = target, list(target.class_names or target.columns)
        self._top_k = min(top_k, target.num_outputs)
        self._probabilities = probabilities or target.task == "multilabel"
        empty = self.of(np.zeros((0, target.num_outputs), np.float32))
        self.names = ["source", "row", *empty, "error"]

    def of(self, outputs: npt.NDArray[np.float32]) -> dict[str, list[Any]]:
        """Return the columns for outputs (n, num_outputs), a value each."""
        values = outputs.astype(np.float64)
        if self._target.task == "regression":
            alone = len(self._names) < 2
            return {
                "prediction" if alone else f"prediction:{name}": _short(values[:, place])
                for place, name in enumerate(self._names or ["prediction"])
            }
        if self._target.task == "multilabel":
            shares = 1 / (1 + np.exp(-values))
            found: dict[str, list[Any]] = {
                "prediction": [";".join(np.array(self._names, object)[row >= 0.5]) for row in shares]
            }
        else:
            shares = np.exp(values - values.max(1, keepdims=True))
            shares /= shares.sum(1, keepdims=True)
            found = self._best(shares)
        if self._probabilities:
            found |= {f"probability:{name}": _short(shares[:, place]) for place, name in enumerate(self._names)}
        return found

    def _best(self, shares: npt.NDArray[np.float64]) -> dict[str, list[Any]]:
        order = np.argsort(-shares, 1, kind="stable")[:, : self._top_k]
        found: dict[str, list[Any]] = {}
        for place in range(self._top_k):
            end = "" if not place else f"_{place + 1}"
            best = order[:, place]
            found[f"prediction{end}"] = [self._names[one] for one in best.tolist()]
            found[f"probability{end}"] = _short(shares[np.arange(len(best)), best])
        return found


def _short(values: npt.NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values.tolist()]
