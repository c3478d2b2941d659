"""What the columns of a table are: what its description says, and what the data say where it does not."""

import csv
import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from tasks import config
from tasks.data import encoding
from tasks.data.encoding import BadValue
from tasks.data.table_files import TableFile
from tasks.system.errors import UserError, one_of, shown

LOOKED_AT = 20_000
"""Rows from the first on that say what a column is."""
MISTAKES, SAMPLE = 0.1, 1000
"""Where no more values of a sample are no numbers, they are mistakes in a column of numbers, which `prepare` names."""
MAX_CLASSES = 20
"""A target of whole numbers with more values is a regression."""
DELIMITERS = (",", ";", "\t", "|")
WORDS_OF_A_TEXT = 3
PICTURES = re.compile(r".+\.(png|jpe?g|bmp|gif|webp)", re.IGNORECASE)
COMMA = re.compile(r"[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+([eE][+-]?\d+)?")
THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+")
MAX_FOLDERS = 20
"""Where the paths of images lead to more places beside the table, its whole folder is looked at."""
ROLES = ("split_column", "group", "time", "weight")


def open_file(dataset: config.Table) -> TableFile:
    """Return the file of a dataset.

    Raises:
        UserError: it cannot be read as a table.
    """
    path = config.project_root() / dataset.source
    delimiter = dataset.delimiter
    if delimiter is None and path.suffix.lower() == ".csv" and path.is_file():
        delimiter = _delimiter(path, dataset.encoding)
    return TableFile(path, dataset.source, delimiter, dataset.decimal or ".", dataset.encoding)


def _delimiter(path: Any, encoding: str) -> str:
    """Return what stands between the names of a header: a semicolon, too, where a comma stands in numbers."""
    try:
        with path.open(encoding=encoding, newline="") as file:
            header = file.readline()
        return max(DELIMITERS, key=lambda one: len(next(csv.reader([header], delimiter=one), [])))
    except (OSError, ValueError, LookupError, csv.Error):
        return ","  # TableFile says what is wrong.


def fill_in(dataset: config.Table, file: TableFile, may_guess: bool) -> tuple[config.Table, list[str]]:
    """Return a dataset with the kinds of its columns and its task, and lines that say what was guessed.

    What the description has is kept, the rest is guessed of the first rows.

    Args:
        may_guess: columns that are not in ``columns`` are guessed even where others are.

    Raises:
        UserError: no target, a column that is not there, or one that ``columns`` does not have.
    """
    dataset = _with_target(dataset, file)
    used = {name for names in _check_roles(dataset, file).values() for name in names if name is not None}
    given = dataset.columns or {}
    others = [name for name in file.names if name not in given and name not in used]
    if others and dataset.columns is not None and not may_guess:
        raise UserError(
            f"dataset.source = '{file.source}': the column '{others[0]}' is not in dataset.columns, as "
            f"{len(others)} of {len(file.names)} are not. Say in data/{dataset.name}/params.yaml what it is: number, "
            "datetime, category, text or ignore"
        )
    looked = _look(file, [*others, *(dataset.target if dataset.task == "auto" or may_guess else ())])
    if may_guess and dataset.decimal is None and _has_decimal_commas(dataset, looked):
        dataset = dataset.model_copy(update={"decimal": ","})
    guessed = {name: _kind(name, looked[name], dataset.decimal) for name in others}
    task = _task(dataset, looked) if dataset.task == "auto" else dataset.task
    columns = {
        name: given.get(name) or config.TableColumn(kind=guessed[name].kind)
        for name in file.names
        if name in given or name in guessed
    }
    update: dict[str, Any] = {"columns": columns, "task": task, "delimiter": dataset.delimiter}
    pictures = [name for name, column in columns.items() if column.kind == "image"]
    if may_guess and pictures and not dataset.images:
        update["images"] = _places(file, pictures)
    if file.suffix == ".csv" and file.delimiter != ",":
        update["delimiter"] = file.delimiter
    if dataset.validation is None and (dataset.group is not None or dataset.time is not None):
        # Drawn of the training rows later, it would share groups with them, and be no newer.
        update["validation"] = VALIDATION if dataset.split_column is None else None
    return dataset.model_copy(update=update), _lines(dataset, task, columns, guessed)


VALIDATION = 0.1


def _check_roles(dataset: config.Table, file: TableFile) -> dict[str, tuple[str | None, ...]]:
    """Return the columns by what they are beside features; refuse those that are not there, and contradictions."""
    keys: dict[str, tuple[str | None, ...]] = {
        "target": dataset.target,
        **{key: (getattr(dataset, key),) for key in ROLES},
        "metadata": tuple(dataset.metadata),
    }
    for key, names in keys.items():
        for name in names:
            if name is not None and name not in file.names:
                raise UserError(
                    f"dataset.{key}: {one_of('column', name, file.names)} (dataset.source = '{file.source}')"
                )
    given = dataset.columns or {}
    if absent := [name for name in given if name not in file.names]:
        raise UserError(
            f"dataset.columns: {one_of('column', absent[0], file.names)}. {len(absent)} of its columns "
            f"{'is' if len(absent) == 1 else 'are'} not in dataset.source = '{file.source}'"
        )
    for name in dataset.metadata:
        kind = given[name].kind if name in given else "ignore"
        if name in dataset.target or kind != "ignore":
            what = "dataset.target" if name in dataset.target else f"of kind {kind} in dataset.columns"
            raise UserError(
                f"dataset.metadata.{name}: the column is {what}, and such a one has slices of its own. Leave it out of "
                "metadata"
            )
    for key in ("target", "split_column", "weight"):
        if twice := [name for name in keys[key] if name and name in given and given[name].kind != "ignore"]:
            raise UserError(
                f"dataset.columns.{twice[0]} = {given[twice[0]].kind}: the column is dataset.{key}, from which a model "
                "must not learn. Leave it out of columns"
            )
    if dataset.time is not None and (dataset.group is not None or dataset.split_column is not None):
        other = "group" if dataset.group is not None else "split_column"
        raise UserError(
            f"dataset.time = '{dataset.time}' and dataset.{other} = '{getattr(dataset, other)}': each says by itself "
            "what the splits are. Give one of them"
        )
    return keys


def top_of(path: str) -> str:
    """Return the file or folder beside the table that a path of an image begins with."""
    return os.path.normpath(path).split(os.sep, 1)[0]


def _places(file: TableFile, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the files and folders beside the table that its paths of images lead into."""
    found: set[str] = set()
    for chunk in file.chunks(dict.fromkeys(columns, "repeated")):
        for values in chunk.values():
            found.update(top_of(encoding.spelled(value)) for value in _present(list(encoding.rows_of(values))))
    there = sorted(place for place in found if place not in ("", "..") and (file.path.parent / place).exists())
    return tuple(there) if len(there) <= MAX_FOLDERS else (".",)


@dataclass(frozen=True)
class _Guess:
    kind: Any
    why: str = ""


def _with_target(dataset: config.Table, file: TableFile) -> config.Table:
    names = dataset.target
    if not names:
        raise UserError(
            "dataset.target: a table needs the column that a model learns to tell. Give --target COLUMN, or several as "
            f"--target A,B. Allowed: {', '.join(file.names)}"
        )
    if len(names) == 1 and names[0] not in file.names and "," in names[0]:
        names = tuple(name.strip() for name in names[0].split(","))
    if len(set(names)) < len(names):
        raise UserError(f"dataset.target = '{', '.join(names)}': names a column twice")
    return dataset.model_copy(update={"target": names})


def _look(file: TableFile, names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of the first rows."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    if not names:
        return found
    for chunk in file.first(dict.fromkeys(names, "text"), LOOKED_AT):
        for name, values in chunk.items():
            found[name] += islice(encoding.rows_of(values), LOOKED_AT - len(found[name]))
    return found


def _present(values: list[Any]) -> list[Any]:
    missing = encoding.is_missing(values)
    return [value for value, absent in zip(values, missing.tolist(), strict=True) if not absent]


def _are(values: list[Any], read: Any, mistakes: float = 0.0) -> bool:
    """Return whether all values can be read so; or, of a sample, all but this fraction."""
    try:
        read(values, "")
    except BadValue:
        sample = values[:: math.ceil(len(values) / SAMPLE)] if mistakes else []
        return sum(_are([value], read) for value in sample) >= (1 - mistakes) * len(sample) > 0
    return True


def _is_nested(values: list[Any]) -> bool:
    return any(isinstance(value, list | dict | bytes) for value in values)


def _has_decimal_commas(dataset: config.Table, looked: dict[str, list[Any]]) -> bool:
    """Return whether numbers are written as 3,14.

    Raises:
        UserError: that may be thousands, or other columns have a point there.
    """
    commas, point = {}, None
    for name, values in looked.items():
        if name in dataset.target and dataset.separator is not None:
            continue
        texts = [value.strip() for value in _present(values) if isinstance(value, str)]
        if found := [text for text in texts if COMMA.fullmatch(text) or THOUSANDS.fullmatch(text)]:
            others = [text for text in texts if "," not in text]
            if len(found) + sum(_are([text], encoding.numbers) for text in others) >= (1 - MISTAKES) * len(texts):
                commas[name] = found
        elif any("." in text for text in texts) and _are(texts, encoding.numbers, MISTAKES):
            point = name
    for name, found in commas.items():
        instead = f"--set dataset.columns.{name}=category"
        if point is not None:
            raise UserError(
                f"dataset.source = '{dataset.source}': the column '{name}' has numbers with a comma, such as "
                f"'{found[0]}', and '{point}' some with a point. Write all alike, or say that they are words: {instead}"
            )
        if all(THOUSANDS.fullmatch(text) for own in commas.values() for text in own):
            raise UserError(
                f"dataset.source = '{dataset.source}': the comma in '{found[0]}' of the column '{name}' may stand "
                f"before a fraction or between thousands. Say --set \"dataset.decimal=','\" for a fraction; take it "
                f"out between thousands; or say that these are words: {instead}"
            )
    return bool(commas)


def kind_of_texts(name: str, values: list[Any]) -> tuple[str, str]:
    """Return what a column of texts is, as of a table's first rows, and why it is ignored where it is."""
    guess = _kind(name, values, None)
    return guess.kind, guess.why


def _kind(name: str, values: list[Any], decimal: str | None) -> _Guess:
    """Return what a column is."""
    numbers = partial(encoding.numbers, decimal=decimal or ".")
    present = _present(values)
    if not present:
        return _Guess("ignore", "without a value")
    if _is_nested(present):
        return _Guess("ignore", "of values in values")
    distinct = len(set(present))
    if distinct == 1 and len(values) > 1 and len(present) == len(values):
        return _Guess("ignore", "the same in all rows")
    if not any(isinstance(value, bool) for value in present) and _are(present, numbers, MISTAKES):
        if distinct == len(values) and name.lower() in ("id", "index", "column 1"):
            return _Guess("ignore", "another value in each row")
        # 01234 is a code: a postal code, an article.
        is_code = any(isinstance(value, str) and re.fullmatch(r"0\d+", value) for value in present)
        return _Guess("category" if is_code else "number")
    if sum(not isinstance(value, str) or "-" in value for value in present) >= (1 - MISTAKES) * len(present) and _are(
        present, encoding.days, MISTAKES
    ):
        return _Guess("datetime")
    texts = [encoding.spelled(value) for value in present]
    if sum(PICTURES.fullmatch(text) is not None for text in texts) >= (1 - MISTAKES) * len(texts):
        return _Guess("image")
    words = sum(len(text.split()) for text in texts) / len(texts)
    if words >= WORDS_OF_A_TEXT and distinct > len(texts) / 2:
        return _Guess("text")
    if distinct == len(values) and len(values) >= 20 and words < 2:
        return _Guess("ignore", "another value in each row")
    return _Guess("category")


def _task(dataset: config.Table, looked: dict[str, list[Any]]) -> str:
    """Return what is learnt.

    Raises:
        UserError: several columns that are no numbers.
    """
    if dataset.separator is not None:
        return "multilabel"
    found = {name: _present(looked[name]) for name in dataset.target}
    for name, values in found.items():
        if _is_nested(values):
            raise UserError(
                f"dataset.target = '{name}': has values in values, such as {shown(values[0])}. Give a column of texts "
                "or numbers"
            )
    numbers = partial(encoding.numbers, decimal=dataset.decimal or ".")
    numeric = {name: bool(values) and _are(values, numbers) for name, values in found.items()}
    if len(found) > 1:
        if words := [name for name, are in numeric.items() if not are]:
            raise UserError(
                f"dataset.target = '{', '.join(dataset.target)}': the column '{words[0]}' has values that are no "
                "numbers. Several targets are labels of 0 and 1, or numbers of a regression. Give one of them"
            )
        every = np.concatenate([numbers(values, "") for values in found.values()])
        return "multilabel" if np.isin(every, (0, 1)).all() else "regression"
    (values,) = found.values()
    if not values or any(isinstance(value, bool) for value in values):
        return "classification"
    if not numeric[dataset.target[0]]:
        mistaken = len(set(values)) > MAX_CLASSES and _are(values, numbers, MISTAKES)
        return "regression" if mistaken else "classification"
    every = numbers(values, "")
    few = len(np.unique(every)) <= min(MAX_CLASSES, len(every) / 2)
    return "classification" if few and (every == np.rint(every)).all() else "regression"


def _lines(
    dataset: config.Table, task: str, columns: dict[str, config.TableColumn], guessed: dict[str, _Guess]
) -> list[str]:
    """Return what was guessed, as lines of 80 characters."""
    if not guessed and dataset.task != "auto":
        return []
    rows = {"task": [f"{task} of {', '.join(dataset.target)}"]}
    if dataset.decimal == ",":
        rows["decimal"] = ["numbers are written as 3,14"]
    for name, column in columns.items():
        why = guessed[name].why if name in guessed else ""
        rows.setdefault(column.kind, []).append(f"{name} ({why})" if why else name)
    first = f"guessed of the first rows; data/{dataset.name}/params.yaml has it, to be edited there:"
    return [first, *lines_of_kinds(rows)]


def lines_of_kinds(rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of columns behind what they are, as lines of 80 characters."""
    lines = []
    for kind, names in rows.items():
        text = textwrap.wrap(", ".join(names), 80 - 12, break_on_hyphens=False) if names else []
        lines += [f"  {title:<10}{line}" for title, line in zip([kind, *[""] * len(text)], text, strict=False)]
    return lines
