"""Predicts raw inputs with a trained model in parts, and writes each part immediately."""

import io
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from PIL import Image

from tasks.data.encoding.answers import answered, part_size
from tasks.data.encoding.inputs import BadInput, RawExamples, Reader, encode_part
from tasks.records import Predicted, PredictionRequest
from tasks.serving import raw_model
from tasks.serving.prediction_files import WRITERS
from tasks.serving.raw_model import Arrays, RawModel, meaning
from tasks.system import background, machine
from tasks.system.errors import UserError

AHEAD = 2
"""The number of parts that are read and encoded while the model computes a part."""
SHOWN = 20
TELL_SECONDS = 10.0
"""The interval of progress messages on standard error."""
Places: TypeAlias = Sequence[tuple[str, int | None]]


def predict(request: PredictionRequest) -> Predicted:
    """Write a model's prediction for each example, or an error.

    Raises:
        UserError: the model does not exist, or does not accept an input.
    """
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    # Pillow's warnings about unusual files; a file that cannot be read has its error in its row.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    pictures = ThreadPoolExecutor(machine.usable_cores())
    model = raw_model.load(request.model, pictures.map)
    size = request.batch_size or part_size(model.takes)
    began = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(pictures)
        stdin = None if request.stdin is None else stack.enter_context(io.FileIO(request.stdin))
        reader = Reader(model.wanted, Path(request.folder), size, request.encoding, stdin)
        stack.enter_context(_as_user_errors())
        reader.check(request.inputs)
        if request.format == "html" and not reader.wanted.takes_files:
            raise UserError(f"--format html needs images, but {model.name} takes {reader.wanted.in_words}")
        told = meaning(model.target, request.top_k, request.probabilities)
        names = ["source", "row", *told(np.zeros((0, model.target.num_outputs), np.float32)), "error"]
        file: IO[bytes] | None = None
        if request.to is not None:
            file = stack.enter_context(Path(request.to).open("wb"))
        elif request.stdout is not None:
            file = stack.enter_context(os.fdopen(request.stdout, "wb"))
        writer = WRITERS[request.format](file, names) if file is not None else None
        count, failed, counts = 0, 0, Counter[str]()
        first: list[dict[str, Any]] = []
        told_at = began
        for places, features, broken in _parts(model, reader.read(request.inputs), stack):
            outputs = model.outputs(features)
            columns = answered(places, broken, outputs, told)
            if writer is not None:
                shown = next(iter(features.values())) if reader.wanted.takes_files else None
                writer.write(columns, None if shown is None else shown[np.isfinite(outputs).all(axis=1)])
            count += len(columns["error"])
            failed += sum(error is not None for error in columns["error"])
            if model.target.task == "classification":
                counts.update(one for one in columns["prediction"] if one is not None)
            shown_now = range(min(SHOWN - len(first), len(columns["error"])))
            first += [{name: columns[name][place] for name in names} for place in shown_now]
            if (now := time.perf_counter()) - told_at >= TELL_SECONDS:
                told_at = now
                speed = f"{count / (now - began):,.0f} per second"
                print(f"{count:,} examples ({failed:,} failed), {speed}", file=sys.stderr, flush=True)
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


@contextmanager
def _as_user_errors() -> Iterator[None]:
    try:
        yield
    except BadInput as error:
        raise UserError(str(error)) from None


def _parts(
    model: RawModel, examples: Iterator[RawExamples], stack: ExitStack
) -> Iterator[tuple[Places, Arrays, dict[int, str]]]:
    """Yield the places of some examples, the features of the valid ones, and why others are broken, by index.

    A thread reads and encodes the next ones, and several threads decode images.
    """

    def encode(some: RawExamples) -> tuple[Places, Arrays, dict[int, str]]:
        return some.places, *encode_part(some, model.encoder, model.takes, model.name)

    # A single thread keeps the order of the inputs.
    parts = background.in_order(encode, examples, threads=1, ahead=AHEAD)
    stack.callback(parts.close)
    return parts
