"""Predictions with a trained model: checks the request, and has a child process compute or serve."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tasks import records
from tasks.process import child
from tasks.records import Predicted, PredictionRequest, Serving, ServingRequest
from tasks.system import errors, files, temporary
from tasks.system.errors import StratagemError, UserError
from tasks.tracking import trained_models

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".html": "html"}
"""Of files, by how their names end."""
STREAMED = ("csv", "jsonl")
"""That standard output takes."""


def predict(
    inputs: Sequence[str],
    model: str | None,
    output: Path | None = None,
    format: str | None = None,
    force: bool = False,
    top_k: int = 1,
    probabilities: bool = False,
    batch_size: int | None = None,
    encoding: str = "utf-8",
) -> Predicted:
    """Write a trained model's predictions for raw inputs; see ``tasks/serving/predict.py``.

    Args:
        inputs: files and folders; ``-`` is standard input, which is also the default unless it is a terminal.
        model: see ``trained_models.find_trained_model``; None is the only champion.
        output: the file for the predictions, which is written completely or not at all.
        format: a key of ``prediction_files.WRITERS``, for the output or for standard output.
        force: replace an existing output.
        top_k: number of classes in each prediction.
        probabilities: include the probabilities of all classes.
        batch_size: examples that are computed at once; None chooses it by the memory.
        encoding: of text files.

    Raises:
        UserError: names the option that cannot be used.
    """
    _check_output(output, force)
    chosen = _format_of(output, format)
    inputs = _check_inputs(inputs)
    _check_encoding(encoding)
    reference = model or trained_models.only_champion()
    trained_models.find_trained_model(reference)  # Refused before a framework is imported.
    with contextlib.ExitStack() as stack:
        request = PredictionRequest(
            model=_absolute(reference),
            inputs=tuple(inputs),
            folder=str(Path.cwd()),
            stdin=os.dup(0) if "-" in inputs else None,
            to=None if output is None else str(stack.enter_context(files.replacing(output.absolute()))),
            stdout=os.dup(1) if output is None and format is not None else None,
            format=chosen,
            top_k=top_k,
            probabilities=probabilities,
            batch_size=batch_size,
            encoding=encoding,
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=temporary.folder())))
        path = records.save(request, folder / "request.json")
        handed = [one for one in (request.stdin, request.stdout) if one is not None]
        for descriptor in handed:
            stack.callback(os.close, descriptor)
        with _explaining(output):
            out = child.run_stage("predict", str(path), pass_fds=handed)
    return Predicted.model_validate_json(out.splitlines()[-1]).model_copy(update={"output": output and str(output)})


def serve(model: str | None, port: int, poll_seconds: float, key: str, tell: Callable[[Serving], object]) -> None:
    """Serve a trained model until this process is interrupted; see ``tasks/serving/server.py``.

    Args:
        model: see ``trained_models.find_trained_model``; None is the only champion.
        port: on 127.0.0.1; 0 is any free one.
        poll_seconds: how often the alias is looked up.
        key: ``user:password`` that clients must send.
        tell: called when the server answers.

    Raises:
        UserError: no such model, or the port is taken.
        StratagemError: the server ended by itself.
    """
    reference = model or trained_models.only_champion()
    trained_models.find_trained_model(reference)  # Refused before a framework is imported.
    with tempfile.TemporaryDirectory(dir=temporary.folder()) as folder:
        request = ServingRequest(model=_absolute(reference), port=port, poll_seconds=poll_seconds)
        path = records.save(request, Path(folder) / "request.json")
        with child.serving("serve_model", str(path), environment={"STRATAGEM_KEY": key}) as process:
            if line := process.output.readline():
                tell(Serving.model_validate_json(line))
            code = process.wait()
    raise StratagemError(f"the server of the model ended by itself, with {code}")


def _absolute(reference: str) -> str:
    return os.path.abspath(os.path.expanduser(reference)) if reference.endswith(".keras") else reference


@contextlib.contextmanager
def _explaining(output: Path | None) -> Iterator[None]:
    """Turn an error of the output file into one message."""
    try:
        yield
    except OSError as error:
        if output is None:
            raise
        raise files.unwritable(output, error) from None


def _format_of(output: Path | None, format: str | None) -> str:
    known = sorted(set(FORMATS.values()))
    if format is not None and format not in known:
        raise UserError(errors.one_of("--format", format, known))
    if output is None:
        if format not in (None, *STREAMED):
            raise UserError(f"--format {format} is written to a file alone: give --output FILE.{format}")
        return format or "jsonl"
    found = format or FORMATS.get(output.suffix.lower())
    if found is None:
        raise UserError(
            f"--output {errors.cut(str(output))}: how its name ends says no format. Allowed: {', '.join(FORMATS)}; or "
            "give --format"
        )
    return found


def _check_output(output: Path | None, force: bool) -> None:
    if output is None:
        return
    place, named = os.path.abspath(output), f"--output {errors.cut(str(output))}"
    folder = os.path.dirname(place)
    if os.path.isdir(place):
        raise UserError(f"{named} is a folder: give a file, such as {output / 'predictions.csv'}")
    if not os.path.isdir(folder):
        raise UserError(f"{named}: there is no folder {errors.cut(str(output.parent))}: make it first")
    if os.path.exists(place) and not os.path.isfile(place):  # --force would put a file in the place of /dev/null.
        raise UserError(f"{named} is not a file: give one, or --format jsonl or csv for standard output")
    if os.path.lexists(place) and not force:
        raise UserError(f"{named} is there already: give another file, or --force to replace it")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{named}: {folder} cannot be written. Check its permissions")


def _check_inputs(inputs: Sequence[str]) -> Sequence[str]:
    if not inputs:
        if sys.stdin is None or sys.stdin.isatty():
            raise UserError("nothing to predict: give files or folders, or - for standard input")
        return ("-",)
    for name in inputs:
        named = f"'{errors.cut(name)}'"
        if any("\udc80" <= sign <= "\udcff" for sign in name):
            raise UserError(f"{name!a}: its name is not UTF-8: rename it, or give the folder that it lies in")
        if name != "-" and not os.path.exists(name):
            raise UserError(f"{named}: no such file or folder")
        if name != "-" and not (os.path.isfile(name) or os.path.isdir(name)):
            raise UserError(f"{named} is neither a file nor a folder; what a pipe gives is read as standard input: -")
        if name != "-" and not os.access(name, os.R_OK):
            raise UserError(f"{named} cannot be read. Check its permissions")
    if inputs.count("-") > 1:
        raise UserError("- is there twice, and there is one standard input")
    return inputs


def _check_encoding(encoding: str) -> None:
    if not files.is_encoding(encoding):
        raise UserError(f"--encoding {errors.cut(encoding)}: no such encoding. Allowed: utf-8, latin-1, ...")
