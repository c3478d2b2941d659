"""What the model beside this file says of raw values: images, lines of text, rows of tables, arrays.

    python FOLDER/predict.py photo.jpg other.png   # a JSON line for each file
    python FOLDER/predict.py rows.csv              # for each row; so of .tsv and .jsonl; of .txt for each line
    python FOLDER/predict.py arrays.npz            # as they were prepared, by name; .npy where there is one alone

``-`` is standard input: rows of CSV or JSON, lines of text; no image, and no arrays. The exit code is 1 where an
example has an error in place of a prediction. In a program ``load(FOLDER)`` returns a ``Predictor``. It needs NumPy,
Pillow for images, pandas for datetimes, and what runs the model.
"""

import csv
import functools
import io
import itertools
import json
import os
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.data.encoding import Encoder, WholeEncoder, rows
from tasks.serving.formats.keras import load_model

JSON, TABLES, ARRAYS = (".jsonl", ".ndjson"), (".csv", ".tsv"), (".npy", ".npz")
Example = tuple[str, int | None, Any]
"""Its file, its row there, and its values by name; a text says why there are none."""


class Predictor:
    """A function of raw values; ``compute`` is that of arrays as they were prepared, to logits or numbers."""

    def __init__(self, folder: Path) -> None:
        target = json.loads((folder / "target.json").read_text("utf-8"))
        self.task, self.names = target["task"], target["class_names"] or target["columns"] or ["prediction"]
        self.compute: Callable[[Any], Any] = load_model(folder)
        self.folder = folder
        self.features: dict[str, Any] = {}  # What makes them of raw values; none where the model takes arrays alone.
        self.kinds: dict[str, str] = {}  # Of the columns of an example.
        if (folder / "encoding.json").exists():
            known = json.loads((folder / "encoding.json").read_text("utf-8"))
            self.features = known["features"]
            columns = itertools.chain(*(feature["columns"] for feature in self.features.values()))
            self.kinds = {column["name"]: column["kind"] for column in columns}
            self.encoder, self.file_encoder = Encoder(**known), Encoder(**known)
            self.row_encoder = WholeEncoder(**known)
            self.file_encoder.formats = self.row_encoder.formats

    @functools.cached_property
    def takes(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each array that an example has."""
        if self.features:
            return {name: (tuple(one["shape"]), np.dtype(one["dtype"])) for name, one in self.features.items()}
        inputs = json.loads((self.folder / "export.json").read_text("utf-8"))["inputs"]
        return {one["name"]: (tuple(one["shape"][1:]), np.dtype(one["dtype"])) for one in inputs}

    def __call__(self, given: Any) -> Any:
        """Return the probability of each class or label, or the numbers: float64 (n, len(names)).

        Args:
            given: a list of n images, or n texts, or pixels; n values of each column, by name; or arrays as they were
                prepared, where there is no encoding.json. An image is a ``pathlib.Path``, or the bytes of a file, or
                base64 of them: PNG, JPEG, BMP, GIF or WebP. A str is not a path, because a stranger may have sent it.

        Raises:
            ValueError: one of them is not what the model takes.
        """
        kinds = list(self.kinds.values())
        if not kinds:
            return self.probabilities(given)
        if not hasattr(given, "keys"):
            are_files = isinstance(given, list | tuple) and any(isinstance(one, str | bytes | Path) for one in given)
            if kinds == ["text"] or (kinds == ["image"] and are_files):
                given = {next(iter(self.kinds)): given}
            elif kinds == ["image"]:
                return self.probabilities(self.encoder.model_input(given))
        if not hasattr(given, "keys") or not all(name in given for name in self.kinds):
            raise ValueError(f"give the values of each column by its name: {', '.join(self.kinds)}")
        columns = {name: list(given[name]) for name in self.kinds}
        for feature in (one for one in self.features.values() if one["kind"] == "image"):
            name, shape = feature["columns"][0]["name"], tuple(feature["shape"])
            for row, one in enumerate(columns[name]):
                if isinstance(one, Path):
                    columns[name][row] = self.file_encoder.image(name, row, one.read_bytes(), shape)
        return self.probabilities(self.encoder.model_input(columns))

    def probabilities(self, arrays: Any) -> Any:
        """Return probabilities, or a regression's numbers, of arrays as they were prepared."""
        return rows.probabilities(self.task, self.compute(arrays))

    def lines(self, part: Sequence[Example], folder: Path | None) -> Iterator[dict[str, Any]]:
        """Yield the answer for each example. Paths in tables begin at the folder, which is None for arrays."""
        errors = [values if isinstance(values, str) else None for *_, values in part]
        whole = [place for place, error in enumerate(errors) if error is None]
        if folder is None:
            arrays = {name: np.stack([values[name] for *_, values in part]) for name in part[0][2]}
        else:
            columns = {name: [part[place][2].get(name) for place in whole] for name in self.kinds}
            arrays, broken = self.row_encoder.encode_whole(columns, folder)
            for place, why in broken.items():
                errors[whole[place]] = why
        one_or_all = arrays if len(arrays) > 1 else next(iter(arrays.values()))
        outputs = np.asarray(self.compute(one_or_all)) if None in errors else np.zeros((0, len(self.names)))
        columns = rows.answered(errors, outputs, functools.partial(rows.answers, self.task, self.names))
        for (source, row, _), values in zip(part, zip(*columns.values(), strict=True), strict=True):
            yield {"source": source, "row": row, **dict(zip(columns, values, strict=True))}


def load(folder: str | os.PathLike[str]) -> Predictor:
    """Return the model of a folder."""
    return Predictor(Path(folder))


def _sources(names: Sequence[str], model: Predictor) -> Iterator[tuple[Iterator[Example], Path | None]]:
    """Yield the examples of each input with the folder that paths in it begin at; files of images together."""
    kinds = model.kinds

    def is_picture(name: str) -> bool:
        others = name == "-" or name.lower().endswith((*JSON, *TABLES, *ARRAYS))
        return list(kinds.values()) == ["image"] and not others

    for are_pictures, some in itertools.groupby(names, is_picture):
        if are_pictures:  # Absolute: a file may be called NA, which as a value of a table is a missing one.
            yield ((name, None, {next(iter(kinds)): os.path.abspath(name)}) for name in some), Path()
            continue
        for name in some:
            is_array = not kinds or name.lower().endswith(ARRAYS)
            yield (_arrays(name, model.takes), None) if is_array else (_rows(name, model), Path(name).parent)


def _arrays(name: str, takes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> Iterator[Example]:
    wanted = ", ".join(map(repr, takes))
    if name == "-":
        raise ValueError(f"'-': the model takes arrays, {wanted}, which cannot come by standard input: name a file")
    try:
        arrays = rows.as_taken(takes, _load_arrays(name, list(takes)), "the model")
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"'{name}' cannot be read as arrays (.npy; .npz with {wanted}): {error}") from None
    if len(lengths := {len(array) for array in arrays.values()}) > 1:
        raise ValueError(f"'{name}': its arrays have different lengths: {', '.join(map(str, sorted(lengths)))}")
    for row, values in enumerate(zip(*arrays.values(), strict=True), 1):
        yield name, row, dict(zip(arrays, values, strict=True))


def _load_arrays(name: str, wanted: Sequence[str]) -> dict[str, Any]:
    """Return the wanted arrays of a file; where one is wanted, the only one there, whatever it is called."""
    with open(name, "rb") as file:
        if not file.read(6).startswith((b"\x93NUMPY", b"PK")):
            raise ValueError("it is not a NumPy file")
        file.seek(0)
        found = np.load(file, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return {wanted[0]: found}
        if len(wanted) == len(found.files) == 1:
            return {wanted[0]: found[found.files[0]]}
        return {one: found[one] for one in wanted if one in found.files}


def _rows(name: str, model: Predictor) -> Iterator[Example]:
    kinds = list(model.kinds)
    are_texts = list(model.kinds.values()) == ["text"] and not name.lower().endswith(TABLES)
    with open(0 if name == "-" else name, "rb") as content:
        file = io.TextIOWrapper(content, rows.encoding_of(content.peek(2), "utf-8-sig"), newline="")
        try:
            first = file.readline()
            lines = itertools.chain([first] if first else [], file)
            examples: Iterable[Any]
            if name.lower().endswith(JSON) or (name == "-" and first.lstrip().startswith("{")):
                examples = rows.json_rows(name, lines, kinds, rows.part_size(model.takes))
            elif are_texts:
                examples = ({kinds[0]: line.rstrip("\r\n")} for line in lines)
            else:
                examples = rows.csv_rows(name, lines, kinds)
            for row, values in enumerate(examples, 1):
                yield name, row, values
        except (UnicodeDecodeError, csv.Error) as error:  # csv.Error: of the header; of a row it is that row's error.
            raise ValueError(f"'{name}' cannot be read as lines of UTF-8 ({error})") from None


def main(inputs: Sequence[str]) -> int:
    """Print a line for each example, and return the exit code."""
    if not inputs or inputs[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if inputs else 2
    # An image that unpacks to more than fits is a line with its error.
    warnings.filterwarnings("error", message="Image size .* exceeds limit")
    failed = False
    try:
        model = load(Path(__file__).parent)
        for examples, folder in _sources(inputs, model):
            while part := list(itertools.islice(examples, rows.part_size(model.takes))):
                for line in model.lines(part, folder):
                    failed |= line["error"] is not None
                    print(json.dumps(line), flush=True)
    except BrokenPipeError:  # As with `| head`. Python would say so once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # As a program that the signal ended.
    except (OSError, ValueError, TypeError, ImportError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
