"""Predictions with a trained model: checks the request, and starts a child process that computes or serves."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tasks.process import stages
from tasks.records import Predicted, PredictionRequest
from tasks.system import errors, files, temporary
from tasks.system.errors import StratagemError, UserError
from tasks.tracking import trained_models

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".html": "html"}
"""The format of a file by its extension."""


def predict(
    inputs: Sequence[str],
    model: str | None,
    output: Path | None = None,
    format: str | None = None,
    force: bool = False,
    top_k: int = 1,
    probabilities: bool = False,
    batch_size: int | None = None,
    encoding: str | None = None,
) -> Predicted:
    """Write a trained model's predictions for raw inputs; see ``tasks/serving/predict.py``.

    Args:
        inputs: files and folders; ``-`` is standard input, which is also the default unless it is a terminal.
        model: see ``raw_model.load``; None is the only champion.
        output: the file for the predictions, which is written completely or not at all.
        format: a key of ``prediction_files.WRITERS``, for the output or for standard output.
        force: replace an existing output.
        top_k: number of classes in each prediction.
        probabilities: include the probabilities of all classes.
        batch_size: number of examples in a batch; None chooses it by the memory.
        encoding: the encoding of text files; None is that of the file that the model was trained on, or UTF-8.

    Raises:
        UserError: names the option that cannot be used.
    """
    _check_output(output, force)
    chosen = _format_of(output, format)
    inputs = _check_inputs(inputs)
    if encoding is not None and not files.is_encoding(encoding):
        raise UserError(f"--encoding {errors.cut(encoding)}: no such encoding. Allowed: utf-8, latin-1, ...")
    trained_models.check_reference(model)
    with contextlib.ExitStack() as stack:
        partial = None if output is None else stack.enter_context(files.replacing(output.absolute()))
        if partial is not None:
            temporary.note(partial)
        request = PredictionRequest(
            model=_absolute(model),
            inputs=tuple(inputs),
            folder=str(Path.cwd()),
            stdin=os.dup(0) if "-" in inputs else None,
            to=None if partial is None else str(partial),
            stdout=os.dup(1) if output is None and format is not None else None,
            format=chosen,
            top_k=top_k,
            probabilities=probabilities,
            batch_size=batch_size,
            encoding=encoding,
        )
        for descriptor in (request.stdin, request.stdout):
            if descriptor is not None:
                os.set_inheritable(descriptor, True)
                stack.callback(os.close, descriptor)
        done = stages.predict(request=request)
    return done.model_copy(update={"output": output and str(output)})


def serve(model: str | None, port: int, poll_seconds: float, key: str, tell: Callable[[str, int], object]) -> None:
    """Serve a trained model until this process is interrupted; see ``tasks/serving/server.py``.

    Args:
        model: see ``raw_model.load``; None is the only champion.
        port: on 127.0.0.1; 0 is any free one.
        poll_seconds: the seconds between two look-ups of the alias.
        key: ``user:password`` that clients must send.
        tell: called with the model's name and the port once the server answers.

    Raises:
        UserError: the model does not exist, or the port is taken.
        StratagemError: the server ended unexpectedly.
    """
    trained_models.check_reference(model)
    stages.serve_model(
        model=_absolute(model),
        port=port,
        poll_seconds=poll_seconds,
        key=key,
        tell=lambda said: tell(said["model"], said["port"]),
    )
    raise StratagemError("the server of the model ended unexpectedly")


def _absolute(reference: str | None) -> str | None:
    return os.path.abspath(os.path.expanduser(reference)) if reference and reference.endswith(".keras") else reference


def _format_of(output: Path | None, format: str | None) -> str:
    known = sorted(set(FORMATS.values()))
    if format is not None and format not in known:
        raise UserError(errors.one_of("--format", format, known))
    if output is None:
        if format not in (None, "csv", "jsonl"):
            raise UserError(f"--format {format} needs a file: use --output FILE.{format}")
        return format or "jsonl"
    found = format or FORMATS.get(output.suffix.lower())
    if found is None:
        raise UserError(
            f"--output {errors.cut(str(output))}: unknown file extension. Allowed: {', '.join(FORMATS)}; or set "
            "--format"
        )
    return found


def _check_output(output: Path | None, force: bool) -> None:
    if output is None:
        return
    place, named = os.path.abspath(output), f"--output {errors.cut(str(output))}"
    folder = os.path.dirname(place)
    if os.path.isdir(place):
        raise UserError(f"{named} is a folder: choose a file, such as {output / 'predictions.csv'}")
    if not os.path.isdir(folder):
        raise UserError(f"{named}: the folder {errors.cut(str(output.parent))} does not exist: create it first")
    if os.path.exists(place) and not os.path.isfile(place):  # --force would replace /dev/null by a file.
        raise UserError(f"{named} is not a file: choose one, or use --format jsonl or csv for standard output")
    if os.path.lexists(place) and not force:
        raise UserError(f"{named} exists already: choose another file, or add --force to replace it")


def _check_inputs(inputs: Sequence[str]) -> Sequence[str]:
    if not inputs:
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError("nothing to predict: name files or folders, or - for standard input")
        return ("-",)
    for name in inputs:
        named = f"'{errors.cut(name)}'"
        if name != "-" and not os.path.exists(name):
            raise UserError(f"{named}: no such file or folder")
    return inputs
