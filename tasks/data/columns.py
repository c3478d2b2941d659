"""Determines the kind of each column of a table: from the description, or else from the first rows."""

import json
import math
import os
import re
import shlex
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, islice
from typing import Any, NamedTuple

import numpy as np

from tasks import config
from tasks.data import dates, splits
from tasks.data.encoding import cells
from tasks.data.tables import TableFile, doubtful_header, num_rows_of
from tasks.system.errors import UserError, cut, listed, one_of, shown

LOOKED_AT = 10_000
"""The kind of a column is inferred from at most so many first rows."""
MAX_CLASSES = 20
"""A target of whole numbers with more distinct values is a regression."""
WORDS_OF_A_TEXT = 3
UNSPACED_CHARACTER = re.compile(f"[{cells.UNSPACED}]")
FEWEST = 10
"""The fewest rows in which distinct values suggest an identifier."""
MAX_UNITS = 3
MOST_HEADER_ROWS = 4
NEGATIVE = r"[\d%]\s*[-)]\s*$"
"""A number with a trailing minus, or in parentheses."""
ORDINALS = {"st", "nd", "rd", "th"}
WITH_UNIT = re.compile(rf"{cells.CURRENCY}?[+-]?\d+(?:[.,\s]\d+)*\s*(°?[^\W\d_]+(?:/[^\W\d_]+)?|°)")
LIKE_NUMBERS = re.compile(r"(?:\W*\d[^\W\d]{0,4})+(?:\W+[A-Z])?\W*")
"""Words such as ``<0.5``, ``10-20``, ``2h 5m`` and ``48°12'N``."""
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
ROLES = ("split_column", "group", "time", "weight")
VALIDATION = 0.1


def checked(dataset: config.Table, file: TableFile) -> config.Table:
    """Return a dataset with the names of its targets, and with a validation split if a random one would leak.

    Raises:
        UserError: no target, a missing column, or a column with contradictory roles.
    """
    dataset = _with_target(dataset, file)
    _check_roles(dataset, file)
    if dataset.validation is None and dataset.split_column is None and (dataset.group or dataset.time):
        # A later draw from the training rows would share groups with them and would not be newer.
        return dataset.model_copy(update={"validation": VALIDATION})
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


def _with_target(dataset: config.Table, file: TableFile) -> config.Table:
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
    return dataset.model_copy(update={"target": names})


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


@dataclass(frozen=True)
class _Sample:
    """The first values of a column."""

    name: str
    values: list[Any]
    present: list[Any]
    """Without missing values."""
    told: list[Any]
    """Without values that are missing in a column of numbers or dates, either; texts are stripped."""
    decimal: str = "."

    @cached_property
    def lines(self) -> str:
        """The texts in ``told``, a line each: one search in all of them takes a tenth of the time of many."""
        return "\n".join(value for value in self.told if isinstance(value, str))

    @property
    def is_nested(self) -> bool:
        return not {list, dict, bytes}.isdisjoint(map(type, self.present))

    def are_numbers(self, mistakes: float = 0.0) -> bool:
        """Return whether all values are numbers, or all but the fraction ``mistakes``."""
        return dates.can_read(self.told, lambda values: cells.numbers(values, "", self.decimal), mistakes)

    def notes(self, dataset: config.Table) -> list[str]:
        """Return notes about how numbers are written, and about texts that count as missing.

        Raises:
            UserError: the numbers are in several currencies.
        """
        count = len(self.values)
        # A full-width sign is the same sign.
        lines = unicodedata.normalize("NFKC", self.lines)
        texts = lines.split("\n")
        found = re.findall(f"{cells.CURRENCY}|%", re.sub(r"\d[\d.,\s-]*", " ", lines))
        marks = {mark.removesuffix(".") for mark in found}
        if len(currencies := sorted(marks - {"%"})) > 1:
            raise UserError(
                f"dataset.source = '{dataset.source}': the column '{self.name}' has numbers in several currencies: "
                f"{listed([repr(one) for one in currencies])}. Convert them to one"
                f"{_as_words(self.name, dataset)}"
            )
        written = {mark: re.escape(mark) for mark in sorted(marks)}
        thousands = {*re.findall(rf"\d([{',' if self.decimal == '.' else '.'}'\u2019 ])\d{{3}}(?!\d)", lines)}
        written |= {f"{mark!r} between thousands": rf"\d{re.escape(mark)}\d{{3}}(?!\d)" for mark in sorted(thousands)}
        if re.search(NEGATIVE, lines, re.MULTILINE):
            written["parentheses or a trailing minus, read as negative"] = NEGATIVE
        times = {what: sum(re.search(form, text) is not None for text in texts) for what, form in written.items()}
        return [
            f"numbers with {what}" + (f" in {number:,} of {count:,} rows" if number < len(texts) else "")
            for what, number in times.items()
        ] + [*self._doubtful(dataset), *self.absent()]

    def _doubtful(self, dataset: config.Table) -> Iterator[str]:
        """Yield notes about numbers such as -999 that may mean a missing value, and about 1.10 besides 1.1."""
        lines = self.lines or "\n".join(map(cells.spelled, self.told))
        times = Counter(re.findall(r"^(-?99+)(?:\.0+)?$", lines, re.MULTILINE))
        codes = [code for code in times if times[code] >= max(2, len(self.values) / 100)]
        padded = re.findall(r"^\d+\.\d+0$", lines, re.MULTILINE)
        texts = dict.fromkeys(lines.split("\n")) if codes or padded else {}
        rest = (one for one in texts if cells.spelled(one) not in codes and replace(self, told=[one]).are_numbers())
        others = cells.numbers([*rest] if codes else [], "", self.decimal)
        for code in codes if len(others) else ():
            if np.abs(others - float(code)).min() > np.ptp(others):
                yield (
                    f"{code} in {times[code]:,} of {len(self.values):,} rows is far from all others; leave the cell "
                    "empty if there is no value"
                )
        if again := [text for text in padded if text.rstrip("0") in texts]:
            yield f"'{again[0]}' is read as {again[0].rstrip('0')}{_as_words(self.name, dataset)}"

    def absent(self) -> list[str]:
        """Return notes about texts that count as missing only in a column of numbers or dates."""
        found: Counter[str] = Counter()
        if len(self.told) < len(self.present):
            texts = (value.strip() for value in self.present if isinstance(value, str) and cells.is_no_number(value))
            found.update(text for text in texts if text not in cells.MISSING_TEXTS)
        return [f"{times:,} of {len(self.values):,} are '{text}' and count as missing" for text, times in found.items()]


class _Guess(NamedTuple):
    kind: Any
    why: str = ""
    form: str | None = None


def fill_in(dataset: config.Table, file: TableFile) -> tuple[config.Table, list[str]]:
    """Return a ``checked`` dataset with the kinds of its columns and its task, and lines that report the guesses.

    Values in the description are kept; the others are guessed from the first rows.

    Raises:
        UserError: values are ambiguous.
    """
    given, others = dataset.columns or {}, _not_described(dataset, file)
    notes: list[str] = []
    roles = [name for name in (dataset.time, dataset.weight, *dataset.metadata) if name is not None]
    looked = _look(file, dict.fromkeys([*others, *dataset.target, *roles]), dataset)
    if dataset.decimal is None:
        dataset = dataset.model_copy(update={"decimal": _decimal(dataset, looked.values(), file.delimiter)})
        notes = ["numbers are written as 3,14"] if dataset.decimal == "," else []
    if dataset.decimal == ",":
        looked = {name: replace(sample, decimal=",") for name, sample in looked.items()}
    if file.header_lines:
        _refuse_second_header(dataset, [*looked.values()])
    targets = [looked[name] for name in dataset.target]
    guessed = {name: _kind(looked[name], dataset) for name in others}
    are_lists = targets[0].present and all(cells.LIST.fullmatch(cells.spelled(value)) for value in targets[0].present)
    if dataset.separator is None and dataset.task in ("auto", "multilabel") and len(targets) == 1 and are_lists:
        dataset = dataset.model_copy(update={"separator": ","})
        notes.append(f"'{dataset.target[0]}' contains lists of labels")
    task = _task(dataset, targets) if dataset.task == "auto" else dataset.task
    if dataset.task == "auto" and task == "classification":
        _refuse_labels_in_one_text(dataset, targets[0])
    columns = {
        name: given.get(name) or config.TableColumn(kind=guessed[name].kind, format=guessed[name].form)
        for name in file.names
        if name in given or name in guessed
    }
    if task == "regression":
        notes += [f"'{one.name}': {note}" for one in targets for note in one.notes(dataset)]
    categories = [name for name, column in columns.items() if column.kind == "category" and name in looked]
    if task == "classification" and (why := _why_words(targets[0])):
        classes = _spellings(targets[0].present)
        single = [shown(text) for text in classes if classes[text] == 1]
        if dataset.task == "auto" and len(classes) > MAX_CLASSES and single:
            raise UserError(
                f"dataset.target = '{targets[0].name}': {why}; {len(single):,} of {len(classes):,} values are in only "
                f"one row, such as {', '.join(single[:3])}. For a regression, write all as numbers; for classes, with "
                f"at least 2 rows of each: --set dataset.task=classification (dataset.source = '{dataset.source}')"
            )
        notes.append(f"'{targets[0].name}': {why}")
    for name in (*(dataset.target if task == "classification" else ()), *categories):
        notes += _notes_on_categories(looked[name], dataset)
    if dataset.time is not None and dataset.time not in columns:
        form = _format_of(looked[dataset.time], dataset)
        if form is not None:
            columns[dataset.time] = config.TableColumn(kind="ignore", format=form)
    update: dict[str, Any] = {"columns": columns, "task": task}
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


def _look(file: TableFile, names: Iterable[str], dataset: config.Table) -> dict[str, _Sample]:
    """Return the first values of some columns."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    for chunk in file.read(dict.fromkeys(found, "text"), LOOKED_AT) if found else ():
        for name, values in chunk.items():
            found[name] += cells.rows_of(values[: LOOKED_AT - len(found[name])])
        if num_rows_of(found) >= LOOKED_AT:
            break
    missing_in = {name: cells.is_missing(values, dataset.not_missing) for name, values in found.items()}
    kept = ~np.all(list(missing_in.values()), 0)  # Not a row without any value.
    samples = {}
    for name, values in found.items():
        missing = missing_in[name][kept].tolist()
        values = list(compress(values, kept))
        present = [value for value, absent in zip(values, missing, strict=True) if not absent]
        stripped = [value.strip() if isinstance(value, str) else value for value in present]
        told = [value for value in stripped if not cells.is_no_number(value)]
        samples[name] = _Sample(name, values, present, told)
    return samples


def _refuse_second_header(dataset: config.Table, looked: Sequence[_Sample]) -> None:
    """Refuse first rows that have no number, though all below them in a column are numbers: units, or questions of a
    survey."""

    def are_numbers(one: _Sample, first: int, end: int | None = None) -> bool:
        return replace(one, told=one.values[first:end]).are_numbers()

    end = 0
    while end < min(MOST_HEADER_ROWS, *(len(one.values) for one in looked)) and not any(
        are_numbers(one, end, end + 1) and not cells.is_no_number(one.values[end]) for one in looked
    ):
        end += 1
    numeric = [one for one in looked if len(one.told) > end and not are_numbers(one, 0, end) and are_numbers(one, end)]
    if numeric:
        rows = 1 + max(row for one in numeric for row in range(end) if not are_numbers(one, row, row + 1))
        name, texts = numeric[0].name, [str(one.values[0]) for one in looked if one.values[0]]
        raise UserError(
            f"dataset.source = '{dataset.source}': the first row below the header, {cut(', '.join(texts))!r}, has no "
            f"number, but the column '{name}' has numbers below it. If it belongs to the header, as units do: --set "
            f"dataset.header_rows={rows + 1}. If not, correct its value of '{name}' or leave it empty"
            f"{_as_words(name, dataset)}"
        )


def _decimal(dataset: config.Table, looked: Iterable[_Sample], delimiter: str) -> str | None:
    """Return the decimal separator of numbers, a point or a comma; None if no column leaves a choice.

    Raises:
        UserError: the separator is ambiguous, or columns contradict each other.
    """
    found: dict[str, dict[str, str]] = {".": {}, ",": {}, "either": {}}
    for sample in looked:
        texts = [value for value in sample.told if isinstance(value, str)]
        marked = [text for text in texts if "," in text or "." in text]
        if not marked or _are_words(sample.name, dataset):
            continue
        readings: list[str] = []
        for most in (0.0, dates.MISTAKES):  # A reading with mistakes counts only if no other one fits all values.
            fitting = (mark for mark in ".," if replace(sample, told=texts, decimal=mark).are_numbers(most))
            readings = readings or [*fitting]
        with_currency = len(readings) > 1 and re.search(cells.CURRENCY, "\n".join(marked)) is not None
        if len(readings) == 1:
            found[readings[0]][sample.name] = marked[0]
        elif readings and (commas := [text for text in marked if "," in text]):
            # An amount of money does not have three decimals.
            found["." if with_currency else "either"][sample.name] = commas[0]
        elif readings and (delimiter == ";" or with_currency):
            # Elsewhere 1.234 is a fraction, unless another column has decimal commas.
            found["either"][sample.name] = marked[0]
    points, commas_there, either = found.values()
    if points and commas_there:
        (point, with_point), (name, with_comma) = next(iter(points.items())), next(iter(commas_there.items()))
        raise UserError(
            f"dataset.source = '{dataset.source}': the column '{name}' has numbers with a decimal comma, such as "
            f"'{with_comma}', and '{point}' some with a decimal point, such as '{with_point}'. Write all in the "
            f"same way{_as_words(name, dataset)}"
        )
    if either and not points and not commas_there:
        name, one = next(iter(either.items()))
        mark, fraction, thousands = ("comma", ",", ".") if "," in one else ("point", ".", ",")
        raise UserError(
            f"dataset.source = '{dataset.source}': the {mark} in '{one}' of the column '{name}' may be a decimal "
            f"mark or separate thousands. For a decimal mark: --set \"dataset.decimal='{fraction}'\"; for thousands: "
            f"--set \"dataset.decimal='{thousands}'\"{_as_words(name, dataset)}"
        )
    if commas_there:
        return ","
    return "." if any("," in one for one in either.values()) else None


def _are_words(name: str, dataset: config.Table) -> bool:
    """Return whether the description says that the values of a column are not numbers."""
    is_class = dataset.task in ("classification", "multilabel") or dataset.separator is not None
    return (name in dataset.target and is_class) or dataset.metadata.get(name, "number") != "number"


def _as_words(name: str, dataset: config.Table) -> str:
    """Return the end of a question about the numbers of a column: the option that reads them as words, if any can."""
    if name in (dataset.weight, dataset.time) or (name in dataset.target and len(dataset.target) > 1):
        return ""
    if name in dataset.target:
        option = "--set dataset.task=classification"
    elif name in dataset.metadata:
        option = _option(f"dataset.metadata.{name}=category")
    else:
        option = _column_option(name, "category")
    return f"; to read '{name}' as words: {option}"


def _column_option(name: str, value: str) -> str:
    """Return the option that describes a column; an equals sign in its name would end the key of a setting."""
    key = f"dataset.columns={{{json.dumps(name, ensure_ascii=False)}: {value}}}"
    return _option(key if "=" in name else f"dataset.columns.{name}={value}")


def _option(setting: str) -> str:
    """Return ``--set SETTING`` as a shell takes it."""
    quoted = shlex.quote(setting)
    return f"--set {quoted}" if quoted == setting or re.search(r'["$`!\\]', setting) else f'--set "{setting}"'


def _kind(sample: _Sample, dataset: config.Table) -> _Guess:
    """Return the kind of a column."""
    name, values, present, told = sample.name, sample.values, sample.present, sample.told
    if sample.is_nested:
        return _Guess("ignore", "nested values")
    distinct = len(set(present))
    if not told and distinct < 2:
        return _Guess("ignore", "no values")
    if distinct == 1 and len(values) > 1 and len(present) == len(values):
        return _Guess("ignore", "the same in all rows")
    if told and bool not in map(type, told):
        if (form := dates.compact_format(told)) is not None:
            return _Guess("datetime", "; ".join([f"written as {form}", *sample.absent()]), form)
        if sample.are_numbers(dates.MISTAKES):
            return _kind_of_numbers(sample, dataset)
        if not dates.are_seasons(told) and dates.are_iso(told):
            return _Guess("datetime", "; ".join(sample.absent()))
        if (form := _format_of(sample, dataset)) is not None:
            return _Guess("datetime", "; ".join([f"written as {form}", *sample.absent()]), form)
    texts = _spellings(present)
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
    why = _why_words(sample)
    if distinct == len(values) and len(values) >= FEWEST:
        return _Guess("ignore", "; ".join(["a different value in each row", *filter(None, [why])]))
    if {text.lower() for text in texts} <= splits.WORDS.keys():
        return _Guess("category", f"names of splits: {_option(f'dataset.split_column={name}')} uses them")
    return _Guess("category", why)


def _why_words(sample: _Sample) -> str:
    """Return why values that look like numbers or dates are read as words; nothing about other values."""
    words = [value for value in sample.told if isinstance(value, str)]
    words = words[:: 1 + len(words) // dates.SAMPLE]
    units = [found[1] for found in map(WITH_UNIT.fullmatch, words) if found and found[1] not in ORDINALS]
    if len(units) > len(words) / 2 and len(set(units)) <= MAX_UNITS:
        return f"words, because the numbers have {listed(sorted(map(repr, set(units))))} after them"
    if dates.are_seasons(words):
        return f"years such as {words[0]}, not months"
    if sum(dates.DATE.fullmatch(word) is not None for word in words) > len(words) / 2:
        fits = dates.are_iso(words) or dates.formats_of(sorted(set(words)))
        return f"words, because {'a target cannot be a date' if fits else 'no form of a date fits all values'}"
    times = Counter(words)
    odd = [word for word in times if not replace(sample, told=[word]).are_numbers()]
    examples = ", ".join(map(shown, odd[:3]))
    share = 1 - sum(times[word] for word in odd) / max(1, len(words))
    if 0.5 < share < 1:
        return f"{share:.0%} of its values are numbers, but not {examples}"
    if odd and len(times) > MAX_CLASSES and sum(map(bool, map(LIKE_NUMBERS.fullmatch, words))) > len(words) / 2:
        return f"words, because {examples} are not numbers"
    return ""


def _kind_of_numbers(sample: _Sample, dataset: config.Table) -> _Guess:
    """Return whether numbers are quantities, categories or identifiers."""
    present, count = sample.present, len(sample.values)
    # 01234 is a code, such as a postal code.
    if re.search(r"^0\d+$", sample.lines, re.MULTILINE):
        return _Guess("category")
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
        if len(set(numbers)) == count > 1 and is_code:
            return _Guess("ignore", "a different whole number in each row, like an identifier")
    return _Guess("number", "; ".join(sample.notes(dataset)))


def _format_of(sample: _Sample, dataset: config.Table) -> str | None:
    """Return the ``strptime`` format of dates; None for ISO 8601 and for values that are not dates.

    Raises:
        UserError: several formats fit.
    """
    texts = sorted({value for value in sample.told if isinstance(value, str)})
    fitting = dates.formats_of(texts)
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    name = sample.name
    kind = "ignore" if name == dataset.time else "datetime"  # Rows are ordered by it, and a model need not see it.
    ways = " or ".join(_column_option(name, f"{{kind: {kind}, format: '{form}'}}") for form in fitting)
    examples = ", ".join(dates.spread(texts)[:3])
    raise UserError(
        f"dataset.source = '{dataset.source}': the dates of the column '{name}', such as {examples}, can be "
        f"read in {len(fitting)} ways. Choose one: {ways}"
    )


def _spellings(values: Iterable[Any]) -> Counter[str]:
    """Return how often each text occurs, each value as ``cells.spelled`` returns it."""
    found: Counter[str] = Counter()
    for value, times in Counter(values).items():
        found[cells.spelled(value)] += times
    return found


def _notes_on_categories(sample: _Sample, dataset: config.Table) -> list[str]:
    """Return notes about words that are read as missing or may mean it, and about values that differ only in case or
    spaces."""
    texts = _spellings(value for value in sample.values if isinstance(value, str))
    notes = [
        f"{texts[text]:,} of {len(sample.values):,} rows of '{sample.name}' are '{text}', read as missing; to keep it "
        f"as a value: --set \"dataset.not_missing=['{text}']\""
        for text in sorted(cells.MISSING_TEXTS - {""} - set(dataset.not_missing))
        if texts[text]
    ]
    if marks := sorted(texts.keys() & cells.NO_NUMBER - cells.MISSING_TEXTS):
        said = " or ".join(f"'{mark}'" for mark in marks)
        notes.append(
            f"{sum(texts[mark] for mark in marks):,} of {len(sample.values):,} rows of '{sample.name}' are {said}, "
            "read as a value; leave the cell empty where there is none"
        )
    alike: dict[str, str] = {}
    for text in texts:
        signs = unicodedata.normalize("NFKC", text).translate({0xFE0E: None, 0xFE0F: None})  # ❤ is also a picture.
        seen = "".join(sign for sign in signs if unicodedata.category(sign) != "Cf")
        if (other := alike.setdefault(" ".join(seen.casefold().split()), text)) != text:
            return [
                *notes,
                f"{other!r} and {text!r} of '{sample.name}' differ only in capital letters, spaces or signs without "
                "width, and are two values",
            ]
    return notes


def _task(dataset: config.Table, targets: Sequence[_Sample]) -> str:
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


def _refuse_labels_in_one_text(dataset: config.Table, target: _Sample) -> None:
    """Refuse a target whose values may be several labels: hot, wet and hot;wet would be three classes."""
    texts = {cells.spelled(value) for value in target.present}
    for mark in (";", "|", ",", "/"):
        several = {text for text in texts if mark in text and all(map(str.strip, text.split(mark)))}
        labels = {part.strip() for text in several for part in text.split(mark)}
        if labels & texts and len(labels | texts - several) < len(texts):
            one = min(several, key=lambda text: (-sum(part.strip() in texts for part in text.split(mark)), text))
            raise UserError(
                f"dataset.target = '{target.name}': {shown(one)} may be {one.count(mark) + 1} labels or one class, "
                f"because parts of it are also values. For labels: --set \"dataset.separator='{mark}'\"; for a class: "
                f"--set dataset.task=classification (dataset.source = '{dataset.source}')"
            )


def _lines(
    dataset: config.Table,
    task: str,
    columns: dict[str, config.TableColumn],
    guessed: dict[str, _Guess],
    notes: Sequence[str],
) -> list[str]:
    """Return a report of the guesses, in lines of 80 characters."""
    if not guessed and dataset.task != "auto":
        return []
    rows = {"task": [f"{task} of {', '.join(dataset.target)}"]}
    for name, column in columns.items():
        why = guessed[name].why if name in guessed else ""
        rows.setdefault(column.kind, []).append(f"{name} ({why})" if why else name)
    lines = [f"guessed from the first rows; edit data/{dataset.name}/params.yaml if wrong:"]
    for title, names in [*rows.items(), *(("note", [note]) for note in notes)]:
        text = textwrap.wrap(", ".join(names), 80 - 12, break_on_hyphens=False)
        lines += [f"  {title if line is text[0] else '':<10}{line}" for line in text]
    return lines
