"""The user's own code: objects named by `module:function`, and the files of the project's folder that they import."""

import importlib
import inspect
import modulefinder
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tasks import config
from tasks.system.errors import StratagemError, UserError, is_lost_peer, is_out_of_memory, one_line

Made = TypeVar("Made")

VARIABLE = "STRATAGEM_OWN_CODE"
"""Modules that users other than this machine's operator may name, separated by spaces; `*` allows any module."""


def load(name: str, key: str) -> Callable[..., Any]:
    """Return a user's ``module:function``; the project's folder is searched, too.

    Args:
        name: the module and the function.
        key: the setting that names them, for the message.

    Raises:
        UserError: the module or the function does not exist, or importing it failed.
    """
    module_name, _, function = name.partition(":")
    root = str(config.project_root())
    if root not in sys.path:
        sys.path.insert(0, root)
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise UserError(f"{key} = '{name}': write it as module:function, such as my_code:build")
    first = module_name.partition(".")[0]
    taken = getattr(sys.modules.get(first), "__file__", None) or root
    if not Path(taken).is_relative_to(root) and (Path(root, first).is_dir() or Path(root, f"{first}.py").is_file()):
        raise UserError(f"{key} = '{name}': the name {first} is taken by {taken}: rename your module")
    with blamed(f"{key} = '{name}': importing {module_name} failed"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise UserError(no_module(key, name, error.name)) from None
    if not callable(getattr(module, function, None)):
        raise UserError(f"{key} = '{name}': {module_name} has no function or class '{function}'")
    found: Callable[..., Any] = getattr(module, function)
    return found


def no_module(key: str, name: str, module: str | None) -> str:
    """Return the message for a module that does not exist, which the ``module:function`` of a setting names."""
    return f"{key} = '{name}': there is no module '{module}' in {config.project_root()} or in the environment"


def make(name: str, key: str, kind: type[Made], options: Mapping[str, Any], **known: Any) -> Made:
    """Call a user's class or function and return the resulting object.

    Args:
        name: the module and the class or function.
        key: the setting that names them, for the message.
        kind: the required class of the result.
        options: keyword arguments.
        known: further keyword arguments, passed only if the signature has them.

    Raises:
        UserError: the class or function does not exist, fails with these options, or returns another class.
    """
    function = load(name, key)
    given = f"with {', '.join(options)}" if options else "without options"
    with blamed(f"{key} = '{name}' cannot be created {given}"):
        taken = inspect.signature(function).parameters.keys() & known.keys()
        made = function(**options, **{one: known[one] for one in taken - options.keys()})
    if not isinstance(made, kind):
        raise UserError(f"{key} = '{name}' returns a {type(made).__name__}, but must return a Keras {kind.__name__}")
    return made


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Raise what the user's own code raises within the block, ``sys.exit()`` too, as a ``UserError`` that begins with
    ``what``. The loss of another process and a lack of memory are not the code's fault, and stay as they are."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, StratagemError) or is_lost_peer(error) or is_out_of_memory(error):
            raise
        raise UserError(f"{what} ({described(error)})") from error


def blame(error: BaseException, settings: config.Settings) -> UserError | None:
    """Return the message for an error that the user's own code raised in a stage, with the keys that may name this
    code; None without such code, or for the loss of another process."""
    root, codes = config.project_root(), [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    passed = {(code.co_filename, code.co_qualname.partition(".")[0]) for code in codes}
    named = {}
    for name, key in named_in(settings).items():
        if functions := {function for file, function in passed if file in {str(root / one) for one in files(name)}}:
            named[f"{key} = '{name}'"] = name.partition(":")[2] in functions
    if not named or is_lost_peer(error):
        return None
    # A method's class need not be the named one, such as a layer of a model: then each key of its file may be meant.
    keys = [key for key, exact in named.items() if exact or True not in named.values()]
    return UserError(f"{' or '.join(keys)}: fails ({described(error)})")


def described(error: BaseException) -> str:
    """Return an error of the user's own code as one line, with its file and line in that code."""
    root, place = config.project_root(), ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(root) and not {"flows", "tasks", "site-packages"} & set(path.relative_to(root).parts):
            place = f", {path.relative_to(root)} line {frame.lineno}"
    return one_line(error) + place


def load_measure(name: str, key: str, example: tuple[Any, Any], why: str) -> Callable[..., Any]:
    """Return a user's ``module:function`` that computes one number per example.

    Args:
        name: the module and the function.
        key: the setting that names them, for the message.
        example: labels and outputs of two examples.
        why: the reason why it must return one number per example, for the message.

    Raises:
        UserError: the function does not exist, is a class, fails, or returns something else.
    """
    function = load(name, key)
    if isinstance(function, type):
        raise UserError(f"{key} = '{name}': is a class, but must be a function of labels and outputs")
    with blamed(f"{key} = '{name}': cannot be computed"):
        made = function(*example)
    shape = getattr(made, "shape", None)
    if shape != (2,):
        what = f"a {type(made).__name__}" if shape is None else f"the shape {tuple(shape)}"
        raise UserError(
            f"{key} = '{name}': returns {what} for 2 examples, but must return one number each, (2,): {why}"
        )
    return function


def check_allowed(names: Iterable[tuple[str, str]], by: str) -> None:
    """Refuse code named by anyone other than this machine's operator, unless its module is allowed: importing code
    runs it.

    Args:
        names: the keys that name code, and the code as ``module:function``.
        by: who names it, for the message.

    Raises:
        UserError: the module is not allowed; the message explains how to allow it.
    """
    allowed = os.environ.get(VARIABLE, "").split()
    for key, name in names:
        module = name.partition(":")[0]
        if module not in allowed and "*" not in allowed:
            raise UserError(
                f"{key} = '{name}': {by} may not name code to import, because it would run here. To allow this module, "
                f"the operator of this machine sets {VARIABLE}='{' '.join([*allowed, module])}' in the environment of "
                "`stratagem up`, the worker or the command"
            )


NAMING = ("model.name", "train.loss", "optimizer.kind", "schedule.kind", "input.augmentation.custom")
"""Settings that may name the user's own code, in addition to the builder of a dataset and the metrics."""


def named_in(settings: config.Settings) -> dict[str, str]:
    """Return each ``module:function`` in the settings, with the first key that names it."""
    flat = settings.flat()
    named = {key: str(flat[key]) for key in NAMING}
    named["dataset.name"] = settings.dataset.builder or ""
    found = {name: key for key, name in named.items() if ":" in name} | metrics_of(settings)
    return found | {name: "train.callbacks" for name, _ in settings.train.own_callbacks}


def metrics_of(settings: config.Settings) -> dict[str, str]:
    """Return each custom metric in the settings of a run, with the first key that names it."""
    return {name: key for name, key in settings.named_metrics.items() if ":" in name}


def files(name: str, root: Path | None = None) -> list[Path]:
    """Return the file of the module of a ``module:function`` and the files that it imports, relative to the project's
    folder.

    The files are parsed, not imported. The result is empty for a name without a module and for an installed module.

    Args:
        name: the module and the function.
        root: the project's folder, or a checkout of it.
    """
    module, colon, _ = name.partition(":")
    if not colon:
        return []
    root = root or config.project_root()
    finder = modulefinder.ModuleFinder(path=[str(root)])
    try:
        finder.import_hook(module)
        found = {Path(file) for one in finder.modules.values() if (file := getattr(one, "__file__", None))}
    except (ImportError, SyntaxError, AttributeError, TypeError):  # Such as a folder without __init__.py.
        found = set()
    place = root.joinpath(*module.split("."))
    found |= {place.with_suffix(".py"), place / "__init__.py"}
    return sorted(path.relative_to(root) for path in found if path.is_relative_to(root) and path.is_file())
