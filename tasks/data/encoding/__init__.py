"""Raw values of a table -> the arrays that a model takes; both `prepare` and served models use this package.

Exported models contain a copy of it, without the rest of the project. So it imports only its own files, by relative
names, the standard library, NumPy, pandas for datetimes, and Pillow for images (and pi-heif if it is installed).
"""

import base64
import binascii
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import cells
from .answers import with_channel
from .cells import BadValue, Values
from .pictures import FORMATS, MORE_FORMATS, decode_picture, inside, register_heif

INLINE = ";base64,"

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
BrokenImages: TypeAlias = dict[tuple[str, int], str]
"""Why images are damaged, by column and row."""


class Encoder:
    """Encodes the columns of a table as the features of a prepared dataset.

    Args:
        features: those of ``records.PreparedDataset`` by name, each as a dict (``model_dump()``).
        vocabularies: for each feature of categories or words, the texts of each column from place 2 on.
        pictures: the folder of relative image paths, which must not leave it. Without it, a text is a base64 image.
        workers: maps a function over images; ``map`` handles one after the other, a pool's ``map`` several at once.
    """

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
        self._formats_by_name: tuple[str, ...] = (*FORMATS, *MORE_FORMATS)
        if any(feature["kind"] == "image" for feature in features.values()):
            self._formats_by_name += register_heif()

    @property
    def columns(self) -> list[str]:
        """The columns that a table must have."""
        return [column["name"] for feature in self._features.values() for column in feature["columns"]]

    def model_input(self, given: Any) -> Any:
        """Return what the model takes: the only feature, (n, *shape), or all by name.

        Args:
            given: a data frame or a mapping, as for ``encode``; if the only feature is text, also n texts; if it is an
                image, also pixels of that shape (grey ones also without the axis of channels), whole numbers from 0
                to 255, or n image files as paths, bytes or base64.

        Raises:
            BadValue: see ``encode``.
            ValueError: see ``encode``; a missing column; or pixels of another shape or out of range.
        """
        kinds = [feature["kind"] for feature in self._features.values()]
        if kinds == ["image"] and not hasattr(given, "keys"):
            # As objects: an array of bytes drops trailing zeros of a file.
            is_files = isinstance(given, list | tuple) and any(isinstance(one, bytes | str | Path) for one in given)
            return self._pixels(np.fromiter(given, object, len(given)) if is_files else np.asarray(given))
        if kinds == ["text"] and not hasattr(given, "keys"):
            given = {self.columns[0]: given}
        if not hasattr(given, "keys"):
            raise ValueError(f"pass the values of each column by its name: {', '.join(self.columns)}")
        columns = {name: given[name] for name in self.columns if name in given}
        if hasattr(given, "iloc"):  # pandas' own missing values equal nothing and are not false.
            columns = {name: column.to_numpy(object, na_value=None) for name, column in columns.items()}
        features = self.encode({name: list(column) for name, column in columns.items()})
        return features if len(features) > 1 else next(iter(features.values()))

    def _pixels(self, given: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        ((name, feature),) = self._features.items()
        if given.size and isinstance(given.flat[0], bytes | str | Path):
            return self.encode({self.columns[0]: given.ravel().tolist()})[name]
        if given.dtype == object:  # As MLflow's server reads JSON.
            given = np.array(given.tolist())
        shape = tuple(feature["shape"])
        given = with_channel(given, shape)
        whole = given.dtype.kind in "iu" and (not given.size or (given.min() >= 0 and given.max() <= 255))
        if given.shape[1:] != shape or not whole:
            raise ValueError(
                f"got {given.dtype} {given.shape}: pass n x {' x '.join(map(str, shape))} pixels, whole numbers from 0 "
                "to 255, or n files of images, as bytes or as base64"
            )
        return given.astype(np.uint8)

    def encode(
        self, table: Mapping[str, Values], broken: BrokenImages | None = None, named_in: Path | None = None
    ) -> Arrays:
        """Return the array of each feature, (n, *shape), of its dtype.

        Args:
            table: n values of each column: numbers as numbers or as text, categories and texts as text or numbers,
                datetimes as ISO 8601 text, images as path, bytes or uint8 array; None for a missing value.
            broken: collects the damaged images, which are encoded as zeros. Without it, the first one is refused.
            named_in: the folder of relative image paths that the user gives on the command line: these may lead
                anywhere, and to files of more formats.

        Raises:
            BadValue: a value that its column cannot hold, or a missing value without a replacement.
            ValueError: a missing column, or columns of different lengths.
        """
        absent = [name for name in self.columns if name not in table]
        if absent:
            raise ValueError(f"these columns are missing: {', '.join(map(repr, absent))}")
        described = (column for feature in self._features.values() for column in feature["columns"])
        table = {one["name"]: cells.without(table[one["name"]], one.get("na_values", ())) for one in described}
        lengths = {len(table[name]) for name in self.columns}
        if len(lengths) > 1:
            raise ValueError(f"the columns differ in length: {', '.join(map(str, sorted(lengths)))}")
        encoders: dict[str, Callable[..., npt.NDArray[Any]]] = {
            "number": self._numbers,
            "category": self._categories,
            "text": self._text,
            "image": partial(self._images, broken, named_in),
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
                found = cells.numbers(table[own], own, column.get("decimal", "."), column.get("unit"))
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

    def _images(
        self,
        broken: BrokenImages | None,
        named_in: Path | None,
        name: str,
        feature: Mapping[str, Any],
        table: Mapping[str, Values],
    ) -> npt.NDArray[np.uint8]:
        (column,), shape = [one["name"] for one in feature["columns"]], tuple(feature["shape"])
        values = cells.rows_of(table[column])
        missing = cells.is_missing(values).tolist()

        def decoded(place: tuple[int, Any]) -> npt.NDArray[np.uint8]:
            """Return the image of a row, zeros for a missing one."""
            row, value = place
            if missing[row]:
                return np.zeros(shape, np.uint8)
            is_named = named_in is not None or isinstance(value, Path)
            formats = self._formats_by_name if is_named else FORMATS
            try:
                return decode_picture(self._opened(value, named_in), shape, formats)
            except Exception as error:  # Pillow's readers raise whatever a broken file leads them to.
                # Pillow's message for an unknown format contains only a memory address.
                unknown = type(error).__name__ == "UnidentifiedImageError"
                said = f"allowed: {', '.join(formats)}" if unknown else error
                reason = f"is not a whole image ({said})"
            if broken is None:
                raise BadValue(column, row, value, reason)
            broken[column, row] = reason
            return np.zeros(shape, np.uint8)

        images = list(self._workers(decoded, enumerate(values)))
        return np.stack(images) if images else np.zeros((0, *shape), np.uint8)

    def _opened(self, value: Any, named_in: Path | None) -> Any:
        """Return the source of a row's image: a file, a path or an array.

        Raises:
            ValueError: a text that is neither base64 nor the path of a file.
        """
        if isinstance(value, bytes):
            return io.BytesIO(value)
        if isinstance(value, Path):
            return value
        if not isinstance(value, str):
            return np.asarray(value)
        if named_in is not None and INLINE not in value[:80]:
            path = named_in / value
            if os.path.isfile(path):  # Also of a name that is too long.
                return path
            # No file name has more than 255 characters.
            hint = "; base64 of an image begins with data:image/png;base64," if len(value) > 255 else ""
            raise ValueError("it is a folder" if os.path.isdir(path) else f"no such file{hint}")
        if self._pictures is not None:
            return inside(self._pictures, value)
        try:
            return io.BytesIO(base64.b64decode(value.partition(INLINE)[2] or value, validate=True))
        except binascii.Error:
            raise ValueError("a text must be an image as base64, not a path") from None

    def encode_whole(self, columns: Mapping[str, Values], folder: Path | None = None) -> tuple[Arrays, dict[int, str]]:
        """Return the features of all valid rows, in their order, and the reasons why other rows are invalid, by place.

        Args:
            columns: as ``table`` in ``encode``.
            folder: as ``named_in`` in ``encode``.
        """
        images: BrokenImages = {}
        count = len(next(iter(columns.values())))
        try:
            encoded = self.encode(columns, images, folder)
        except BadValue as bad:
            if count == 1:
                value = "" if bad.value is None else f"{bad.shown} "
                nothing = self.encode({name: [] for name in columns})
                return nothing, {0: f"column '{bad.column}': {value}{bad.reason}"}
            columns = {name: cells.rows_of(values) for name, values in columns.items()}
            rows = [
                self.encode_whole({name: [values[row]] for name, values in columns.items()}, folder)
                for row in range(count)
            ]
            encoded = {name: np.concatenate([one[name] for one, _ in rows]) for name in self._features}
            return encoded, {row: why[0] for row, (_, why) in enumerate(rows) if why}
        several = len(self.columns) > 1
        broken = {row: f"column '{column}' {why}" if several else why for (column, row), why in images.items()}
        if broken:
            whole = [row for row in range(count) if row not in broken]
            encoded = {name: array[whole] for name, array in encoded.items()}
        return encoded, broken
