"""The user's own code: what `module:function` names, and what it needs from the project's folder."""

import importlib
import modulefinder
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tasks import config
from tasks.system.errors import UserError, one_line

VARIABLE = "STRATAGEM_OWN_CODE"
"""Modules that others than who operates this machine may name, with blanks between them; `*` is any."""


def load(name: str, key: str) -> Callable[..., Any]:
    """Return a user's own ``module:function``, looked for from the project's folder too.

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
        raise UserError(f"{key} = '{name}': the name {first} is that of {taken}: give your own module another name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"{key} = '{name}': no module '{error.name}'. It is looked for in {root} and in the environment"
        ) from None
    except Exception as error:
        raise UserError(f"{key} = '{name}': importing {module_name} failed ({one_line(error)})") from error
    if not callable(getattr(module, function, None)):
        raise UserError(f"{key} = '{name}': {module_name} has no function '{function}'")
    found: Callable[..., Any] = getattr(module, function)
    return found


def load_measure(name: str, key: str, example: tuple[Any, Any], why: str) -> Callable[..., Any]:
    """Return a user's own ``module:function`` that gives a number for each example.

    Args:
        name: the module and the function.
        key: the setting that names them, for the message.
        example: labels and outputs of two examples.
        why: it is to give one for each, for the message.

    Raises:
        UserError: it does not exist, cannot be computed, or gives something else.
    """
    function = load(name, key)
    try:
        shape = tuple(function(*example).shape)
    except Exception as error:
        raise UserError(f"{key} = '{name}': cannot be computed ({one_line(error)})") from error
    if shape != (2,):
        raise UserError(
            f"{key} = '{name}': gives the shape {shape} for 2 examples, and must give one number for each, (2,): {why}"
        )
    return function


def check_allowed(names: Iterable[tuple[str, str]], by: str) -> None:
    """Refuse code that somebody else than who operates this machine names, unless its module is allowed: to import it
    is to run it.

    Args:
        names: what names the code, and the code as ``module:function``.
        by: who it is that names it.

    Raises:
        UserError: says how the module is allowed.
    """
    allowed = os.environ.get(VARIABLE, "").split()
    for key, name in names:
        module = name.partition(":")[0]
        if module not in allowed and "*" not in allowed:
            raise UserError(
                f"{key} = '{name}': {by} may not name code to import, which would run here. Whoever operates this "
                f"machine allows the module by {VARIABLE}='{' '.join([*allowed, module])}' in the environment of "
                "`stratagem up`, of the worker or of the command"
            )


def named_in(settings: config.Settings) -> dict[str, str]:
    """Return each ``module:function`` that settings name anywhere, and the first key that does."""
    others = {"model.name": settings.model.name, "train.loss": settings.train.loss}
    others["dataset.name"] = settings.dataset.builder or ""
    return {name: key for key, name in others.items() if ":" in name} | metrics_of(settings)


def metrics_of(settings: config.Settings) -> dict[str, str]:
    """Return each metric of the user's own that the settings of a run name anywhere, and the first key that does."""
    return {name: key for name, key in settings.named_metrics.items() if ":" in name}


def files(name: str, root: Path | None = None) -> list[Path]:
    """Return the files, relative to the project's folder, that the module of a ``module:function`` imports, and its
    own.

    They are found by reading, nothing is imported. There are none for the name of what is ours, and none for a module
    that is installed elsewhere.

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
