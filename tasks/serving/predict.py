"""Predict: what a trained model makes of raw inputs, a part at a time, written as it comes."""

import io
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from tasks.data.encoding.rows import answered, as_taken, part_size
from tasks.records import Predicted, PredictionRequest
from tasks.serving import raw_model
from tasks.serving.prediction_files import WRITERS, PredictionWriter
from tasks.serving.raw_inputs import RawExamples, Reader
from tasks.serving.raw_model import Arrays, Meaning, RawModel, meaning
from tasks.system import background, machine
from tasks.system.errors import UserError

AHEAD = 2
"""Parts that are read and encoded while one is computed."""
SHOWN = 20
TELL_SECONDS = 0.5, 30.0
"""How often the progress is shown: on a terminal, and elsewhere."""


@dataclass(frozen=True)
class EncodedPart:
    """Some examples, encoded."""

    examples: RawExamples
    features: Arrays
    """Of those that are whole."""
    broken: dict[int, str]


def predict(request: PredictionRequest) -> Predicted:
    """Write what a model says of each example, or why there is nothing to say.

    Raises:
        UserError: no such model, or an input that it does not take.
    """
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    # What Pillow finds odd in a file: one that cannot be read has its error in its row.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    model = raw_model.load(request.model)
    size = request.batch_size or part_size(model.takes)
    began = time.perf_counter()
    with ExitStack() as stack:
        stdin = None if request.stdin is None else stack.enter_context(io.FileIO(request.stdin))
        reader = Reader(model.wanted, Path(request.folder), size, request.encoding, stdin)
        reader.check(request.inputs)
        if request.format == "html" and not reader.wanted.takes_files:
            raise UserError(f"html is a page of pictures, and {model.name} takes {reader.wanted.in_words}")
        told = meaning(model.target, request.top_k, request.probabilities)
        names = ["source", "row", *told(np.zeros((0, model.target.num_outputs), np.float32)), "error"]
        writer = _open(request, names, stack)
        count, failed, counts = 0, 0, Counter[str]()
        first: list[dict[str, Any]] = []
        tell = Progress()
        for part in _parts(model, reader, request.inputs, stack):
            columns, whole = _predicted(model, told, part)
            if writer is not None:
                pictures = next(iter(part.features.values())) if reader.wanted.takes_files else None
                writer.write(columns, None if pictures is None else pictures[whole])
            count += len(columns["error"])
            failed += sum(error is not None for error in columns["error"])
            if model.target.task == "classification":
                counts.update(one for one in columns["prediction"] if one is not None)
            places = range(min(SHOWN - len(first), len(columns["error"])))
            first += [{name: columns[name][place] for name in names} for place in places]
            tell(count, failed)
        tell.end()
        if writer is not None:
            writer.finish()
    return Predicted(
        model=model.name,
        num_examples=count,
        num_failed=failed,
        counts=dict(sorted(counts.items())),
        first=tuple(first),
        devices=raw_model.devices(),
        seconds=time.perf_counter() - began,
        output=request.to,
    )


def _open(request: PredictionRequest, names: Sequence[str], stack: ExitStack) -> PredictionWriter | None:
    if request.to is not None:
        file: IO[bytes] = stack.enter_context(Path(request.to).open("wb"))  # noqa: SIM115  # The stack closes it.
    elif request.stdout is not None:
        file = stack.enter_context(os.fdopen(request.stdout, "wb"))
    else:
        return None
    return WRITERS[request.format](file, names)


def _parts(model: RawModel, reader: Reader, inputs: Sequence[str], stack: ExitStack) -> Iterator[EncodedPart]:
    """Yield the examples encoded; a thread reads and encodes those that follow, and several decode its images."""
    pictures = stack.enter_context(ThreadPoolExecutor(machine.usable_cores()))
    encoder = model.encoder(pictures.map)

    def encode(examples: RawExamples) -> EncodedPart:
        if examples.prepared:
            given = {name: np.asarray(array) for name, array in examples.columns.items()}
            try:
                return EncodedPart(examples, as_taken(model.takes, given, model.name), {})
            except ValueError as error:
                raise UserError(str(error)) from None
        rows = [row for row in range(len(examples.places)) if row not in examples.broken]
        columns = examples.columns
        if examples.broken:
            columns = {name: [values[row] for row in rows] for name, values in columns.items()}
        features, broken = encoder.encode_whole(columns, examples.folder)
        return EncodedPart(examples, features, examples.broken | {rows[row]: why for row, why in broken.items()})

    # One thread: the encoder is one's own, and the order is that of the inputs.
    parts = background.in_order(encode, reader.read(inputs), threads=1, ahead=AHEAD)
    stack.callback(parts.close)
    return parts


def _predicted(model: RawModel, told: Meaning, part: EncodedPart) -> tuple[dict[str, list[Any]], npt.NDArray[Any]]:
    """Return the columns of a part, and which of its whole examples have a prediction, bool (n,)."""
    outputs, places = model.outputs(part.features), part.examples.places
    errors = [part.broken.get(row) for row in range(len(places))]
    # Of a name that is not UTF-8 as Python shows it: neither JSON nor Parquet has room for it.
    sources = [source.encode("utf-8", "backslashreplace").decode() for source, _ in places]
    columns: dict[str, list[Any]] = {"source": sources, "row": [row for _, row in places]}
    return columns | answered(errors, outputs, told), np.asarray(np.isfinite(outputs).all(axis=1))


class Progress:
    """Tells how many examples are done, on standard error."""

    def __init__(self) -> None:
        self._on_terminal = sys.stderr.isatty()
        self._began = self._told = time.monotonic()
        self._length = 0

    def __call__(self, count: int, failed: int) -> None:
        """Tell it, if a while has passed."""
        now = time.monotonic()
        if now - self._told < TELL_SECONDS[not self._on_terminal]:
            return
        self._told = now
        text = f"{count:,} examples, {count / (now - self._began):,.0f} a second" + (
            f", {failed:,} failed" if failed else ""
        )
        if self._on_terminal:
            print(f"\r{text:<{self._length}}", end="", file=sys.stderr, flush=True)
            self._length = len(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the terminal's line empty."""
        if self._length:
            print(f"\r{' ' * self._length}\r", end="", file=sys.stderr, flush=True)
