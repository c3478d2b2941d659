"""Restricts the parameters of a deployment's flow runs, because a client of a Prefect server may not be the operator of
the worker's machine."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from prefect.context import FlowRunContext

from tasks import config
from tasks.modeling import own_code
from tasks.system.errors import UserError


def check_recipe(recipe: config.Recipe) -> None:
    """Refuse a recipe outside recipes/ before reading it, because an error message quotes a file's content.

    Raises:
        UserError: the recipe is not in recipes/.
    """
    root = config.project_root()
    for name in (recipe,) if isinstance(recipe, str) else recipe or ():
        check_file("recipe", name, config.recipes(root), root / "recipes")


PLACES = ("checkpoint.remote", "dataset.downloads", "model.initial")
"""The settings that name a place to read from or write to; null is always allowed."""
FILES = (".keras", ".h5")
"""File names in `model.initial`. Its other values, a run's id or a URI in MLflow's registry, are the operator's."""


def check_named(settings: config.Settings, load_without: Callable[[], config.Settings]) -> None:
    """Refuse what only a flow run's parameters name, and none of the operator's files: code in a module that is not
    allowed, and a place to read files from or send checkpoints to.

    Args:
        settings: the settings with all parameters.
        load_without: returns the settings without single overrides.

    Raises:
        UserError: the message says how to allow it.
    """
    if not is_deployed():
        return
    known: dict[str, str] = {}
    places: dict[str, object] = {}
    with contextlib.suppress(UserError):  # Files that need one of the parameters.
        without = load_without()
        known, places = own_code.named_in(without), without.flat()
    given = settings.flat()
    for key in PLACES:
        value = given.get(key)
        if value in (None, places.get(key)) or (key == "model.initial" and not str(value).endswith(FILES)):
            continue
        raise UserError(
            f"{key} = '{value}': a flow run may only use places that params.yaml or its recipe names. Add it "
            "there, or set null"
        )
    named = own_code.named_in(settings).items()
    own_code.check_allowed([(key, name) for name, key in named if name not in known], "a flow run")


def check_file(key: str, name: str | None, known: Mapping[str, Path], folder: Path) -> None:
    """Refuse a file outside its folder: only the files in the folder are the operator's.

    Raises:
        UserError: the file is elsewhere; the message names the parameter.
    """
    if not is_deployed() or name is None or name in known:
        return
    if not Path(name).resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{key} = '{name}': a flow run may only name files in {folder}")


def is_deployed() -> bool:
    """Return whether a worker started this flow run."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None
