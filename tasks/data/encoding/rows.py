"""Rows of tables and arrays in, answers out."""

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

PART_BYTES, MAX_PART = 8 * 2**20, 1024
"""Examples that fit into these bytes are computed at once, at most ``MAX_PART``."""


class BadTable(ValueError):
    """A table is missing the columns that a model takes."""


def encoding_of(start: bytes, otherwise: str) -> str:
    """Return the encoding of a text that begins with these bytes: UTF-16 where they are its mark."""
    return "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else otherwise


def csv_rows(
    name: str, lines: Iterator[str], columns: Sequence[str], max_field: int = 2**26
) -> Iterator[dict[str, str] | str]:
    """Yield the columns of each row of CSV that a model takes, or the reason why it is no such row.

    Args:
        name: of the table, for the error.
        lines: the first one that has the model's columns names them; above it may stand a title or comments. A comma, a
            semicolon, a tab or a bar stands between them: whatever makes most of the model's columns.
        columns: what the model takes.
        max_field: characters of a value; a quote that nothing closes makes one value of all that follows.
    """
    csv.field_size_limit(max_field)
    delimiters = ",;\t|"
    first = list(itertools.islice(lines, 20))

    def count(line: str, delimiter: str) -> int:
        try:
            found = [one.strip() for one in next(csv.reader([line], delimiter=delimiter), [])]
        except csv.Error:  # A row with a value that is too long.
            return 0
        return sum(column in found for column in columns)

    counts = [max(count(line, delimiter) for delimiter in delimiters) for line in first]
    header = counts.index(len(columns)) if len(columns) in counts else 0
    delimiter = max(delimiters, key=lambda one: count(first[header], one) if first else 0)
    reader = csv.reader(itertools.chain(first[header:], lines), delimiter=delimiter)
    # As prepare names the one without a name, which pandas writes for its index.
    names = [one.strip() or f"column {place}" for place, one in enumerate(next(reader, []), 1)]
    check_columns(name, columns, names)
    places = {column: names.index(column) for column in columns}
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"no row of CSV ({error})"
            continue
        if len(row) == len(names):
            yield {column: row[place] for column, place in places.items()}
        elif row:
            yield f"the row has {len(row)} values, and the header {len(names)}"


def json_rows(
    name: str, lines: Iterator[str | bytes], columns: Sequence[str], part_size: int
) -> Iterator[dict[str, Any] | str]:
    """Yield the object of each line of JSON, or the reason why it is no such row; empty lines are none.

    Args:
        name: of the table, for the error.
        lines: a row may leave out what is missing; of many, one has it.
        columns: what the model takes.
        part_size: lines that are read at once.
    """

    def parse(line: str | bytes) -> dict[str, Any] | str:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            return f"no JSON ({error})"
        if not isinstance(found, dict):
            return f"no JSON object: {repr(found)[:80]}"
        nested = [column for column in columns if isinstance(found.get(column), dict | list)]
        return f"column '{nested[0]}': has values in a value" if nested else found

    whole = (line for line in lines if line.strip())
    is_checked = False
    while some := [parse(line) for line in itertools.islice(whole, part_size)]:
        there = sorted(set().union(*(one for one in some if isinstance(one, dict))))
        if there and not is_checked:
            check_columns(name, columns, there)
            is_checked = True
        yield from some


def check_columns(name: str, columns: Sequence[str], there: Sequence[str]) -> None:
    """Refuse a table without the columns that a model takes, or with one of them more than once.

    Raises:
        BadTable: names them.
    """
    if absent := [one for one in columns if one not in there]:
        raise BadTable(
            f"'{name}' is missing the {'column' if len(absent) == 1 else 'columns'} {', '.join(map(repr, absent))}. "
            f"It has: {', '.join(map(repr, there))[:1000] or 'nothing'}"
        )
    if twice := [one for one in columns if there.count(one) > 1]:
        raise BadTable(f"'{name}' has the column {', '.join(map(repr, twice))} more than once: leave one")


def part_size(takes: Mapping[str, tuple[tuple[Any, ...], Any]]) -> int:
    """Return how many examples are computed at once, by the shape and dtype of each array that one has."""
    size: int = sum(math.prod(one or 1 for one in shape) * np.dtype(dtype).itemsize for shape, dtype in takes.values())
    return min(MAX_PART, max(1, PART_BYTES // max(1, size)))


def as_taken(takes: Mapping[str, tuple[tuple[Any, ...], Any]], arrays: Mapping[str, Any], who: str) -> dict[str, Any]:
    """Return the arrays that a model takes, of its types.

    Args:
        takes: shape and dtype of each in an example.
        arrays: as prepared, each of n examples.
        who: names the model, for the error.

    Raises:
        ValueError: one is missing, has another shape, or numbers that its type does not hold.
    """
    if absent := [name for name in takes if name not in arrays]:
        raise ValueError(f"these arrays are missing: {', '.join(absent)}")
    found = {}
    for name, (shape, kind) in takes.items():
        array, dtype = arrays[name], np.dtype(kind)
        same_kind = array.dtype.kind in ("iu" if dtype.kind in "iu" else "iuf")
        if not array.ndim or array.shape[1:] != shape or not same_kind:
            wanted = f"{dtype} (n, {', '.join(map(str, shape))})"
            raise ValueError(f"'{name}' is {array.dtype} {array.shape}, and {who} takes {wanted}")
        bounds = np.iinfo(dtype) if dtype.kind in "iu" and array.size else None
        if bounds is not None and (array.min() < bounds.min or array.max() > bounds.max):
            raise ValueError(f"'{name}' has numbers beyond {dtype}, which {who} takes")
        found[name] = array.astype(dtype, copy=False)
    return found


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
    """Return what outputs mean: columns with a value for each example, with as many digits as float32 has.

    Args:
        task: classification, multilabel or regression.
        names: of the classes, labels or numbers.
        outputs: as ``probabilities`` takes them.
        top_k: classes that are named, the most probable first.
        all_shares: whether each class has a column of its probability, too; each label always has.
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
    errors: list[str | None], outputs: Any, answer: Callable[[Any], Mapping[str, Sequence[Any]]]
) -> dict[str, list[Any]]:
    """Return the columns of answers to all examples, and their errors as the last one.

    Args:
        errors: why an example has no answer, None where it is whole.
        outputs: of those that are whole, (n, num_outputs).
        answer: makes columns of outputs.
    """
    finite = np.isfinite(outputs).all(axis=1)
    whole = np.array([row for row, error in enumerate(errors) if error is None], np.int64)
    found: dict[str, list[Any]] = {}
    for name, values in answer(outputs[finite]).items():
        found[name] = [None] * len(errors)
        for row, value in zip(whole[finite].tolist(), values, strict=True):
            found[name][row] = value
    found["error"] = list(errors)
    for row in whole[~finite].tolist():
        found["error"][row] = "the model gives no number for it"
    return found
