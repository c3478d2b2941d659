"""The first values of each column of a table: remarks on how they are written, and questions if two readings fit."""

import json
import operator
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np

from tasks import config
from tasks.data import dates
from tasks.data.encoding import cells
from tasks.data.tables import TableFile, num_rows_of
from tasks.system.errors import UserError, cut, listed, shown

LOOKED_AT = 10_000
"""The kind of a column is inferred from at most so many first rows."""
MAX_UNITS = 3
MOST_HEADER_ROWS = 4
NEGATIVE = r"[\d%]\s*[-)]\s*$"
"""A number with a trailing minus, or in parentheses."""
TRUTHS = {"1": "true", "0": "false", "t": "true", "f": "false", "y": "yes", "n": "no"}
MARKED = re.compile(r"[.,]\d|\d[.,]\W*$")
"""A number with a decimal mark, or with a mark between thousands."""
SIGNS = {"EUR": "€", "USD": "$", "US$": "$", "GBP": "£", "INR": "₹", "Rs": "₹", "CHF": "Fr", "PLN": "zł", "CZK": "Kč"}
"""The signs of currencies by their codes."""
WITH_UNIT = re.compile(
    rf"{cells.CURRENCY}?[+-]?\d+(?:[.,\s]\d+)*\s*((?:sq\.? |°)?(?:[^\W\d_]|[$€£])+(?:/[^\W\d_]+)?\.?|°)"
)
LIKE_NUMBERS = re.compile(r"(?:\W*\d[^\W\d]{0,4})+(?:\W+[A-Z])?\W*")
"""Words such as ``<0.5``, ``10-20``, ``2h 5m`` and ``48°12'N``."""
MAX_CLASSES = 20
"""A target of whole numbers with more distinct values is a regression."""


@dataclass(frozen=True)
class Sample:
    """The first values of a column."""

    name: str
    values: list[Any]
    present: list[Any]
    """Without missing values."""
    told: list[Any]
    """Without values that are missing in a column of numbers or dates, either; texts are stripped."""
    decimal: str = "."
    unit: str | None = None
    """What follows each number; ``told`` is without it."""
    is_whole: bool = True
    """Whether the table has no other rows."""

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
        if len(currencies := sorted({SIGNS.get(mark, mark) for mark in marks} - {"%"})) > 1:
            raise UserError(
                f"dataset.source = '{dataset.source}': the column '{self.name}' has numbers in several currencies: "
                f"{listed([repr(one) for one in currencies])}. Convert them to one"
                f"{as_words(self.name, dataset)}"
            )
        if "%" in marks:
            self._refuse_shares(texts, dataset)
        written = {mark: re.escape(mark) for mark in sorted(marks)}
        thousands = {*re.findall(rf"\d([{',' if self.decimal == '.' else '.'}'\u2019 ])\d{{3}}(?!\d)", lines)}
        written |= {f"{mark!r} between thousands": rf"\d{re.escape(mark)}\d{{3}}(?!\d)" for mark in sorted(thousands)}
        if re.search(NEGATIVE, lines, re.MULTILINE):
            written["parentheses or a trailing minus, read as negative"] = NEGATIVE
        times = {what: sum(re.search(form, text) is not None for text in texts) for what, form in written.items()}
        return (
            [f"numbers with {self.unit}"] * bool(self.unit)
            + [
                f"numbers with {what}" + (f" in {number:,} of {count:,} rows" if number < len(texts) else "")
                for what, number in times.items()
            ]
            + [*self._codes(), *self.absent()]
        )

    def _refuse_shares(self, texts: Sequence[str], dataset: config.Table) -> None:
        """Refuse percentages beside shares of 1: 45% is read as 45, and 0.45 as 0.45."""
        shares = [one for one in texts if "%" not in one and replace(self, told=[one]).are_numbers()]
        values = np.abs(cells.numbers(shares, "", self.decimal))
        if (values % 1 > 0).any() and (values <= 1).all():
            percentage = next(one for one in texts if "%" in one)
            raise UserError(
                f"dataset.source = '{dataset.source}': the column '{self.name}' has percentages such as "
                f"'{percentage}' and numbers up to 1 such as '{shares[int((values % 1 > 0).argmax())]}', which may be "
                f"shares. Write all in the same way{as_words(self.name, dataset)}"
            )

    def _codes(self) -> Iterator[str]:
        """Yield notes about numbers such as -999 that may mean a missing value."""
        lines = self.lines or "\n".join(map(cells.spelled, self.told))
        times = Counter(re.findall(r"^(-?99+)(?:\.0+)?$", lines, re.MULTILINE))
        codes = [code for code in times if times[code] >= max(2, len(self.values) / 100)]
        texts = dict.fromkeys(lines.split("\n")) if codes else {}
        rest = (one for one in texts if cells.spelled(one) not in codes and replace(self, told=[one]).are_numbers())
        others = cells.numbers([*rest], "", self.decimal)
        for code in codes if len(others) else ():
            if np.abs(others - float(code)).min() > np.ptp(others):
                yield (
                    f"{code} in {times[code]:,} of {len(self.values):,} rows is far from all others; if it means that "
                    f"there is no value: --set dataset.na_values=[{code}]"
                )

    def absent(self) -> list[str]:
        """Return notes about texts that count as missing only in a column of numbers or dates."""
        found: Counter[str] = Counter()
        if len(self.told) < len(self.present):
            texts = (value.strip() for value in self.present if isinstance(value, str) and cells.is_no_number(value))
            found.update(text for text in texts if text not in cells.MISSING_TEXTS)
        return [f"{times:,} of {len(self.values):,} are '{text}' and count as missing" for text, times in found.items()]


def look(file: TableFile, names: Iterable[str], dataset: config.Table) -> dict[str, Sample]:
    """Return the first values of some columns."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    for chunk in file.read(dict.fromkeys(found, "text"), LOOKED_AT) if found else ():
        for name, values in chunk.items():
            found[name] += cells.rows_of(values[: LOOKED_AT - len(found[name])])
        if num_rows_of(found) >= LOOKED_AT:
            break
    is_whole = num_rows_of(found) < LOOKED_AT
    missing_in = {name: cells.is_missing(values, dataset.not_missing) for name, values in found.items()}
    kept = ~np.all(list(missing_in.values()), 0)  # Not a row without any value.
    samples = {}
    for name, values in found.items():
        missing = missing_in[name][kept].tolist()
        values = list(compress(values, kept))
        present = [value for value, absent in zip(values, missing, strict=True) if not absent]
        stripped = [value.strip() if isinstance(value, str) else value for value in present]
        told = [value for value in stripped if not cells.is_no_number(value)]
        samples[name] = _without_unit(Sample(name, values, present, told, is_whole=is_whole))
    return samples


def _without_unit(sample: Sample) -> Sample:
    """Return a sample in which the unit that all numbers have is not part of them."""
    first = WITH_UNIT.fullmatch(str(sample.told[0])) if sample.told else None
    if first and not re.fullmatch(cells.CURRENCY, first[1]):
        found = replace(sample, told=cells.without_unit(sample.told, first[1]), unit=first[1])
        all_have = all(map(operator.ne, found.told, sample.told))
        if all_have and (found.are_numbers() or replace(found, decimal=",").are_numbers()):
            return found
    return sample


def refuse_second_header(dataset: config.Table, looked: Sequence[Sample]) -> None:
    """Refuse first rows that have no number, though all below them in a column are numbers: units, or questions of a
    survey; and a first row that names the choices of a survey."""

    def are_numbers(one: Sample, first: int, end: int | None = None) -> bool:
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
            f"{as_words(name, dataset)}"
        )
    # A survey has a column for each choice of a question: the header has the question, and the row below the choice.
    unnamed = [one for one in looked if one.present and re.fullmatch(r"column \d+", one.name)]
    choices = [one for one in unnamed if set(one.present) == {one.values[0]}]
    of_targets = [(one, one.values[0]) for one in looked if choices and one.name in dataset.target]
    if choices and all(
        not first or not (first in one.values[1:] or are_numbers(one, 0, 1)) for one, first in of_targets
    ):
        raise UserError(
            f"dataset.source = '{dataset.source}': the first row below the header has {shown(choices[0].values[0])} in "
            f"'{choices[0].name}', which has no name, and no other value is in that column. If the row belongs to the "
            "header, as the choices of a survey do: --set dataset.header_rows=2. If not, name the column or remove it"
        )


def decimal_mark(dataset: config.Table, looked: Iterable[Sample], delimiter: str) -> str | None:
    """Return the decimal separator of numbers, a point or a comma; None if no column leaves a choice.

    Raises:
        UserError: the separator is ambiguous, or columns contradict each other.
    """
    found: dict[str, dict[str, str]] = {".": {}, ",": {}, "either": {}}
    are_words = {name for name, kind in dataset.metadata.items() if kind != "number"}
    if dataset.task in ("classification", "multilabel") or dataset.separator is not None:
        are_words.update(dataset.target)
    for sample in looked:
        texts = [value for value in sample.told if isinstance(value, str)]
        marked = [text for text in texts if "," in text or "." in text]
        if not marked or sample.name in are_words:
            continue
        read_as = {mark: replace(sample, told=texts, decimal=mark) for mark in ".,"}
        readings = [mark for mark, one in read_as.items() if one.are_numbers()]
        if not readings:  # A reading with mistakes counts only if no other one fits all values.
            marked = [text for text in marked if MARKED.search(text)]
            readings = [mark for mark, one in read_as.items() if marked and one.are_numbers(dates.MISTAKES)]
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
            f"same way{as_words(name, dataset)}"
        )
    if either and not points and not commas_there:
        name, one = next(iter(either.items()))
        mark, fraction, thousands = ("comma", ",", ".") if "," in one else ("point", ".", ",")
        raise UserError(
            f"dataset.source = '{dataset.source}': the {mark} in '{one}' of the column '{name}' may be a decimal "
            f"mark or separate thousands. For a decimal mark: --set \"dataset.decimal='{fraction}'\"; for thousands: "
            f"--set \"dataset.decimal='{thousands}'\"{as_words(name, dataset)}"
        )
    if commas_there:
        return ","
    return "." if points or any("," in one for one in either.values()) else None


def as_words(name: str, dataset: config.Table) -> str:
    """Return the end of a question about the numbers of a column: the option that reads them as words, if any can."""
    if name in (dataset.weight, dataset.time) or (name in dataset.target and len(dataset.target) > 1):
        return ""
    if name in dataset.target:
        option = "--set dataset.task=classification"
    elif name in dataset.metadata:
        option = set_option(f"dataset.metadata.{name}=category")
    else:
        option = column_option(name, "category")
    return f"; to read '{name}' as words: {option}"


def column_option(name: str, value: str) -> str:
    """Return the option that describes a column; an equals sign in its name would end the key of a setting."""
    key = f"dataset.columns={{{json.dumps(name, ensure_ascii=False)}: {value}}}"
    return set_option(key if "=" in name else f"dataset.columns.{name}={value}")


def na_option(texts: Iterable[str]) -> str:
    """Return the option that reads these texts as missing values."""
    return set_option(f"dataset.na_values={json.dumps(list(texts), ensure_ascii=False)}")


def set_option(setting: str) -> str:
    """Return ``--set SETTING`` as a shell takes it."""
    quoted = shlex.quote(setting)
    return f"--set {quoted}" if quoted == setting or re.search(r'["$`!\\]', setting) else f'--set "{setting}"'


def why_words(sample: Sample) -> str:
    """Return why values that look like numbers or dates are read as words; nothing about other values."""
    words = [value for value in sample.told if isinstance(value, str)]
    words = words[:: 1 + len(words) // dates.SAMPLE]
    units = [found[1] for found in map(WITH_UNIT.fullmatch, words) if found]
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


def format_of(sample: Sample, dataset: config.Table) -> str | None:
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
    ways = " or ".join(column_option(name, f"{{kind: {kind}, format: '{form}'}}") for form in fitting)
    examples = ", ".join(dates.spread(texts)[:3])
    raise UserError(
        f"dataset.source = '{dataset.source}': the dates of the column '{name}', such as {examples}, can be "
        f"read in {len(fitting)} ways. Choose one: {ways}"
    )


def spellings(values: Iterable[Any]) -> Counter[str]:
    """Return how often each text occurs, each value as ``cells.spelled`` returns it."""
    values = list(values)
    if bool in map(type, values):  # For Python, True is 1.
        return Counter(map(cells.spelled, values))
    found: Counter[str] = Counter()
    for value, times in Counter(values).items():
        found[cells.spelled(value)] += times
    return found


def notes_on_categories(sample: Sample, dataset: config.Table) -> list[str]:
    """Return notes about words that are read as missing or may mean it, and about values that differ only in case or
    spaces, or are two words for true or false."""
    texts = spellings(value for value in sample.values if isinstance(value, str))
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
            f"read as a value; if there is none: {na_option(marks)}"
        )
    words = spellings(value for value in sample.values if isinstance(value, str | bool | int | float))
    return notes + notes_on_alike(words, sample.name)


def notes_on_alike(texts: Iterable[str], column: str) -> list[str]:
    """Return a note about the first two texts that differ only in case or spaces, or are words for the same truth."""
    alike: dict[str, str] = {}
    for text in texts:
        signs = unicodedata.normalize("NFKC", text).translate({0xFE0E: None, 0xFE0F: None})  # ❤ is also a picture.
        seen = "".join(sign for sign in signs if unicodedata.category(sign) != "Cf")
        key = " ".join(seen.casefold().split())
        if (other := alike.setdefault(TRUTHS.get(key, key), text)) != text:
            return [f"{other!r} and {text!r} of '{column}' may mean the same, and are two values"]
    return []


def refuse_labels_in_one_text(dataset: config.Table, target: Sample) -> None:
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
