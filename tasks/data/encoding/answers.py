"""The arrays that a model takes, and the meaning of its outputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

PART_BYTES, MAX_PART = 8 * 2**20, 1024
"""A model computes as many examples at once as fit into PART_BYTES, at most MAX_PART."""


def part_size(takes: Mapping[str, tuple[tuple[Any, ...], Any]]) -> int:
    """Return the number of examples to compute at once, from the shape and dtype of each array of an example."""
    size: int = sum(math.prod(one or 1 for one in shape) * np.dtype(dtype).itemsize for shape, dtype in takes.values())
    return min(MAX_PART, max(1, PART_BYTES // max(1, size)))


def as_taken(takes: Mapping[str, tuple[tuple[Any, ...], Any]], arrays: Mapping[str, Any], who: str) -> dict[str, Any]:
    """Return the arrays that a model takes, in its dtypes.

    Args:
        takes: shape and dtype of each array of an example.
        arrays: as prepared, each of n examples; grey images may lack the axis of channels.
        who: names the model, for the error.

    Raises:
        ValueError: an array is missing, has another shape, or numbers outside of the range of its dtype.
    """
    if absent := [name for name in takes if name not in arrays]:
        raise ValueError(f"these arrays are missing: {', '.join(absent)}")
    found = {}
    for name, (shape, kind) in takes.items():
        array, dtype = with_channel(arrays[name], shape), np.dtype(kind)
        same_kind = array.dtype.kind in ("iu" if dtype.kind in "iu" else "iuf")
        if not array.ndim or array.shape[1:] != shape or not same_kind:
            wanted = f"{dtype} (n, {', '.join(map(str, shape))})"
            raise ValueError(f"'{name}' is {array.dtype} {array.shape}, but {who} takes {wanted}")
        bounds = np.iinfo(dtype) if dtype.kind in "iu" and array.size else None
        if bounds is not None and (array.min() < bounds.min or array.max() > bounds.max):
            raise ValueError(f"'{name}' has numbers outside {dtype}, which {who} takes")
        found[name] = array.astype(dtype, copy=False)
    return found


def with_channel(images: Any, shape: tuple[Any, ...]) -> Any:
    """Return grey images (n, height, width) as (n, height, width, 1) if an example has that shape; else as given."""
    is_grey = len(shape) == 3 and (*images.shape[1:], 1) == shape
    return images[..., np.newaxis] if is_grey else images


def probabilities(task: str, outputs: Any) -> Any:
    """Return the probability of each class or label, or a regression's numbers: float64 (n, num_outputs).

    Args:
        task: classification, multilabel or regression.
        outputs: (n, num_outputs): logits, or the numbers of a regression.
    """
    values = np.asarray(outputs, np.float64)
    if task == "regression":
        return values
    if task == "multilabel":
        return 1 / (1 + np.exp(-np.clip(values, -700, 700)))
    shares = np.exp(values - values.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


def answers(task: str, names: Sequence[str], outputs: Any, top_k: int = 1, all_shares: bool = False) -> dict[str, Any]:
    """Return the predictions as columns with a value for each example, rounded to float32 precision.

    Args:
        task: classification, multilabel or regression.
        names: of the classes, labels or numbers.
        outputs: as in ``probabilities``.
        top_k: the number of classes in the answer, the most probable first.
        all_shares: whether each class also gets a column of its probability; each label always does.
    """

    def short(column: Any) -> list[float]:
        return [float(f"{value:.7g}") for value in column.tolist()]

    values = probabilities(task, outputs)
    if task == "regression":
        return {
            f"prediction:{name}" if len(names) > 1 else "prediction": short(values[:, place])
            for place, name in enumerate(names)
        }
    found: dict[str, Any] = {}
    if task == "multilabel":
        found["prediction"] = [";".join(np.array(names, object)[row >= 0.5]) for row in values]
    else:
        order = np.argsort(-values, 1, kind="stable")[:, :top_k]
        for place in range(order.shape[1]):
            best, end = order[:, place], f"_{place + 1}" if place else ""
            found[f"prediction{end}"] = [names[one] for one in best.tolist()]
            found[f"probability{end}"] = short(values[np.arange(len(best)), best])
    if all_shares or task == "multilabel":
        found |= {f"probability:{name}": short(values[:, place]) for place, name in enumerate(names)}
    return found


def answered(
    places: Sequence[tuple[str, int | None]],
    broken: Mapping[int, str],
    outputs: Any,
    answer: Callable[[Any], Mapping[str, Sequence[Any]]],
) -> dict[str, list[Any]]:
    """Return the columns of answers to all examples: the source and row, the prediction, and the error.

    Args:
        places: the file and the row of each example.
        broken: why an example is invalid, by its place.
        outputs: of the valid examples, (n, num_outputs).
        answer: converts outputs to columns.
    """
    finite = np.isfinite(outputs).all(axis=1)
    whole = np.array([row for row in range(len(places)) if row not in broken], np.int64)
    # Neither JSON nor Parquet can store a name that is not UTF-8.
    sources = [source.encode("utf-8", "backslashreplace").decode() for source, _ in places]
    found: dict[str, list[Any]] = {"source": sources, "row": [row for _, row in places]}
    for name, values in answer(outputs[finite]).items():
        found[name] = [None] * len(places)
        for row, value in zip(whole[finite].tolist(), values, strict=True):
            found[name][row] = value
    found["error"] = [broken.get(row) for row in range(len(places))]
    for row in whole[~finite].tolist():
        found["error"][row] = "the model's output is not a finite number"
    return found
