"""Determines the kind of each column of a table, and the task: from the description, or else from the first rows."""

import math
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from tasks import config
from tasks.data import dates, splits
from tasks.data.encoding import cells
from tasks.data.samples import (
    LOOKED_AT,
    MAX_CLASSES,
    WITH_UNIT,
    Sample,
    decimal_mark,
    format_of,
    look,
    notes_on_categories,
    refuse_labels_in_one_text,
    refuse_second_header,
    set_option,
    spellings,
    why_words,
)
from tasks.data.tables import TableFile, doubtful_header
from tasks.system.errors import UserError, listed, one_of, shown

WORDS_OF_A_TEXT = 3
MOST_NAMES = 30
"""At most so many names of columns of a kind and with the same remark are printed."""
UNSPACED_CHARACTER = re.compile(f"[{cells.UNSPACED}]")
FEWEST = 10
"""The fewest rows in which distinct values suggest an identifier."""
PICTURES = re.compile(r".+\.(png|jpe?g|bmp|gif|webp)", re.IGNORECASE)
ID_NAMES = re.compile(
    r"(.*[_\W])?(ids?|index|key|no|nr|num|number|code|account|order|invoice|ticket|serial|uuid|guid|row|rowid|column 1"
    r"|phone|mobile|isbn(1[03])?|ean|gtin)"
    r"|.*nummer|.*[a-z]I[dD]s?|unnamed: \d+|__index_level_\d+__",
    re.IGNORECASE,
)
"""Names of columns that number the rows or identify their subjects."""
BY_CHANCE = 0.01
"""Distinct whole numbers are identifiers if measured values would all be distinct with a lower probability than this:
exp(-n^2 / 2R) for n values in a range R."""
EXACT = 2**53
"""float64 cannot represent all larger whole numbers, so a column with such values is an identifier."""
WHOLE_NUMBER = re.compile(r"[+-]?\d+(\.0+)?")
MAX_FOLDERS = 20
"""If image paths lead to more places next to the table, DVC tracks the whole folder of the table."""
SUM = re.compile(r"(grand |sub)?totals?:?|sum|summe|(ins)?gesamt|total(e|es)?|合[计計]|总计", re.IGNORECASE)
ROLES = ("split_column", "group", "time", "weight")


def checked(dataset: config.Table, file: TableFile) -> config.Table:
    """Return a dataset with the names of its targets, and with a validation split if a random one would leak.

    Raises:
        UserError: no target, a missing column, or a column with contradictory roles.
    """
    names = dataset.target
    if not names:
        raise UserError(
            "dataset.target: a table needs the column that a model learns to predict. Use --target COLUMN, or "
            f"several as --target A,B. Allowed: {listed(file.names, 100)}"
        )
    if len(names) == 1 and names[0] not in file.names and "," in names[0]:
        names = tuple(name.strip() for name in names[0].split(","))
    if len(set(names)) < len(names):
        raise UserError(f"dataset.target = '{', '.join(names)}': names a column twice. Name each column once")
    dataset = dataset.model_copy(update={"target": names})
    _check_roles(dataset, file)
    if dataset.validation is None and dataset.split_column is None and (dataset.group or dataset.time):
        # A later draw from the training rows would share groups with them and would not be newer.
        return dataset.model_copy(update={"validation": 0.1})
    return dataset


def check_complete(dataset: config.Table, file: TableFile) -> None:
    """Refuse a file with columns that the description does not mention."""
    if others := _not_described(dataset, file):
        raise UserError(
            f"dataset.source = '{file.source}': the column '{others[0]}' is not in dataset.columns "
            f"({len(others)} of {len(file.names)} are not). Set its kind in data/{dataset.name}/params.yaml: number, "
            "datetime, category, text or ignore"
        )


def _not_described(dataset: config.Table, file: TableFile) -> list[str]:
    described = {*(dataset.columns or {}), *dataset.target, *dataset.metadata}
    described |= {getattr(dataset, role) for role in ROLES}
    return [name for name in file.names if name not in described]


def _check_roles(dataset: config.Table, file: TableFile) -> None:
    """Refuse missing columns and contradictory roles."""
    given = {name: column.kind for name, column in (dataset.columns or {}).items()}
    keys: dict[str, Iterable[str]] = {"target": dataset.target, "metadata": dataset.metadata, "columns": given}
    keys |= {role: [name] for role in ROLES if (name := getattr(dataset, role)) is not None}
    for key, names in keys.items():
        for name in names:
            if name not in file.names:
                hint = ""
                if file.header_lines and len(file.names) == 1:
                    hint = f". If its values are not separated by {file.delimiter!r}: --set dataset.delimiter=CHARACTER"
                elif file.header_lines and not doubtful_header(file):
                    hint = ". If its first line is not a header: --set dataset.header=null"
                raise UserError(
                    f"dataset.{key}: {one_of('column', name, file.names)} (dataset.source = '{file.source}'){hint}"
                )
    learned = {name: f"of kind {kind} in dataset.columns" for name, kind in given.items() if kind != "ignore"}
    for name, what in (learned | dict.fromkeys(dataset.target, "dataset.target")).items():
        if name in dataset.metadata:
            raise UserError(
                f"dataset.metadata.{name}: the column is {what}, so it already has slices. Remove it from metadata"
            )
    for key in ("target", "split_column", "weight"):
        if twice := [name for name in keys.get(key, ()) if name in learned]:
            raise UserError(
                f"dataset.columns.{twice[0]} = {given[twice[0]]}: the column is dataset.{key}, from which a model "
                "must not learn. Remove it from columns"
            )
    for other in ("group", "split_column"):
        if dataset.time is not None and (name := getattr(dataset, other)) is not None:
            raise UserError(
                f"dataset.time = '{dataset.time}' and dataset.{other} = '{name}': each of them defines the "
                "splits. Set only one"
            )


class _Guess(NamedTuple):
    kind: Any
    why: str = ""
    format: str | None = None
    unit: str | None = None


def fill_in(dataset: config.Table, file: TableFile) -> tuple[config.Table, list[str]]:
    """Return a ``checked`` dataset with the kinds of its columns and its task, and lines that report the guesses.

    Values in the description are kept; the others are guessed from the first rows.

    Raises:
        UserError: values are ambiguous.
    """
    given, others = dataset.columns or {}, _not_described(dataset, file)
    notes: list[str] = []
    roles = [name for name in (dataset.time, dataset.weight, *dataset.metadata) if name is not None]
    looked = look(file, dict.fromkeys([*others, *dataset.target, *roles]), dataset)
    if dataset.decimal is None:
        dataset = dataset.model_copy(update={"decimal": decimal_mark(dataset, looked.values(), file.delimiter)})
        notes = ["numbers are written as 3,14"] if dataset.decimal == "," else []
    if dataset.decimal == ",":
        looked = {name: replace(sample, decimal=",") for name, sample in looked.items()}
    if file.header_lines:
        refuse_second_header(dataset, [*looked.values()])
    targets = [looked[name] for name in dataset.target]
    guessed = {name: _kind(looked[name], dataset) for name in others}
    are_lists = targets[0].present and all(cells.LIST.fullmatch(cells.spelled(value)) for value in targets[0].present)
    if dataset.separator is None and dataset.task in ("auto", "multilabel") and len(targets) == 1 and are_lists:
        dataset = dataset.model_copy(update={"separator": ","})
        notes.append(f"'{dataset.target[0]}' contains lists of labels")
    task = _task(dataset, targets) if dataset.task == "auto" else dataset.task
    if dataset.task == "auto" and task == "classification":
        refuse_labels_in_one_text(dataset, targets[0])
    columns = {
        name: given.get(name)
        or config.TableColumn(kind=guessed[name].kind, format=guessed[name].format, unit=guessed[name].unit)
        for name in file.names
        if name in given or name in guessed
    }
    if task == "regression":
        notes += [f"'{one.name}': {note}" for one in targets for note in one.notes(dataset)]
    categories = [name for name, column in columns.items() if column.kind == "category" and name in looked]
    if task == "classification" and (why := why_words(targets[0])):
        classes = spellings(targets[0].present)
        single = [shown(text) for text in classes if classes[text] == 1]
        if dataset.task == "auto" and len(classes) > MAX_CLASSES and single:
            raise UserError(
                f"dataset.target = '{targets[0].name}': {why}; {len(single):,} of {len(classes):,} values are in only "
                f"one row, such as {', '.join(single[:3])}. For a regression, write all as numbers; for classes, with "
                f"at least 2 rows of each: --set dataset.task=classification (dataset.source = '{dataset.source}')"
            )
        notes.append(f"'{targets[0].name}': {why}")
    notes += [
        f"'{text}' at the end of '{one.name}' may be a sum of the other rows: remove its row if it is one"
        for one in looked.values()
        for text in one.told[-5:]
        if SUM.fullmatch(str(text))
    ]
    for name in (*(dataset.target if task == "classification" else ()), *categories):
        notes += notes_on_categories(looked[name], dataset)
    unseen: dict[str, config.TableColumn] = {}
    for name in (*roles, *(dataset.target if task == "regression" else ())):
        form = format_of(looked[name], dataset) if name == dataset.time and name not in columns else None
        if name not in columns and (form or looked[name].unit):
            unseen[name] = config.TableColumn(kind="ignore", format=form, unit=looked[name].unit)
    update: dict[str, Any] = {"columns": columns | unseen, "task": task}
    pictures = [name for name, column in columns.items() if column.kind == "image"]
    if pictures and not dataset.images:
        update["images"] = _places(file, pictures)
    if file.suffix == ".csv" and file.delimiter != ",":
        update["delimiter"] = file.delimiter
    return dataset.model_copy(update=update), _lines(dataset, task, columns, guessed, notes)


def top_of(path: str) -> str:
    """Return the first part of an image path: a file or folder next to the table."""
    return os.path.normpath(path).split(os.sep, 1)[0]


def _places(file: TableFile, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the files and folders next to the table that its image paths lead to."""
    found: set[str] = set()
    for chunk in file.read(dict.fromkeys(columns, "repeated")):
        for values in chunk.values():
            different, _ = cells.different(values)
            missing = cells.is_missing(different).tolist()
            found |= {top_of(cells.spelled(one)) for one, absent in zip(different, missing, strict=True) if not absent}
    there = sorted(place for place in found if place not in ("", "..") and (file.folder / place).exists())
    return tuple(there) if len(there) <= MAX_FOLDERS else (".",)


def _kind(sample: Sample, dataset: config.Table) -> _Guess:
    """Return the kind of a column."""
    name, values, present, told = sample.name, sample.values, sample.present, sample.told
    if sample.is_nested:
        return _Guess("ignore", "nested values")
    # For Python, True is 1.
    distinct = len(spellings(present)) if bool in map(type, present) else len(set(present))
    rows = "all rows" if sample.is_whole else f"the first {LOOKED_AT:,} rows"
    if not told and distinct < 2:
        return _Guess("ignore", "no values" if sample.is_whole else f"no values in {rows}")
    if distinct == 1 and len(values) > 1 and len(present) == len(values):
        return _Guess("ignore", f"the same in {rows}")
    if told and bool not in map(type, told):
        form = dates.compact_format(told)
        if form is None and sample.are_numbers(dates.MISTAKES):
            return _kind_of_numbers(sample, dataset)
        if form is None and not dates.are_seasons(told) and dates.are_iso(told):
            return _Guess("datetime", "; ".join(sample.absent()))
        if (form := form or format_of(sample, dataset)) is not None:
            years = ["two-digit years are 1969 to 2068"] * ("%y" in form)
            return _Guess("datetime", "; ".join([f"written as {form}", *years, *sample.absent()]), form)
    texts = spellings(present)
    if sum(texts[text] for text in texts if PICTURES.fullmatch(text)) >= (1 - dates.MISTAKES) * len(present):
        return _Guess("image")
    unspaced = {text: UNSPACED_CHARACTER.sub(" x ", text) for text in texts}
    are_texts = (text for text in texts if not dates.DATE.fullmatch(text) and not WITH_UNIT.fullmatch(text))
    words = (len(unspaced[text].split()) * texts[text] for text in are_texts)
    length = sum(words) / len(present)
    has_letters = any(map(str.isalpha, "".join(islice(texts, dates.SAMPLE))))
    if length >= WORDS_OF_A_TEXT and distinct > len(present) / 2 and has_letters:
        are_spaced = all(text == one for text, one in unspaced.items())
        return _Guess("text", "" if are_spaced else "each character is a word, as there are no spaces")
    why = why_words(sample)
    if distinct == len(values) and len(values) >= FEWEST:
        return _Guess("ignore", "; ".join(["a different value in each row", *filter(None, [why])]))
    if {text.lower() for text in texts} <= splits.WORDS.keys():
        return _Guess("category", f"names of splits: {set_option(f'dataset.split_column={name}')} uses them")
    return _Guess("category", why)


def _kind_of_numbers(sample: Sample, dataset: config.Table) -> _Guess:
    """Return whether numbers are quantities, categories or identifiers."""
    present, count = sample.present, len(sample.values)
    # 01234 is a code, such as a postal code.
    if re.search(r"^0\d+$", sample.lines, re.MULTILINE):
        is_id = len(set(present)) == count >= FEWEST
        return _Guess("ignore", "a different value in each row") if is_id else _Guess("category")
    # Only plain whole numbers without a missing value can be identifiers.
    if len(present) == count and all(map(WHOLE_NUMBER.fullmatch, map(str.strip, map(str, present)))):
        numbers = np.array([float(value) for value in present])
        steps = np.diff(numbers)
        if (len(numbers) >= FEWEST and len(set(steps)) == 1) or sample.name.lower() in ("index", "column 1"):
            return _Guess("ignore", "a row number")
        grows = len(numbers) >= FEWEST and ((steps > 0).all() or (steps < 0).all())
        are_years = ((numbers >= 1000) & (numbers <= 2100)).all()
        # Counts that add up, and a measure by which the rows are sorted, begin near 0 for their range.
        if grows and not are_years and np.abs(numbers).min() > np.ptp(numbers):
            return _Guess("ignore", "whole numbers in the order of the rows, like an identifier")
        by_chance = math.exp(-(count**2) / (2 * float(np.ptp(numbers) + 1)))
        is_code = by_chance < BY_CHANCE or np.abs(numbers).max() > EXACT or ID_NAMES.fullmatch(sample.name)
        if len(set(map(Decimal, map(str, present)))) == count > 1 and is_code:
            return _Guess("ignore", "a different whole number in each row, like an identifier")
    return _Guess("number", "; ".join(sample.notes(dataset)), unit=sample.unit)


def _task(dataset: config.Table, targets: Sequence[Sample]) -> str:
    """Return the task.

    Raises:
        UserError: nested values, or several targets that are not all numeric.
    """
    if dataset.separator is not None:
        return "multilabel"
    if len(targets) > 1:
        targets = [replace(one, told=list(map(cells.truth, one.told))) for one in targets]
    for one in targets:
        if one.is_nested:
            raise UserError(
                f"dataset.target = '{one.name}': the column has nested values, such as {shown(one.present[0])}. "
                "Choose one with texts or numbers"
            )
    words = [one for one in targets if not one.told or not one.are_numbers()]
    if len(targets) > 1 and words:
        raise UserError(
            f"dataset.target = '{', '.join(dataset.target)}': the column '{words[0].name}' has values that are not "
            "numbers. Several targets must all be labels of 0 and 1, or numbers of a regression. Leave this column out "
            f"(dataset.source = '{dataset.source}')"
        )
    told = targets[0].told
    if not told or (any(isinstance(value, bool) for value in told) and len(targets) == 1):
        return "classification"
    if words:
        mistaken = len(set(told)) > MAX_CLASSES and targets[0].are_numbers(dates.MISTAKES)
        return "regression" if mistaken else "classification"
    every = np.concatenate([cells.numbers(one.told, "", one.decimal) for one in targets])
    if len(targets) > 1:
        return "multilabel" if np.isin(every, (0, 1)).all() else "regression"
    few = len(np.unique(every)) <= min(MAX_CLASSES, len(every) / 2)
    return "classification" if few and (every == np.rint(every)).all() else "regression"


def _lines(
    dataset: config.Table,
    task: str,
    columns: dict[str, config.TableColumn],
    guessed: dict[str, _Guess],
    notes: list[str],
) -> list[str]:
    """Return a report of the guesses, in lines of 80 characters."""
    if not guessed and dataset.task != "auto":
        return []
    alike: dict[tuple[str, str], list[str]] = {}
    for name, column in columns.items():
        alike.setdefault((column.kind, guessed[name].why if name in guessed else ""), []).append(name)
    rows = {"task": [f"{task} of {', '.join(dataset.target)}"]}
    for (kind, why), names in alike.items():
        rows.setdefault(kind, []).append(listed(names, MOST_NAMES) + f" ({why})" * bool(why))
    lines = [f"guessed from the first rows; edit data/{dataset.name}/params.yaml if wrong:"]
    for title, names in [*rows.items(), *(("note", [note]) for note in notes)]:
        text = textwrap.wrap("; ".join(names), 80 - 12, break_on_hyphens=False)
        lines += [f"  {title if line is text[0] else '':<10}{line}" for line in text]
    return lines
