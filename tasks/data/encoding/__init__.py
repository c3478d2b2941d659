"""Raw values of a table -> the arrays that a model takes; `prepare` and a served model use this very file.

It imports the standard library, NumPy, pandas for datetimes, and Pillow for pictures (and pi-heif where that is
installed) alone, because it goes with a model to where nothing else of the project is: as one file, which is why it is
longer than any other.
"""

import base64
import binascii
import contextlib
import errno
import io
import math
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

MISSING_TEXTS = frozenset(
    ("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
     "NULL", "NaN", "None", "n/a", "nan", "null")
)  # fmt: skip
"""What pandas reads as a missing value, too."""
MISSING, UNKNOWN, FIRST = 0, 1, 2
"""Places: of a missing value and of padding, of one that the vocabulary does not have, of the vocabulary's first."""
DATETIME_WIDTH = 7
"""Days since 1970, then sine and cosine of the time of the year, of the week and of the day."""
LARGEST = float(np.finfo(np.float32).max)
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")
MORE_FORMATS = ("TIFF", "JPEG2000", "AVIF", "PPM", "ICO")
"""Formats of images that are read beside those of data and requests where a person names the files, as Pillow calls
them. Pillow decodes each by itself, without another program, and knows it by its first bytes."""
HEIF = "HEIF"
"""What Pillow calls HEIC once pi-heif is there, which decodes it."""
INLINE = ";base64,"
HEIC = re.compile(rb".{4}ftyp(?:hei[cfmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL)
"""How a photograph of a telephone begins that Pillow does not read by itself."""
MAX_NAME = 255
"""Characters of a name that a file may have."""
SIXTEEN_BITS = 2**16 - 1
ORIENTATION = 0x0112
"""The EXIF tag that says how a camera was held; from 5 on, height and width change places."""
BETWEEN = "\0"
"""Stands between texts; it is a word by itself, and no text keeps it."""
UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Burmese, Khmer.
    r"\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # Japanese.
    r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese, and the signs that Japanese shares.
)
"""What is written without spaces: each character is a word."""
SIGNS = re.compile(rf"[^\w\s\0]|[{UNSPACED}]")
MICROSECONDS_A_DAY = 86_400_000_000

WHOLE_NUMBER = re.compile(r"([+-]?\d+)\.0+")
NO_NUMBER = frozenset(
    ("-", "--", "\u2013", "\u2014", "?", ".", "n.a.", "n.a", "N.A.", "#DIV/0!", "#VALUE!", "#REF!", "#NAME?", "#NUM!",
     "#NULL!")
)  # fmt: skip
"""What stands in a column of numbers where there is none, beside ``MISSING_TEXTS``."""
CURRENCY = (
    r"(?:(?:US|CA|AU|NZ|HK|A|C|R)?\$|[\u00a2-\u00a5\u0e3f\u20a0-\u20bf]|Rs\.?|Fr\.|kr\.?|z\u0142|K\u010d"
    r"|USD|EUR|GBP|CHF|JPY|CNY|INR|CAD|AUD|SEK|NOK|DKK|PLN|CZK|BRL)"
)
_NUMBER = r"""
    (?P<open>\()? \s* (?P<sign>[+\-\u2212])? \s* (?P<before>CURRENCY)? \s* (?P<inner>[+\-\u2212])? \s*
    (?: (?P<whole> [1-9]\d{0,2} (?P<between>[GROUP'\u2019\u00a0\u202f\u2009\x20])\d{3} (?:(?P=between)\d{3})*
                   | [1-9]\d? (?:[GROUP]\d{2})+ [GROUP]\d{3} | \d+ )
        (?:DECIMAL (?P<fraction>\d*))? | DECIMAL (?P<only>\d+) )
    (?P<power>[eE][+-]?\d+)? \s* (?P<after>%|CURRENCY)? \s* (?P<trailing>-)? \s* (?P<close>\))?
"""
WRITTEN = {
    decimal: re.compile(
        _NUMBER.replace("CURRENCY", CURRENCY).replace("GROUP", group).replace("DECIMAL", f"\\{decimal}"), re.VERBOSE
    )
    for decimal, group in ((".", ","), (",", "."))
}
"""A number as a person writes it, by what stands before its fraction: ``$1,200.00``, ``12 345``, ``45 %``, ``(3)``."""

LIST = re.compile(r"\s*\[.*\]\s*", re.DOTALL)
"""A list of Python or JSON, as a text."""

Numbers: TypeAlias = npt.NDArray[np.float64]
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]


class BadValue(ValueError):
    """A value that a column cannot hold."""

    def __init__(self, column: str, row: int, value: object, reason: str) -> None:
        value = value.item() if isinstance(value, np.generic) else value
        self.column, self.row, self.value, self.reason = column, row, value, reason
        shown = " ".join(repr(value).split())
        self.shown = shown if len(shown) <= 80 else f"{shown[:60]}...{shown[-17:]}"
        super().__init__(f"column '{column}', row {row}: {self.shown} {reason}")


class Repeated(NamedTuple):
    """Values of which each may stand in many rows."""

    values: Sequence[Any]
    rows: npt.NDArray[np.int64]
    """The place of each row's value in ``values``, int64 (n,)."""


Values: TypeAlias = Sequence[Any] | npt.NDArray[Any] | Repeated


def num_rows(values: Values) -> int:
    """Return how many rows there are."""
    return len(values.rows if isinstance(values, Repeated) else values)


def rows_of(values: Values) -> Sequence[Any]:
    """Return the value of each row, of Python's own types."""
    if isinstance(values, Repeated):
        return [values.values[row] for row in values.rows.tolist()]
    if isinstance(values, np.ndarray):
        return values.tolist() if values.ndim == 1 and values.dtype.kind != "M" else list(values)
    return values


def take(values: Values, rows: npt.NDArray[np.int64]) -> Values:
    """Return some rows, int64 (n,)."""
    if isinstance(values, Repeated):
        return Repeated(values.values, values.rows[rows])
    if isinstance(values, np.ndarray):
        return values[rows]
    return [values[row] for row in rows.tolist()]


def is_missing(values: Values, not_missing: Collection[str] = ()) -> npt.NDArray[np.bool_]:
    """Return which rows have no value, bool (n,): None, NaN, NaT, or a text that pandas takes for one.

    Args:
        values: of a column.
        not_missing: texts that are values all the same.
    """
    if isinstance(values, Repeated):
        return is_missing(values.values, not_missing)[values.rows] if len(values.rows) else np.zeros(0, bool)
    if isinstance(values, np.ndarray) and values.dtype.kind in "fM":
        return np.isnan(values) if values.dtype.kind == "f" else np.isnat(values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iub":
        return np.zeros(len(values), bool)
    if set(map(type, values)) <= {str, type(None)}:
        texts = MISSING_TEXTS.difference(not_missing)
        found = (value is None or value.strip() in texts for value in rows_of(values))
        return np.fromiter(found, bool, len(values))
    missing = np.fromiter(map(_is_missing, values), bool, len(values))
    return missing & [value not in not_missing for value in values] if not_missing else missing


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() in MISSING_TEXTS
    if isinstance(value, np.datetime64):
        return bool(np.isnat(value))
    return value is None or (not isinstance(value, bytes | np.ndarray) and bool(value != value))


def spelled(value: Any) -> str:
    """Return a category as a text: without spaces around it, in one Unicode form (NFC), a whole number without a point.

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

    Words are of small letters, and each sign that is neither a letter nor space is one by itself, as is each character
    of a language that is written without spaces.
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
    # One long text takes a fifth of the time of many short ones, searched for words.
    words = SIGNS.sub(r" \g<0> ", joined.lower()).split()
    ends = np.flatnonzero(np.fromiter(map(BETWEEN.__eq__, words), bool, len(words)))
    lengths = np.diff(np.concatenate([[-1], ends, [len(words)]])) - 1
    return [word for word in words if word != BETWEEN], lengths


def numbers(values: Values, column: str, decimal: str = ".") -> Numbers:
    """Return numbers, float64 (n,), with NaN for a missing one.

    Args:
        values: numbers, or texts of them.
        column: its name, for the error.
        decimal: what stands before the fraction in a text: a point, or a comma (3,14 and 1.234,5; but not 1.234, which
            may be either).

    Raises:
        BadValue: something else, or what float32 cannot hold.
    """
    if isinstance(values, Repeated):
        try:
            return numbers(values.values, column, decimal)[values.rows]
        except BadValue as bad:
            rows = np.flatnonzero(values.rows == bad.row)
            if not len(rows):  # In another part of the table.
                return numbers(rows_of(values), column, decimal)
            raise BadValue(column, int(rows[0]), bad.value, bad.reason) from None
    if isinstance(values, np.ndarray) and values.dtype.kind in "fiub":
        found = values.astype(np.float64)
    else:
        try:  # Most columns are as a program writes them, which takes a fifth of the time.
            if decimal != "." or any(isinstance(value, str) and "_" in value for value in values):
                raise ValueError
            found = np.fromiter(map(float, values), np.float64, len(values))
        except (TypeError, ValueError, OverflowError):
            read = (_number(value, column, row, decimal) for row, value in enumerate(values))
            found = np.fromiter(read, np.float64, len(values))
    beyond = np.abs(found) > LARGEST
    if beyond.any():
        row = int(beyond.argmax())
        raise BadValue(column, row, values[row], "is no number that float32 holds")
    return found


def is_no_number(value: Any) -> bool:
    """Return whether a value says that a column of numbers or of dates has none in its row."""
    return _is_missing(value) or (isinstance(value, str) and value.strip() in NO_NUMBER)


def _number(value: Any, column: str, row: int, decimal: str) -> float:
    if _is_missing(value):
        return np.nan
    try:
        return written_number(value, decimal) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        comma = " with a decimal comma" * (decimal == "," and isinstance(value, str))
        raise BadValue(column, row, value, f"is no number{comma}") from None


def written_number(text: str, decimal: str) -> float:
    """Return the number that a person wrote, NaN for what says that there is none.

    A currency may stand before or after it, a percent sign after it, and a comma or a point, a space or an apostrophe
    between its thousands; parentheses or a minus behind it make it negative. 45 % is 45.

    Raises:
        ValueError: it is no number.
    """
    text = text.strip()
    if text in NO_NUMBER:
        return np.nan
    if decimal == "." and "_" not in text:  # Python takes 1_000.
        try:
            return float(text)
        except ValueError:
            pass
    found = WRITTEN[decimal].fullmatch(text)
    if found is None or bool(found["open"]) != bool(found["close"]):
        raise ValueError
    whole = re.sub(r"\D", "", found["whole"] or "0")
    number = float(f"{whole}.{found['fraction'] or found['only'] or 0}{found['power'] or ''}")
    minus = [mark for mark in (found["open"], found["sign"], found["inner"], found["trailing"]) if mark and mark != "+"]
    return -number if minus else number


def days(values: Values, column: str, form: str | None = None) -> Numbers:
    """Return datetimes as days since 1970, float64 (n,), with NaN for a missing one.

    Args:
        values: datetimes, or texts of them.
        column: its name, for the error.
        form: how a text is written, as ``datetime.strptime`` has it (``%d/%m/%Y``). None is ISO 8601: 2026-01-31,
            2026-01-31 18:30, 2026-01-31T18:30:00+01:00. One with an offset becomes UTC.

    Raises:
        BadValue: something else.
    """
    if isinstance(values, np.ndarray) and values.dtype.kind == "M":
        instants = values.astype("datetime64[us]")
    else:
        instants = _read_instants(rows_of(values), column, form)
    found = instants.astype(np.int64) / MICROSECONDS_A_DAY
    found[np.isnat(instants)] = np.nan
    return found


def _read_instants(values: Sequence[Any], column: str, form: str | None) -> npt.NDArray[np.datetime64]:
    import pandas as pd  # A model without datetimes needs none.

    absent = np.fromiter(map(is_no_number, values), bool, len(values))
    given = [value.strip() if isinstance(value, str) else value for value in values]
    are_dates = [isinstance(value, str | date | np.datetime64) for value in given]
    known = np.array(are_dates, bool) & ~absent
    texts = pd.Series([value if is_one else None for value, is_one in zip(given, known, strict=True)], dtype=object)
    read = pd.to_datetime(texts, format=form or "ISO8601", utc=True, errors="coerce")
    if (wrong := read.isna().to_numpy() & ~absent).any():
        row = int(wrong.argmax())
        wanted = f"the form {form}" if form else "ISO 8601 (2026-01-31, 2026-01-31 18:30)"
        raise BadValue(column, row, values[row], f"is no date or time of {wanted}")
    found: npt.NDArray[np.datetime64] = read.dt.tz_localize(None).to_numpy("datetime64[us]")
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
    """Return the place of each number among k quantiles, which rise at equal shares: float64 (n,) from 0 to 1.

    Between two quantiles it is interpolated, of several equal ones it is their middle, and beyond the ends it is 0 or
    1, as scikit-learn's ``QuantileTransformer`` has it. NaN stays.
    """
    shares = np.linspace(0, 1, len(quantiles))
    # From below and from above, which differ where quantiles are equal.
    places = (np.interp(found, quantiles, shares) - np.interp(-found, -quantiles[::-1], -shares[::-1])) / 2
    places[found >= quantiles[-1]] = 1
    places[found <= quantiles[0]] = 0
    return places


class Encoder:
    """Encodes the columns of a table as the features of a prepared dataset.

    Args:
        features: those of ``records.PreparedDataset`` by name, each as a dict (``model_dump()``).
        vocabularies: of each feature of categories or words, the texts of each column from place 2 on.
        pictures: the folder that paths of images begin at and do not leave. Without one, a text is base64 of an image.
        workers: maps a function over pictures; ``map`` takes one after the other, a pool's several at once.
    """

    formats: tuple[str, ...] = FORMATS
    """Those that a file of an image may have, as Pillow calls them."""

    def __init__(
        self,
        features: Mapping[str, Mapping[str, Any]],
        vocabularies: Mapping[str, Sequence[Sequence[str]]],
        pictures: Path | None = None,
        workers: Callable[..., Iterable[Any]] = map,
    ) -> None:
        self._features, self._pictures, self._workers = features, pictures, workers
        self._places = {
            name: [{text: place for place, text in enumerate(texts, FIRST)} for texts in columns]
            for name, columns in vocabularies.items()
        }

    @property
    def columns(self) -> list[str]:
        """The columns that a table must have."""
        return [column["name"] for feature in self._features.values() for column in feature["columns"]]

    def model_input(self, given: Any) -> Any:
        """Return what the model takes: the only feature, (n, *shape), or all by name.

        Args:
            given: a data frame or a mapping, as ``encode`` takes it; where images are the only feature also their
                pixels of that shape, whole numbers from 0 to 255, or n files, as bytes or as base64.

        Raises:
            BadValue: see ``encode``.
            ValueError: see ``encode``; or pixels of another shape, or other numbers.
        """
        kinds = [feature["kind"] for feature in self._features.values()]
        if kinds == ["image"] and not hasattr(given, "keys"):
            # As objects: an array of bytes leaves out the zeros that a file ends with.
            is_files = isinstance(given, list | tuple) and len(given) > 0 and isinstance(given[0], bytes | str)
            return self._pixels(np.asarray(given, object) if is_files else np.asarray(given))
        features = self.encode({name: list(given[name]) for name in self.columns})
        return features if len(features) > 1 else next(iter(features.values()))

    def _pixels(self, given: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        ((name, feature),) = self._features.items()
        if given.size and isinstance(given.flat[0], bytes | str):
            files = given.ravel()
            if files.dtype.kind == "S":  # Whole, with the zeros that make all as long: no reader minds those.
                files = np.array([file.tobytes() for file in files.view(np.uint8).reshape(len(files), -1)], object)
            return self.encode({self.columns[0]: files.tolist()})[name]
        if given.dtype == object:  # As MLflow's server reads JSON.
            given = np.array(given.tolist())
        shape = tuple(feature["shape"])
        whole = given.dtype.kind in "iu" and (not given.size or (given.min() >= 0 and given.max() <= 255))
        if given.shape[1:] != shape or not whole:
            raise ValueError(
                f"got {given.dtype} {given.shape}: give n x {' x '.join(map(str, shape))} pixels, whole numbers from 0 "
                "to 255, or n files of images, as bytes or as base64"
            )
        return given.astype(np.uint8)

    def encode(self, table: Mapping[str, Values]) -> dict[str, npt.NDArray[Any]]:
        """Return the array of each feature, (n, *shape), of its dtype.

        Args:
            table: the values of each column, n of each: numbers as numbers or as text, categories and texts as text or
                numbers, datetimes as text of ISO 8601, images as path, bytes or uint8 array; None for a missing one.

        Raises:
            BadValue: a value that its column cannot hold, or a missing one that nothing stands for.
            ValueError: a column that is not there, or not as long as the others.
        """
        absent = [name for name in self.columns if name not in table]
        if absent:
            raise ValueError(f"these columns are missing: {', '.join(map(repr, absent))}")
        lengths = {num_rows(table[name]) for name in self.columns}
        if len(lengths) > 1:
            raise ValueError(f"the columns differ in length: {', '.join(map(str, sorted(lengths)))}")
        encoders: dict[str, Callable[..., npt.NDArray[Any]]] = {
            "number": self._numbers,
            "category": self._categories,
            "text": self._text,
            "image": self._images,
        }
        return {name: encoders[feature["kind"]](name, feature, table) for name, feature in self._features.items()}

    def _numbers(self, name: str, feature: Mapping[str, Any], table: Mapping[str, Values]) -> npt.NDArray[np.float32]:
        columns = feature["columns"]
        encoded = np.empty((num_rows(table[columns[0]["name"]]), *feature["shape"]), np.float32)
        place = 0
        for column in columns:
            own = column["name"]
            is_datetime = column["kind"] == "datetime"
            if is_datetime:
                found = days(table[own], own, column.get("format"))
            else:
                found = numbers(table[own], own, column.get("decimal", "."))
            missing = np.isnan(found)
            if missing.any():
                if column["fill"] is None:
                    raise BadValue(own, int(missing.argmax()), None, "is missing")
                found[missing] = column["fill"]
            if quantiles := column.get("quantiles"):
                found = quantile_places(found, np.asarray(quantiles))
            encoded[:, place : place + column["width"]] = (
                datetime_places(found) if is_datetime else found[:, np.newaxis]
            )
            place += column["width"]
        return encoded

    def _categories(self, name: str, feature: Mapping[str, Any], table: Mapping[str, Values]) -> npt.NDArray[np.int32]:
        found = [
            category_places(table[column["name"]], places)
            for column, places in zip(feature["columns"], self._places[name], strict=True)
        ]
        return np.stack(found, 1)

    def _text(self, name: str, feature: Mapping[str, Any], table: Mapping[str, Values]) -> npt.NDArray[np.int32]:
        (column,), (places,), (length,) = feature["columns"], self._places[name], feature["shape"]
        words, lengths = words_of(rows_of(table[column["name"]]))
        encoded = np.full((len(lengths), length), MISSING, np.int32)
        found = np.fromiter(map(places.get, words, repeat(UNKNOWN)), np.int32, len(words))
        rows = np.repeat(np.arange(len(lengths)), lengths)
        within = np.arange(len(words)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        kept = within < length
        encoded[rows[kept], within[kept]] = found[kept]
        return encoded

    def _images(self, name: str, feature: Mapping[str, Any], table: Mapping[str, Values]) -> npt.NDArray[np.uint8]:
        (column,) = feature["columns"]
        values = rows_of(table[column["name"]])
        shape = tuple(feature["shape"])
        decoded = list(self._workers(self.image, repeat(column["name"]), range(len(values)), values, repeat(shape)))
        return np.stack(decoded) if decoded else np.zeros((0, *shape), np.uint8)

    def image(self, column: str, row: int, value: Any, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Return the image of a row, uint8 of a shape; zeros for a missing one.

        Raises:
            BadValue: it is no whole image.
        """
        if isinstance(value, str | type(None) | float) and _is_missing(value):
            return np.zeros(shape, np.uint8)
        try:
            return decode_picture(self.opened(value), shape, self.formats)
        except PermissionError:
            raise
        except Exception as error:  # Pillow's readers raise whatever a broken file leads them to.
            # What it says of an unknown one is an address in the memory.
            unknown = type(error).__name__ == "UnidentifiedImageError"
            said = f"it is none of {', '.join(self.formats)}" if unknown else error
            raise BadValue(column, row, value, f"is no whole image ({said})") from None

    def opened(self, value: Any) -> Any:
        """Return what the image of a row is read from: a file, a path or an array.

        Raises:
            ValueError: a text that is neither.
        """
        if isinstance(value, bytes):
            return io.BytesIO(value)
        if not isinstance(value, str):
            return np.asarray(value)
        if self._pictures is not None:
            return inside(self._pictures, value)
        try:
            return io.BytesIO(base64.b64decode(value.partition(INLINE)[2] or value, validate=True))
        except binascii.Error:
            raise ValueError("a text is base64 of an image here, and no path") from None


class WholeEncoder(Encoder):
    """Encodes raw examples of which some are broken, for a person who names them."""

    def __init__(
        self,
        features: Mapping[str, Mapping[str, Any]],
        vocabularies: Mapping[str, Any],
        workers: Callable[..., Iterable[Any]] = map,
    ) -> None:
        super().__init__(features, vocabularies, None, workers)
        self.formats = (*FORMATS, *MORE_FORMATS)
        if any(feature["kind"] == "image" for feature in features.values()):
            self.formats += _register_heif()
        self._broken: dict[int, str] = {}
        self._folder: Path | None = None

    def encode_whole(self, columns: Mapping[str, Values], folder: Path | None = None) -> tuple[Arrays, dict[int, str]]:
        """Return the features of those rows that are whole, in their order, and why the others are not, by their place.

        Args:
            columns: as ``encode`` takes them.
            folder: where paths of images begin; without one a text is base64 of an image.
        """
        self._broken, self._folder = {}, folder
        count = num_rows(next(iter(columns.values())))
        try:
            encoded = self.encode(columns)
            broken = self._broken
        except BadValue:
            return self._one_by_one({name: rows_of(values) for name, values in columns.items()}, count)
        if broken:
            whole = [row for row in range(count) if row not in broken]
            encoded = {name: array[whole] for name, array in encoded.items()}
        return encoded, broken

    def _one_by_one(self, columns: Mapping[str, Any], count: int) -> tuple[Arrays, dict[int, str]]:
        found, broken = [], {}
        for row in range(count):
            self._broken = {}
            try:
                one = self.encode({name: [values[row]] for name, values in columns.items()})
            except BadValue as bad:
                broken[row] = _reason_in_words(bad)
                continue
            if self._broken:
                broken[row] = self._broken[0]
            else:
                found.append(one)
        if not found:
            return self.encode({name: [] for name in columns}), broken
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}, broken

    def image(self, column: str, row: int, value: Any, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Return the image of a row; zeros for one that is not whole, and remember why."""
        try:
            return super().image(column, row, value, shape)
        except BadValue as bad:
            self._broken[row] = f"column '{column}' {bad.reason}" if len(self.columns) > 1 else bad.reason
        except OSError as error:
            self._broken[row] = f"cannot be read ({error.strerror})"
        return np.zeros(shape, np.uint8)

    def opened(self, value: Any) -> Any:
        """Return what the image of a row is read from; a text that is no image itself is a path."""
        if isinstance(value, str) and self._folder is not None and INLINE not in value[:80]:
            path = self._folder / value
            try:
                if path.is_file():
                    return path
                is_folder = path.is_dir()
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                is_folder = False
            hint = "; base64 of an image begins with data:image/png;base64," if len(value) > MAX_NAME else ""
            raise ValueError("it is a folder" if is_folder else f"no such file{hint}")
        return super().opened(value)


def _register_heif() -> tuple[str, ...]:
    """Return what Pillow calls the format of photographs of telephones, where there is the package that decodes it."""
    try:
        from pi_heif import register_heif_opener
    except ImportError:
        return ()
    register_heif_opener()
    return (HEIF,)


def _reason_in_words(bad: BadValue) -> str:
    """Return why a row has no prediction, as an answer says it."""
    value = "" if bad.value is None else f"{bad.shown} "
    return f"column '{bad.column}': {value}{bad.reason}"


def category_places(values: Values, places: Mapping[str, int]) -> npt.NDArray[np.int32]:
    """Return the place of each value in a vocabulary, int32 (n,)."""
    if isinstance(values, Repeated):
        return category_places(values.values, places)[values.rows]
    rows = rows_of(values)
    return np.fromiter((_category_place(value, places) for value in rows), np.int32, len(rows))


def _category_place(value: Any, places: Mapping[str, int]) -> int:
    # A text that usually means a missing value may be one of the vocabulary: see ``dataset.values``.
    text = spelled(value)
    found = places.get(text)
    if found is None and isinstance(value, bool):
        found = places.get(text.lower())  # True may stand as true in the file that was trained on.
    if found is None:
        return MISSING if _is_missing(value) else UNKNOWN
    return found


def inside(folder: Path, path: str) -> Path:
    """Return a path in a folder.

    Raises:
        ValueError: it leads out of it, or is not one from there on.
    """
    place = folder / path
    try:
        leads_out = Path(path).is_absolute() or not place.resolve().is_relative_to(folder.resolve())
    except RuntimeError:  # Before Python 3.13.
        raise ValueError("it is a link round in a circle") from None
    if leads_out:
        raise ValueError("it leads out of the folder of the table")
    return place


def open_picture(source: Any, formats: tuple[str, ...] = FORMATS) -> Any:
    """Return what Pillow opens, with its header read; arguments and errors are those of ``decode_picture``."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(source, formats=formats)
    except UnidentifiedImageError:
        with open(source, "rb") if isinstance(source, str | Path) else contextlib.nullcontext(source) as file:
            file.seek(0)
            if HEIC.match(file.read(12)):
                if HEIF in formats:
                    raise ValueError("HEIC that is damaged, or of a kind that pi-heif does not read") from None
                # Where a person names the files, pi-heif is all that it takes.
                install = "install pi-heif (the extra 'heic'), or " if set(MORE_FORMATS) <= set(formats) else ""
                raise ValueError(
                    f"HEIC, which is not decoded here: {install}convert it to JPEG or PNG (heif-convert; sips on macOS)"
                ) from None
        raise
    # Pillow only warns of it up to twice as many, and a program of the user's may not have made that an error.
    if (pixels := image.width * image.height) > (most := Image.MAX_IMAGE_PIXELS or math.inf):
        image.close()
        raise ValueError(f"Image size ({pixels} pixels) exceeds limit of {most} pixels, it may be a decompression bomb")
    return image


def decode_picture(source: Any, shape: Sequence[int], formats: tuple[str, ...] = FORMATS) -> npt.NDArray[np.uint8]:
    """Return an image of any kind and size as the pixels that are seen, uint8 (height, width, channels).

    It is turned as its EXIF says, laid on white where it is transparent, brought to 8 bits, and resized (bilinear,
    antialiased, without keeping the aspect ratio).

    Args:
        source: a path, a file, or an array uint8 (height, width), or (height, width, channels).
        shape: of the result; channels are 1 or 3.
        formats: those that a file may have, as Pillow calls them.

    Raises:
        Exception: whatever Pillow's readers raise on a broken file.
    """
    from PIL import Image, ImageOps

    height, width, channels = shape
    mode = "L" if channels == 1 else "RGB"
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8:
            raise ValueError(f"an array of {source.dtype}, where uint8 is wanted")
        opened: Any = Image.fromarray(source[..., 0] if source.ndim == 3 and source.shape[2] == 1 else source)
    else:
        opened = open_picture(source, formats)
    with opened:
        is_turned = opened.getexif().get(ORIENTATION, 1) >= 5
        # JPEG's own decoder leaves out what a smaller image does not show: photographs of 500 x 375 and 375 x 500 took
        # 1.6 ms in place of 2.1 to become 224 x 168.
        opened.draft(mode, (height, width) if is_turned else (width, height))
        ImageOps.exif_transpose(opened, in_place=True)
        image = _eight_bits(opened)
        if image.mode != mode:
            image = image.convert(mode)
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(image, np.uint8).reshape(height, width, channels)


def _eight_bits(image: Any) -> Any:
    """Return an image of 8 bits a channel without transparency."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are fractions: save it with 8 or 16 bits a channel")
    if image.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255.
        values = np.asarray(image)
        if values.min() < 0 or values.max() > SIXTEEN_BITS:
            raise ValueError("its pixels are numbers of 32 bits: save it with 8 or 16 bits a channel")
        return Image.fromarray((values // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image)
    return image
