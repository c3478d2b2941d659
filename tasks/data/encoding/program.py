"""An exported model as a function of raw values, and as a program that prints predictions for files."""

import argparse
import functools
import hashlib
import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import Encoder
from .answers import answered, answers, part_size, probabilities
from .inputs import RawExamples, Reader, Wanted, encode_part


def verify(folder: Path) -> None:
    """Compare the files of an exported model with its manifest.

    Raises:
        ValueError: names the file that is missing, damaged or changed.
    """
    manifest = folder / "export.json"
    try:
        expected = json.loads(manifest.read_text("utf-8"))["files"]
    except (OSError, ValueError, LookupError, TypeError):
        raise ValueError(f"{manifest} is missing or damaged: copy the folder of the export again, as a whole") from None
    for name, sha256 in expected.items():
        file = folder / name
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            raise ValueError(f"{file} is missing, damaged or was changed: copy the folder of the export again")


class Predictor:
    """A function from raw values to probabilities or numbers.

    Args:
        folder: of the model.
        compute: the function from prepared arrays to logits or numbers.
    """

    def __init__(self, folder: Path, compute: Callable[[Any], Any]) -> None:
        target = json.loads((folder / "target.json").read_text("utf-8"))
        self.task, self.names = target["task"], target["class_names"] or target["columns"] or ["prediction"]
        self.compute, self.folder = compute, folder
        self.known: dict[str, Any] = {"features": {}}  # How raw values are read and encoded, unless they are arrays.
        self.encoder: Encoder | None = None
        if (folder / "encoding.json").exists():
            self.known = json.loads((folder / "encoding.json").read_text("utf-8"))
            self.encoder = Encoder(self.known["features"], self.known["vocabularies"])

    @functools.cached_property
    def takes(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and dtype of each array of an example."""
        if features := self.known["features"]:
            return {name: (tuple(one["shape"]), np.dtype(one["dtype"])) for name, one in features.items()}
        inputs = json.loads((self.folder / "export.json").read_text("utf-8"))["inputs"]
        return {one["name"]: (tuple(one["shape"][1:]), np.dtype(one["dtype"])) for one in inputs}

    def __call__(self, given: Any) -> Any:
        """Return the probability of each class or label, or the numbers: float64 (n, len(names)).

        Args:
            given: a list of n images or n texts, or pixels; n values of each column, by name; or prepared arrays, if
                the model has no encoding.json. An image is a ``pathlib.Path``, the bytes of a file, or base64 of
                them: PNG, JPEG, BMP, GIF or WebP. A str is never a path, because it may come from a request.

        Raises:
            ValueError: the model does not take one of these values.
        """
        arrays = given if self.encoder is None else self.encoder.model_input(given)
        return probabilities(self.task, self.compute(arrays))

    def lines(self, examples: RawExamples) -> Iterator[dict[str, Any]]:
        """Yield the answer for each example."""
        arrays, broken = encode_part(examples, self.encoder, self.takes, "the model")
        one_or_all = arrays if len(arrays) > 1 else next(iter(arrays.values()))
        is_empty = len(broken) == len(examples.places)
        outputs = np.zeros((0, len(self.names))) if is_empty else np.asarray(self.compute(one_or_all))
        columns = answered(examples.places, broken, outputs, functools.partial(answers, self.task, self.names))
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


def main(about: str | None, load: Callable[[], Predictor], arguments: Sequence[str]) -> int:
    """Print a line for each example, and return the exit code.

    Args:
        about: the description in ``--help``.
        load: returns the model.
        arguments: of the command.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="FILE", help="a file, a folder of images or texts, or -")
    parser.add_argument("--encoding", help="of texts and tables, such as latin-1; by default as in training, or utf-8")
    asked = parser.parse_args(arguments)
    # An image that is too large when decompressed gets a line with its error.
    warnings.filterwarnings("error", message="Image size .* exceeds limit")
    failed = False
    try:
        model = load()
        wanted = Wanted.of(model.known, model.takes)
        stdin = io.FileIO(0, closefd=False) if "-" in asked.inputs else None
        reader = Reader(wanted, Path(), part_size(model.takes), asked.encoding, stdin)
        reader.check(asked.inputs)
        for examples in reader.read(asked.inputs):
            for line in model.lines(examples):
                failed |= line["error"] is not None
                print(json.dumps(line), flush=True)
    except BrokenPipeError:  # As with `| head`. Python would say so once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # As a program that the signal ended.
    except (OSError, ValueError, TypeError, ImportError, LookupError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(failed)
