"""Raw values of a table -> the arrays that a model takes; `prepare` and a served model use this very package.

It goes with a model to where nothing else of the project is. So it imports its own files by their relative names, and
beside these the standard library, NumPy, pandas for datetimes, and Pillow for pictures (and pi-heif where that is
installed) alone.
"""

import base64
import binascii
import errno
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import cells
from .cells import BadValue, Values
from .pictures import FORMATS, MORE_FORMATS, decode_picture, inside, register_heif

INLINE = ";base64,"
MAX_NAME = 255
"""Characters of a name that a file may have."""

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]


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
            name: [{text: place for place, text in enumerate(texts, cells.FIRST)} for texts in columns]
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
        lengths = {len(table[name]) for name in self.columns}
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
        encoded = np.empty((len(table[columns[0]["name"]]), *feature["shape"]), np.float32)
        place = 0
        for column in columns:
            own = column["name"]
            is_datetime = column["kind"] == "datetime"
            if is_datetime:
                found = cells.days(table[own], own, column.get("format"))
            else:
                found = cells.numbers(table[own], own, column.get("decimal", "."))
            missing = np.isnan(found)
            if missing.any():
                if column["fill"] is None:
                    raise BadValue(own, int(missing.argmax()), None, "is missing")
                found[missing] = column["fill"]
            if quantiles := column.get("quantiles"):
                found = cells.quantile_places(found, np.asarray(quantiles))
            encoded[:, place : place + column["width"]] = (
                cells.datetime_places(found) if is_datetime else found[:, np.newaxis]
            )
            place += column["width"]
        return encoded

    def _categories(self, name: str, feature: Mapping[str, Any], table: Mapping[str, Values]) -> npt.NDArray[np.int32]:
        found = [
            cells.category_places(table[column["name"]], places)
            for column, places in zip(feature["columns"], self._places[name], strict=True)
        ]
        return np.stack(found, 1)

    def _text(self, name: str, feature: Mapping[str, Any], table: Mapping[str, Values]) -> npt.NDArray[np.int32]:
        (column,), (places,), (length,) = feature["columns"], self._places[name], feature["shape"]
        words, lengths = cells.words_of(cells.rows_of(table[column["name"]]))
        encoded = np.full((len(lengths), length), cells.MISSING, np.int32)
        found = np.fromiter(map(places.get, words, repeat(cells.UNKNOWN)), np.int32, len(words))
        rows = np.repeat(np.arange(len(lengths)), lengths)
        within = np.arange(len(words)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        kept = within < length
        encoded[rows[kept], within[kept]] = found[kept]
        return encoded

    def _images(self, name: str, feature: Mapping[str, Any], table: Mapping[str, Values]) -> npt.NDArray[np.uint8]:
        (column,) = feature["columns"]
        values = cells.rows_of(table[column["name"]])
        shape = tuple(feature["shape"])
        decoded = list(self._workers(self.image, repeat(column["name"]), range(len(values)), values, repeat(shape)))
        return np.stack(decoded) if decoded else np.zeros((0, *shape), np.uint8)

    def image(self, column: str, row: int, value: Any, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Return the image of a row, uint8 of a shape; zeros for a missing one.

        Raises:
            BadValue: it is not a whole image.
        """
        if isinstance(value, str | type(None) | float) and cells.is_missing([value]).any():
            return np.zeros(shape, np.uint8)
        try:
            return decode_picture(self.opened(value), shape, self.formats)
        except PermissionError:
            raise
        except Exception as error:  # Pillow's readers raise whatever a broken file leads them to.
            # What it says of an unknown one is an address in the memory.
            unknown = type(error).__name__ == "UnidentifiedImageError"
            said = f"it is none of {', '.join(self.formats)}" if unknown else error
            raise BadValue(column, row, value, f"is not a whole image ({said})") from None

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
            self.formats += register_heif()
        self._broken: dict[int, str] = {}
        self._folder: Path | None = None

    def encode_whole(self, columns: Mapping[str, Values], folder: Path | None = None) -> tuple[Arrays, dict[int, str]]:
        """Return the features of those rows that are whole, in their order, and why the others are not, by their place.

        Args:
            columns: as ``encode`` takes them.
            folder: where paths of images begin; without one a text is base64 of an image.
        """
        self._broken, self._folder = {}, folder
        count = len(next(iter(columns.values())))
        try:
            encoded = self.encode(columns)
            broken = self._broken
        except BadValue:
            return self._one_by_one({name: cells.rows_of(values) for name, values in columns.items()}, count)
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
                value = "" if bad.value is None else f"{bad.shown} "
                self._broken[0] = f"column '{bad.column}': {value}{bad.reason}"
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
        """Return what the image of a row is read from; a text that is not an image itself is a path."""
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
