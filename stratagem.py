"""Stratagem as a library (docs/library.md), and the start of its command.

In a wheel, this file is the package `stratagem`, which contains flows/, tasks/ and the files of a new project. Only
Stratagem's own processes have that folder on their path, so a program that imports `stratagem` can have modules named
`tasks` or `flows`. Each function runs a command in the project's folder, in a child process, and returns the command's
record. The caller keeps its environment, signal handlers and umask; only ``load_model`` imports a framework.
"""

import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_type_hints

if TYPE_CHECKING:
    from pydantic import PositiveInt

    from tasks.records import RunDetails, RunSummary
    from tasks.system.errors import StratagemError, UserError

__all__ = ["RunDetails", "RunSummary", "StratagemError", "UserError", "load_model", "load_run", "predict", "run"]

HERE = Path(__file__).resolve().parent
INSTALLED = Path(__file__).name == "__init__.py"
"""As a package, and not as a checkout, whose folder has flows/ and tasks/ on the path anyway."""
OURS = ("flows", "tasks")
USED = ("tasks.system.errors", "tasks.system.child", "tasks.records")
COMMAND = "from flows.cli.main import main; main()"
P = ParamSpec("P")
T = TypeVar("T")


def _checked(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that raises ``UserError`` for an argument whose type differs from its annotation."""

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        import pydantic

        errors, records = _modules()["tasks.system.errors"], vars(_modules()["tasks.records"])
        types = get_type_hints(function, None, {**records, "PositiveInt": pydantic.PositiveInt}, include_extras=True)
        given = inspect.signature(function).bind(*args, **kwargs)
        for name, value in given.arguments.items():
            try:
                given.arguments[name] = pydantic.TypeAdapter(types[name]).validate_python(value)
            except pydantic.ValidationError:
                wanted = inspect.formatannotation(given.signature.parameters[name].annotation).strip("'")
                more = f"`help(stratagem.{function.__name__})` describes it"
                raise errors.UserError(f"{name} = {errors.shown(value)}: must be {wanted}. {more}") from None
        return function(*given.args, **given.kwargs)

    return checked


@_checked
def run(
    recipe: str | Path | Sequence[str | Path] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    project: str | Path | None = None,
    resume: str | None = None,
    allow_changes: bool = False,
    fresh: bool = False,
    if_changed: bool = False,
) -> "RunSummary":
    """Download, prepare, train, evaluate and register, as `stratagem run`; the same unfinished run continues.

    Each argument is an option of the command. Progress goes to ``sys.stderr``. If this call is interrupted, the
    training saves its step and ends.

    Args:
        recipe: a name in the project's recipes/, or a path; or several, each overriding those before it.
        settings: single settings, which override the recipe, such as ``{"train.epochs": 3}``.
        project: the project's folder, or a folder in it; by default the current folder.
        resume: the id of the run to resume, or ``latest``.
        allow_changes: resume the run even if settings or data differ.
        fresh: start a new run even if the same one is unfinished.
        if_changed: train nothing if a finished run has the same data, settings and code; return the newest such run.

    Raises:
        UserError: names the key, its value, what is allowed and what to do.
        StratagemError: the run failed.
    """
    options = {"--allow-changes": allow_changes, "--fresh": fresh, "--if-changed": if_changed}
    arguments = [name for name, wanted in options.items() if wanted]
    arguments += ["--resume", resume] if resume is not None else []
    for key, value in (settings or {}).items():
        arguments += ["--set", f"{key}={json.dumps(value, default=str)}"]
    recipes = [recipe] if isinstance(recipe, str | Path) else recipe or ()
    arguments += ["--", *(_absolute(one) if Path(one).suffix in (".yaml", ".yml") else str(one) for one in recipes)]
    said = _command(["run", "--json", *arguments], project)
    if not said:
        raise _modules()["tasks.system.errors"].StratagemError(
            "this process is a member of a cluster: only the chief's process has the result"
        )
    summary: RunSummary = _modules()["tasks.records"].RunSummary.model_validate_json(said)
    return summary


@_checked
def load_run(run: str = "latest", *, project: str | Path | None = None) -> "RunDetails":
    """Return the records of a run, as `stratagem runs show`.

    Args:
        run: its id, the first characters of it, or ``latest``.
        project: as in ``run``.

    Raises:
        UserError: the run does not exist.
    """
    said = _command(["runs", "show", "--json", "--", run], project)
    details: RunDetails = _modules()["tasks.records"].RunDetails.model_validate_json(said)
    return details


@_checked
def predict(
    inputs: str | Path | Sequence[str | Path],
    model: str | Path | None = None,
    *,
    top_k: "PositiveInt" = 1,
    probabilities: bool = False,
    project: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Return the predictions of a trained model for raw inputs, as `stratagem predict`: a dictionary for each example.
    A broken example has an ``error``.

    Args:
        inputs: files and folders with images, lines of text, tables or arrays.
        model: ``models:/NAME@ALIAS``, ``models:/NAME/VERSION``, a run, or a .keras file; by default the only champion.
        top_k: the number of classes to return for each example.
        probabilities: also return the probabilities of all classes.
        project: as in ``run``.

    Raises:
        UserError: the model does not exist, or does not accept these inputs.
    """
    errors = _modules()["tasks.system.errors"]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "predictions.jsonl"
        arguments = ["--output", str(output), "--top-k", str(top_k), *(["--probabilities"] if probabilities else [])]
        arguments += ["--model", _model(model)] if model is not None else []
        given = [inputs] if isinstance(inputs, str | Path) else list(inputs)
        try:
            _command(["predict", *arguments, "--", *map(_absolute, given)], project)
        except errors.StratagemError:
            if not output.exists():  # Else some examples are broken, and say so.
                raise
        return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@_checked
def load_model(model: str | Path | None = None, *, project: str | Path | None = None) -> Any:
    """Return a trained model as a ``keras.Model``, which maps prepared arrays to logits or numbers.

    The sha256 of its file is checked, and Keras loads it in safe mode. Keras is imported into this process, with the
    backend in KERAS_BACKEND.

    Args:
        model: as in ``predict``.
        project: as in ``run``.

    Raises:
        UserError: the model does not exist, or its file is damaged.
    """
    with tempfile.TemporaryDirectory() as folder:  # Where the copy lies that an MLflow server gives.
        named = [] if model is None else ["--", _model(model)]
        located = json.loads(_child(["tasks", "locate", *named], project, TMPDIR=folder).splitlines()[-1])
        import keras

        path = sys.path[:]
        try:
            if located["module"] is not None:
                sys.path.insert(0, located["code"])
                importlib.import_module(located["module"])
            return keras.models.load_model(located["keras_file"], compile=False)
        finally:
            sys.path[:] = path


def main() -> None:
    """Run the command line; `python -m stratagem stage ...` is what DVC calls in a project without code of its own."""
    sys.path.insert(0, str(HERE))
    os.environ.update(_environment())
    if sys.argv[1:2] == ["stage"]:
        del sys.argv[1]
        from tasks.__main__ import main as run_stage

        run_stage()
    else:
        from flows.cli.main import main as run_command

        run_command()


def __getattr__(name: str) -> Any:
    """Return a record or an error; they are imported when they are first asked for: the command needs none so soon."""
    for module in () if name.startswith("_") else ("tasks.system.errors", "tasks.records"):
        if isinstance(found := getattr(_modules()[module], name, None), type):
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _environment() -> dict[str, str]:
    """Return what makes our code importable in a child process, also beside a `tasks.py` in the project's folder."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(HERE), *(one for one in path if one not in ("", str(HERE)))]
    # `python -m tasks` would look for `tasks`, and for all that it imports, in the project's folder first.
    return {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}


def _absolute(path: str | Path) -> str:
    return os.path.abspath(Path(path).expanduser())


def _model(model: str | Path) -> str:
    return _absolute(model) if str(model).endswith(".keras") else str(model)


def _command(arguments: Sequence[str], project: str | Path | None) -> str:
    """Run a command of ours, with all that it starts; return what it printed to standard output."""
    return _child(["tasks.system.lifetime", sys.executable, "-c", COMMAND, *arguments], project)


def _child(arguments: Sequence[str], project: str | Path | None, **environment: str) -> str:
    """Run a module of ours in the project's folder to its end; return what it printed to standard output.

    What it says on standard error is said here. It ends with this process, however that dies.

    Raises:
        StratagemError: its own error.
    """
    errors, child = _modules()["tasks.system.errors"], _modules()["tasks.system.child"]
    if not Path(project or ".").is_dir():
        raise errors.UserError(f"project = '{project}': no such folder. `stratagem init FOLDER` creates a project")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        problem = Path(folder) / "error"
        process = None
        try:
            process = child.Child(
                [sys.executable, "-m", *arguments],
                {**os.environ, **_environment(), **environment, "STRATAGEM_ERROR": str(problem)},
                cwd=project,
                stdout=out,
                stderr=subprocess.PIPE,
            )
            for line in process.stderr or ():
                sys.stderr.write(line)
            process.wait()
        finally:
            if process is not None:
                process.communicate()  # Closes its standard input, and waits for its end.
        if problem.exists():
            raise errors.from_json(json.loads(problem.read_text(encoding="utf-8")))
        if process.returncode:
            raise errors.StratagemError(f"the command ended with exit code {process.returncode}, see above")
        out.seek(0)
        return out.read()


@functools.cache
def _modules() -> dict[str, ModuleType]:
    """Return what of tasks/ is used here. What is installed leaves no module `tasks` behind, nor takes the caller's."""
    if not INSTALLED:
        return {name: importlib.import_module(name) for name in USED}
    path, theirs = sys.path[:], _take_away()
    sys.path.insert(0, str(HERE))
    try:
        found = {name: importlib.import_module(name) for name in USED}
    finally:
        sys.path[:] = path
        _take_away()
        sys.modules.update(theirs)
    for module in (found["tasks.system.errors"], found["tasks.records"]):
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__.startswith("tasks."):
                value.__module__ = __name__  # Where `pickle` finds it again.
    return found


def _take_away() -> dict[str, ModuleType]:
    """Take the modules out of Python's table that have one of our names; return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in OURS}


if __name__ == "__main__":
    main()
