"""What the model beside this file says of raw values: images, lines of text, rows of tables, arrays.

    python FOLDER/predict.py photo.jpg other.png   # a JSON line for each file
    python FOLDER/predict.py rows.csv              # for each row; so of .tsv and .jsonl; of .txt for each line
    python FOLDER/predict.py arrays.npz            # as they were prepared, by name; .npy where there is one alone

``-`` is standard input. The exit code is 1 where an example has an error in place of a prediction. In a program
``load(FOLDER)`` returns a ``Predictor``. It needs NumPy, Pillow for images, and what runs the model.
"""

import csv
import itertools
import json
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tasks.exports.keras import load_model

PART = 256
"""Examples that are computed at once."""
JSON, TABLES, ARRAYS = (".jsonl", ".ndjson"), (".csv", ".tsv"), (".npy", ".npz")
Example = tuple[str, int | None, Any]
"""Its file, its row there, and its values by name; a text says why there are none."""


class Predictor:
    """A function of raw values; ``compute`` is that of arrays as they were prepared, to logits or numbers."""

    def __init__(self, folder: Path) -> None:
        target = json.loads((folder / "target.json").read_text("utf-8"))
        self.task, self.names = target["task"], target["class_names"] or target["columns"] or ["prediction"]
        self.compute: Callable[[Any], Any] = load_model(folder)
        self.kinds: dict[str, str] = {}  # Of the columns of an example; none where the model takes arrays alone.
        if (folder / "encoding.json").exists():
            known = json.loads((folder / "encoding.json").read_text("utf-8"))
            columns = itertools.chain(*(feature["columns"] for feature in known["features"].values()))
            self.kinds = {column["name"]: column["kind"] for column in columns}
            encoding = runpy.run_path(str(folder / "encoding.py"))
            self.encoder, self.whole = encoding["Encoder"](**known), encoding["WholeEncoder"](**known)
            self.encoder.formats = self.whole.formats

    def __call__(self, given: Any) -> Any:
        """Return the probability of each class or label, or the numbers: float64 (n, len(names)).

        Args:
            given: n images, as paths, as bytes of files or as pixels; n texts; n values of each column, by name; or
                arrays as they were prepared, where there is no encoding.json.

        Raises:
            ValueError: one of them is not what the model takes.
        """
        if not self.kinds:
            return self.meant(given)
        if list(self.kinds.values()) == ["text"] and not hasattr(given, "keys"):
            given = {next(iter(self.kinds)): given}
        elif list(self.kinds.values()) == ["image"] and isinstance(given, list | tuple):
            given = [one.read_bytes() if isinstance(one, Path) else one for one in given]
        elif list(self.kinds.values()) != ["image"] and not hasattr(given, "keys"):
            raise ValueError(f"give the values of each column by its name: {', '.join(self.kinds)}")
        return self.meant(self.encoder.model_input(given))

    def meant(self, arrays: Any) -> Any:
        """Return probabilities or numbers of arrays as they were prepared."""
        outputs = np.asarray(self.compute(arrays), np.float64)
        if self.task == "regression":
            return outputs
        if self.task == "multilabel":
            return 1 / (1 + np.exp(-outputs))
        shares = np.exp(outputs - outputs.max(1, keepdims=True))
        return shares / shares.sum(1, keepdims=True)

    def told(self, row: Any) -> dict[str, Any]:
        """Return the columns of an example's probabilities or numbers."""
        numbers = dict(zip(self.names, (float(f"{one:.7g}") for one in row), strict=True))
        if self.task == "classification":
            best = self.names[int(row.argmax())]
            return {"prediction": best, "probability": numbers[best]}
        if self.task == "multilabel":
            likely = (name for name, share in zip(self.names, row, strict=True) if share >= 0.5)
            return {"prediction": ";".join(likely)} | {f"probability:{name}": one for name, one in numbers.items()}
        return {f"prediction:{name}" if len(row) > 1 else "prediction": one for name, one in numbers.items()}

    def lines(self, part: Sequence[Example], folder: Path | None) -> Iterator[dict[str, Any]]:
        """Yield what is said of some examples. Paths in tables begin at the folder; None where they are arrays."""
        errors = {place: values for place, (*_, values) in enumerate(part) if isinstance(values, str)}
        whole = [place for place in range(len(part)) if place not in errors]
        if folder is None:
            arrays = {name: np.stack([values[name] for *_, values in part]) for name in part[0][2]}
        else:
            columns = {name: [part[place][2].get(name) for place in whole] for name in self.kinds}
            arrays, broken = self.whole.encode_whole(columns, folder)
            errors |= {whole[place]: why for place, why in broken.items()}
        one_or_all = arrays if len(arrays) > 1 else next(iter(arrays.values()))
        found = iter(self.meant(one_or_all) if len(errors) < len(part) else ())
        for place, (source, row, _) in enumerate(part):
            said: dict[str, Any] = dict.fromkeys(self.told(np.zeros(len(self.names))))
            if place not in errors and not np.isfinite(values := next(found)).all():
                errors[place] = "the model gives no number for it"
            elif place not in errors:
                said = self.told(values)
            yield {"source": source, "row": row, **said, "error": errors.get(place)}


def load(folder: str | os.PathLike[str]) -> Predictor:
    """Return the model of a folder."""
    return Predictor(Path(folder))


def _sources(names: Sequence[str], kinds: dict[str, str]) -> Iterator[tuple[Iterator[Example], Path | None]]:
    """Yield the examples of each input with the folder that paths in it begin at; files of images together."""

    def is_picture(name: str) -> bool:
        others = name == "-" or name.lower().endswith((*JSON, *TABLES, *ARRAYS))
        return list(kinds.values()) == ["image"] and not others

    for are_pictures, some in itertools.groupby(names, is_picture):
        if are_pictures:  # Absolute: a file may be called NA, which as a value of a table is a missing one.
            yield ((name, None, {next(iter(kinds)): os.path.abspath(name)}) for name in some), Path()
            continue
        for name in some:
            is_array = not kinds or name.lower().endswith(ARRAYS)
            yield (_arrays(name), None) if is_array else (_rows(name, kinds), Path(name).parent)


def _arrays(name: str) -> Iterator[Example]:
    found = np.load(name, allow_pickle=False)
    takes = json.loads(Path(__file__).with_name("export.json").read_text("utf-8"))["inputs"]
    there = {takes[0]["name"]: found} if isinstance(found, np.ndarray) else dict(found)
    if len(takes) == len(there) == 1:
        there = {takes[0]["name"]: next(iter(there.values()))}
    arrays = {}
    for one in takes:
        array, shape = there.get(one["name"]), tuple(one["shape"][1:])
        if array is None or array.shape[1:] != shape:
            given = None if array is None else array.shape[1:]
            raise ValueError(
                f"'{name}': the model takes '{one['name']}' of shape {shape} for an example, there: {given}"
            )
        arrays[one["name"]] = array.astype(one["dtype"], casting="same_kind", copy=False)
    for row, values in enumerate(zip(*arrays.values(), strict=True), 1):
        yield name, row, dict(zip(arrays, values, strict=True))


def _rows(name: str, kinds: dict[str, str]) -> Iterator[Example]:
    are_texts = list(kinds.values()) == ["text"] and not name.lower().endswith(TABLES)
    with open(0 if name == "-" else name, encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        lines = itertools.chain([first] if first else [], file)
        rows: Iterable[Any]
        if name.lower().endswith(JSON) or (name == "-" and first.lstrip().startswith("{")):
            rows = (_of_json(line) for line in lines if line.strip())
        elif are_texts:
            rows = ({next(iter(kinds)): line.rstrip("\r\n")} for line in lines)
        else:
            rows = _of_csv(lines, max(",;\t|", key=first.count))
        for row, values in enumerate(rows, 1):
            if row == 1 and isinstance(values, dict) and (absent := [one for one in kinds if one not in values]):
                there = ", ".join(map(repr, values))
                raise ValueError(
                    f"'{name}' has not {', '.join(map(repr, absent))}, which the model takes. There: {there}"
                )
            yield name, row, values


def _of_json(line: str) -> Any:
    try:
        found = json.loads(line)
    except ValueError as error:
        return f"no JSON ({error})"
    return found if isinstance(found, dict) else f"no JSON object: {repr(found)[:80]}"


def _of_csv(lines: Iterator[str], delimiter: str) -> Iterator[Any]:
    csv.field_size_limit(2**26)
    reader = csv.reader(lines, delimiter=delimiter)
    names = next(reader, [])
    for row in filter(None, reader):
        if len(row) == len(names):
            yield dict(zip(names, row, strict=True))
        else:
            yield f"the row has {len(row)} values, and the header {len(names)}"


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
        for examples, folder in _sources(inputs, model.kinds):
            while part := list(itertools.islice(examples, PART)):
                for line in model.lines(part, folder):
                    failed |= line["error"] is not None
                    print(json.dumps(line), flush=True)
    except (OSError, ValueError, TypeError, ImportError, csv.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
