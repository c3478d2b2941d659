"""Converts values of table columns to numbers, days, places in a vocabulary, and words."""

import contextlib
import re
import string
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

MISSING_TEXTS = frozenset(
    ("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
     "NULL", "NaN", "None", "n/a", "nan", "null")
)  # fmt: skip
"""The texts that pandas also reads as missing values."""
MISSING, UNKNOWN, FIRST = 0, 1, 2
"""Places of missing values and padding, of values that are not in the vocabulary, and of its first value."""
DATETIME_WIDTH = 7
"""Days since 1970, then sine and cosine of the time of the year, of the week and of the day."""
LARGEST = float(np.finfo(np.float32).max)
BETWEEN = "\0"
"""Separates joined texts as a word of its own; it is removed from the texts themselves."""
UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Burmese, Khmer.
    r"\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # Japanese.
    r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese, and the signs that Japanese shares.
)
"""Scripts without spaces, in which each character counts as a word."""
SIGNS = re.compile(rf"[^\w\s\0]|[{UNSPACED}]")
MICROSECONDS_A_DAY = 86_400_000_000

WHOLE_NUMBER = re.compile(r"([+-]?\d+)\.0+")
WORDS_FOR_MISSING = (
    "n.a.", "n.a", "n. a.", "n.d.", "n. d.", "k.a.", "k. a.", "n/d", "s/d", "na", "nd", "nil", "none", "null",
    "missing", "unknown", "not available",
)  # fmt: skip
NO_NUMBER = frozenset(
    ("-", "--", "\u2013", "\u2014", "?", "??", ".", "..", "...", "\u2026", ":", "*", "\\N", "(null)", "(blank)",
     "k.A.", "k. A.", "NaT", "0000-00-00", "0000-00-00 00:00:00", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!",
     "#NULL!", "#NV", "#N/D", "#WERT!", "#BEZUG!", "#ZAHL!", "#VALEUR!", "#VALOR!", "#ERROR!",
     *(f".{letter}" for letter in f"{string.ascii_letters}_"),  # Missing values of Stata and SAS.
     *(form(word) for word in WORDS_FOR_MISSING for form in (str.lower, str.upper, str.capitalize)))
)  # fmt: skip
"""Texts that also mean a missing value in a column of numbers or dates, besides ``MISSING_TEXTS``."""
NO_VALUE = MISSING_TEXTS | NO_NUMBER | {None}
CURRENCY = (
    r"(?:(?:US|CA|AU|NZ|HK|A|C|R)?\$|[\u00a2-\u00a5\u0e3f\u20a0-\u20bf]|Rs\.?|Fr\.|kr\.?|z\u0142|K\u010d"
    r"|\u0440\u0443\u0431\.?|Ft|TL|lei"
    r"|[\uff04\uffe0\uffe1\uffe5\uffe6\u5186\u5143\uc6d0]"  # Full-width signs; yen, yuan and won in words.
    r"|USD|EUR|GBP|CHF|JPY|CNY|INR|CAD|AUD|SEK|NOK|DKK|PLN|CZK|BRL)"
)
DASHES = "-\u2013\u2014"
NO_AMOUNT = re.compile(rf"{CURRENCY}\s*[{DASHES}]|[{DASHES}]\s*{CURRENCY}")
"""An empty amount in accounting notation: ``$ -``."""
_NUMBER = r"""
    (?:CURRENCY)? \s* (?P<open>\()? \s* (?P<sign>[+\-\u2212])? \s* (?P<before>CURRENCY)? \s* (?P<inner>[+\-\u2212])? \s*
    (?: (?P<whole> [1-9]\d{0,2} (?P<between>[GROUP'\u2019\u00a0\u202f\u2009\x20])\d{3} (?:(?P=between)\d{3})*
                   | [1-9]\d? (?:[GROUP]\d{2})+ [GROUP]\d{3} | \d+ )
        (?:DECIMAL (?:[DASH]{1,2} | (?P<fraction>\d*)))? (?:/-)? | DECIMAL (?P<only>\d+) )
    (?P<power>[eE][+-]?\d+)? \s* (?P<after>%|CURRENCY)? \s* (?P<trailing>-)? \s* (?P<close>\))?
"""
WRITTEN = {
    decimal: re.compile(
        _NUMBER.replace("CURRENCY", CURRENCY)
        .replace("GROUP", group)
        .replace("DECIMAL", f"\\{decimal}")
        .replace("DASH", DASHES),
        re.VERBOSE,
    )
    for decimal, group in ((".", ","), (",", "."))
}
"""Patterns of numbers as people write them, by decimal mark: ``$1,200.00``, ``12 345``, ``45 %``, ``(3)``, ``5.-``,
``5/-``."""

LIST = re.compile(r"\s*\[.*\]\s*", re.DOTALL)
"""A Python or JSON list as text."""

Numbers: TypeAlias = npt.NDArray[np.float64]


class BadValue(ValueError):
    """A value that a column cannot hold."""

    def __init__(self, column: str, row: int, value: object, reason: str) -> None:
        value = value.item() if isinstance(value, np.generic) else value
        self.column, self.row, self.value, self.reason = column, row, value, reason
        shown = " ".join(repr(value).split())
        self.shown = shown if len(shown) <= 80 else f"{shown[:60]}...{shown[-17:]}"
        super().__init__(f"column '{column}', row {row}: {self.shown} {reason}")


Values: TypeAlias = Any
"""The values of a column: an array (n,) of numbers, datetimes or objects, a sequence, or a ``pandas.Categorical``, of
which each category is processed once."""

Wanted: TypeAlias = str
"""How a column is read: ``number``; ``repeated`` for columns with many equal values; ``text``; ``datetime`` for ISO
8601; or a ``datetime.strptime`` format for other datetimes."""


def open_parquet(path: Path) -> Any:
    """Return an open Parquet file."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(path)


def values_of(column: Any, wanted: Wanted) -> Values:
    """Return a column of pandas as an array of numbers or instants, as a ``Categorical`` where values are repeated, or
    as an array of objects with None where a value is missing."""
    import pandas as pd  # A model of images needs none.

    if isinstance(column.dtype, pd.CategoricalDtype):
        return column.array
    if pd.api.types.is_timedelta64_dtype(column.dtype):
        column = column.dt.total_seconds()
    if pd.api.types.is_datetime64_any_dtype(column.dtype):
        plain = column.dt.tz_convert("UTC").dt.tz_localize(None) if column.dt.tz is not None else column
        return plain.to_numpy("datetime64[us]")
    if wanted == "number" and column.dtype.kind in "fiu":
        return column.to_numpy(np.float64)
    if wanted == "repeated" and isinstance(column.dtype, pd.StringDtype):
        return pd.Categorical.from_codes(*pd.factorize(column))
    if wanted == "datetime" and isinstance(column.dtype, pd.StringDtype):
        with contextlib.suppress(ValueError):  # Arrow reads only complete ISO 8601, but in a ninth of the time.
            return column.astype("timestamp[us][pyarrow]").to_numpy("datetime64[us]")
    found = column.to_numpy(object, na_value=None)
    kind = pd.api.types.infer_dtype(found, skipna=True)
    if kind == "time" or kind.startswith("mixed"):
        found = np.fromiter(map(_without_time, found), object, len(found))
    if kind != "string":
        plain = (value.tolist() if isinstance(value, np.ndarray) else value for value in found)
        found = np.fromiter(plain, object, len(found))
    if wanted == "repeated" and not any(isinstance(value, list | dict) for value in found):
        if kind.startswith("mixed"):  # For Python, True is 1.
            found = np.fromiter(
                (str(value) if isinstance(value, bool) else value for value in found), object, len(found)
            )
        places, values = pd.factorize(found)
        return pd.Categorical.from_codes(places, values.astype(str) if kind == "boolean" else values)
    if wanted == "datetime" or "%" in wanted:
        with contextlib.suppress(BadValue):  # Of a row that is perhaps left out; who encodes it names it.
            return instants(found, "", None if wanted == "datetime" else wanted)
    return found


def _without_time(value: Any) -> Any:
    """Return a time of day as text in ISO 8601, as CSV has it, and any other value as it is."""
    return value.isoformat() if isinstance(value, time) else value


def rows_of(values: Values) -> Sequence[Any]:
    """Return the value of each row as a built-in Python type."""
    if isinstance(values, np.ndarray) and (values.ndim > 1 or values.dtype.kind == "M"):
        return list(values)
    found: Sequence[Any] = values.tolist() if hasattr(values, "tolist") else values
    return found


def without(values: Values, na_values: Collection[str]) -> Values:
    """Return the values of a column without those that mean a missing value, as ``spelled`` returns these."""
    if not na_values:
        return values
    if hasattr(values, "codes"):
        return values.remove_categories([one for one in values.categories if spelled(one) in na_values])
    if isinstance(values, np.ndarray) and values.dtype.kind in "fiu":
        numbers_of = [float(one) for one in na_values if re.fullmatch(r"[+-]?\d+(\.\d+)?", one)]
        return np.where(np.isin(values, numbers_of), np.nan, values.astype(np.float64))
    if isinstance(values, np.ndarray) and values.dtype != object:
        return values
    kept = (None if isinstance(one, str | int | float) and spelled(one) in na_values else one for one in values)
    return np.fromiter(kept, object, len(values))


def different(values: Values) -> tuple[Sequence[Any], npt.NDArray[np.int64]]:
    """Return distinct values, and each row's index among them, int64 (n,); some values may have no row."""
    if not hasattr(values, "codes"):
        return rows_of(values), np.arange(len(values))
    categories = values.categories.tolist()
    return [*categories, None], np.where(values.codes < 0, len(categories), values.codes).astype(np.int64)


def is_missing(values: Values, not_missing: Collection[str] = ()) -> npt.NDArray[np.bool_]:
    """Return which rows have no value, bool (n,): None, NaN, NaT, or a text that pandas reads as missing.

    Args:
        values: of a column.
        not_missing: texts that nevertheless count as values.
    """
    kind = values.dtype.kind if isinstance(values, np.ndarray) else "O"
    if kind in "fM":
        absent: npt.NDArray[np.bool_] = np.isnan(values) if kind == "f" else np.isnat(values)
        return absent
    if kind in "iub":
        return np.zeros(len(values), bool)
    found, places = different(values)
    missing = np.fromiter(map(_is_missing, found), bool, len(found))
    if not_missing:
        kept = (isinstance(value, str) and value.strip() in not_missing for value in found)
        missing &= ~np.fromiter(kept, bool, len(found))
    return missing[places]


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() in MISSING_TEXTS
    if isinstance(value, np.datetime64):
        return bool(np.isnat(value))
    return value is None or (not isinstance(value, bytes | np.ndarray) and bool(value != value))


def spelled(value: Any) -> str:
    """Return a category as text: stripped, in Unicode form NFC, and a whole number without a decimal point.

    So ``"tall "`` is ``"tall"``, and ``0``, ``0.0`` and ``"0.0"`` are ``"0"``.
    """
    if isinstance(value, str):
        text = value.strip()
        whole = WHOLE_NUMBER.fullmatch(text)
        return str(int(whole[1])) if whole else text if text.isascii() else unicodedata.normalize("NFC", text)
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


def words_of(texts: Sequence[Any]) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Return the words of all texts, one after the other, and how many each text has, int64 (n,).

    Words are in lowercase. Each punctuation mark or symbol is a word of its own, and so is each character of a script
    without spaces.
    """
    if not len(texts):
        return [], np.zeros(0, np.int64)
    missing = is_missing(texts).tolist()
    plain = ["" if absent else spelled(text) for text, absent in zip(texts, missing, strict=True)]
    joined = f" {BETWEEN} ".join(plain)
    if joined.count(BETWEEN) >= len(plain):
        joined = f" {BETWEEN} ".join(text.replace(BETWEEN, " ") for text in plain)
    if not joined.isascii():
        joined = unicodedata.normalize("NFC", joined)
    # Splitting one long text takes a fifth of the time of many short ones.
    words = SIGNS.sub(r" \g<0> ", joined.lower()).split()
    ends = np.flatnonzero(np.fromiter(map(BETWEEN.__eq__, words), bool, len(words)))
    lengths = np.diff(np.concatenate([[-1], ends, [len(words)]])) - 1
    return [word for word in words if word != BETWEEN], lengths


def numbers(values: Values, column: str, decimal: str = ".", unit: str | None = None) -> Numbers:
    """Return numbers, float64 (n,), with NaN for missing values.

    Args:
        values: numbers, or numbers as text.
        column: its name, for the error.
        decimal: the decimal separator in texts: a point, or a comma (3,14 and 1.234,5; but not 1.234, which is
            ambiguous).
        unit: may follow the number in a text.

    Raises:
        BadValue: not a number, or a number outside of the range of float32.
    """
    if hasattr(values, "codes"):
        categories, places = different(values)
        used = np.unique(places)  # A category that no row of this part has may be no number.
        try:
            of_value = numbers([categories[place] for place in used.tolist()], column, decimal, unit)
        except BadValue as bad:
            row = int((places == used[bad.row]).argmax())
            raise BadValue(column, row, bad.value, bad.reason) from None
        each: Numbers = of_value[np.searchsorted(used, places)]
        return each
    if isinstance(values, np.ndarray) and values.dtype.kind in "fiub":
        found = values.astype(np.float64)
    else:
        if unit:
            values = without_unit(values, unit)
        try:  # Most columns are as a program writes them, which takes a tenth of the time.
            plain = [np.nan if value in NO_VALUE else value for value in values]
            if decimal != "." or "_" in "".join(map(str, values)):
                raise ValueError
            found = np.fromiter(map(float, plain), np.float64, len(plain))
        except (TypeError, ValueError, OverflowError):
            read = (_number(value, column, row, decimal) for row, value in enumerate(values))
            found = np.fromiter(read, np.float64, len(values))
    beyond = np.abs(found) > LARGEST
    if beyond.any():
        row = int(beyond.argmax())
        raise BadValue(column, row, values[row], "does not fit in float32")
    return found


def without_unit(values: Sequence[Any], unit: str) -> list[Any]:
    """Return values without the unit that follows a number."""
    numbers_with = re.compile(rf"(.*\d)\s*{re.escape(unit)}\s*")
    return [found[1] if isinstance(one, str) and (found := numbers_with.fullmatch(one)) else one for one in values]


def truth(value: Any) -> Any:
    """Return 1 for True and 0 for False as text, as pandas, R and Excel write them, and any other value as it is."""
    return {"true": 1, "false": 0}.get(value.strip().lower(), value) if isinstance(value, str) else value


def is_no_number(value: Any) -> bool:
    """Return whether a value means "missing" in a column of numbers or dates."""
    if not isinstance(value, str):
        return _is_missing(value)
    text = value.strip()
    has_dash = text[:1] in DASHES or text[-1:] in DASHES  # Known at once, which an expression is not.
    return text in NO_VALUE or (has_dash and NO_AMOUNT.fullmatch(text) is not None)


def _number(value: Any, column: str, row: int, decimal: str) -> float:
    """Return a number as people write it, NaN for a value that means "missing".

    The number may have a currency before or after it, a percent sign after it, and a comma, point, space or apostrophe
    between thousands; parentheses or a trailing minus make it negative. 45 % is 45.

    Raises:
        BadValue: the value is not a number.
    """
    if is_no_number(value):
        return np.nan
    try:
        # Python takes 1_000.
        if not isinstance(value, str) or (decimal == "." and "_" not in value):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    found = WRITTEN[decimal].fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None or bool(found["open"]) != bool(found["close"]):
        comma = " with a decimal comma" * (decimal == "," and isinstance(value, str))
        raise BadValue(column, row, value, f"is not a number{comma}")
    whole = re.sub(r"\D", "", found["whole"] or "0")
    number = float(f"{whole}.{found['fraction'] or found['only'] or 0}{found['power'] or ''}")
    minus = [mark for mark in (found["open"], found["sign"], found["inner"], found["trailing"]) if mark and mark != "+"]
    return -number if minus else number


def days(values: Values, column: str, form: str | None = None) -> Numbers:
    """Return datetimes as days since 1970, float64 (n,), with NaN for missing values.

    Args:
        values: datetimes, or datetimes as text.
        column: its name, for the error.
        form: the ``datetime.strptime`` format of texts (``%d/%m/%Y``). None is ISO 8601: 2026-01-31,
            2026-01-31 18:30, 2026-01-31T18:30:00+01:00. Datetimes with an offset are converted to UTC.

    Raises:
        BadValue: not a datetime.
    """
    found_at = instants(values, column, form)
    found = found_at.astype(np.int64) / MICROSECONDS_A_DAY
    found[np.isnat(found_at)] = np.nan
    return found


def instants(values: Values, column: str, form: str | None = None) -> npt.NDArray[np.datetime64]:
    """Return datetimes in UTC, datetime64[us] (n,), with NaT for missing values; arguments and errors are those of
    ``days``."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "M":
        return values.astype("datetime64[us]")
    import pandas as pd

    def parsed(given: Any) -> npt.NDArray[np.datetime64]:
        texts = pd.Series(given, dtype=object)
        texts = texts.mask(texts.isin(("now", "today")))  # pandas takes them for the moment at which it reads.
        read = pd.to_datetime(texts, format=form or "ISO8601", utc=True, errors="coerce")
        times: npt.NDArray[np.datetime64] = read.dt.tz_localize(None).to_numpy("datetime64[us]", copy=True)
        return times

    given = values = np.fromiter(rows_of(values), object, len(values)) if hasattr(values, "codes") else values
    if pd.api.types.infer_dtype(values, skipna=True) != "string":
        known = (str, date, time, np.datetime64)
        given = [_without_time(value) if isinstance(value, known) else None for value in values]
    found = parsed(given)
    rows = np.flatnonzero(np.isnat(found))
    others = [values[row] for row in rows.tolist()]
    absent = np.fromiter(map(is_no_number, others), bool, len(others))
    found[rows] = parsed([value.strip() if isinstance(value, str) else None for value in others])
    if (wrong := np.isnat(found[rows]) & ~absent).any():
        row = int(rows[wrong.argmax()])
        wanted = f"the form {form}" if form else "ISO 8601 (2026-01-31, 2026-01-31 18:30)"
        raise BadValue(column, row, values[row], f"is not a date or time of {wanted}")
    return found


def datetime_places(found: Numbers) -> Numbers:
    """Return days since 1970 as the numbers of ``DATETIME_WIDTH``, float64 (n, 7)."""
    since = np.floor(np.nan_to_num(found)).astype("datetime64[D]")
    year = since.astype("datetime64[Y]")
    first = year.astype("datetime64[D]").astype(np.int64)
    length = (year + np.timedelta64(1, "Y")).astype("datetime64[D]").astype(np.int64) - first
    places = np.empty((len(found), DATETIME_WIDTH))
    places[:, 0] = found
    # 1970 began on a Thursday.
    for number, turns in enumerate(((found - first) / length, (found + 3) / 7, found)):
        angles = 2 * np.pi * (turns - np.floor(turns))
        places[:, 1 + 2 * number], places[:, 2 + 2 * number] = np.sin(angles), np.cos(angles)
    return places


def quantile_places(found: Numbers, quantiles: Numbers) -> Numbers:
    """Return the position of each number among k equally spaced quantiles: float64 (n,) from 0 to 1.

    As in scikit-learn's ``QuantileTransformer``, it is interpolated between two quantiles, the middle of several equal
    quantiles, and 0 or 1 beyond the ends. NaN stays NaN.
    """
    shares = np.linspace(0, 1, len(quantiles))
    # From below and from above, which differ at equal quantiles.
    places = (np.interp(found, quantiles, shares) - np.interp(-found, -quantiles[::-1], -shares[::-1])) / 2
    places[found >= quantiles[-1]] = 1
    places[found <= quantiles[0]] = 0
    return places


def category_places(values: Values, places: Mapping[str, int]) -> npt.NDArray[np.int32]:
    """Return the place of each value in a vocabulary, int32 (n,)."""
    found, rows = different(values)
    # Most values are spelled as in the vocabulary.
    of_value = (places.get(one) if type(one) is str else None for one in found)
    each = (_category_place(one, places) if own is None else own for one, own in zip(found, of_value, strict=True))
    return np.fromiter(each, np.int32, len(found))[rows]


def _category_place(value: Any, places: Mapping[str, int]) -> int:
    # A text that usually means a missing value may be in the vocabulary: see ``dataset.not_missing``.
    text = spelled(value)
    found = places.get(text)
    if found is None and text.lower() in ("true", "false"):  # pandas writes True, Excel TRUE, and JSON true.
        found = next((places[one] for one in (text.title(), text.upper(), text.lower()) if one in places), None)
    return found if found is not None else MISSING if _is_missing(value) else UNKNOWN
