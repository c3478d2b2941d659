"""What a flow run of a deployment may name: whoever may ask a Prefect server for one does not operate its worker's
machine."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from prefect.context import FlowRunContext

from tasks import config
from tasks.modeling import own_code
from tasks.system.errors import UserError


def check_recipe(recipe: str | None) -> None:
    """Refuse a recipe of anywhere, before it is read: what is wrong with a file, a message quotes.

    Raises:
        UserError: it does not lie in recipes/.
    """
    root = config.project_root()
    check_file("recipe", recipe, config.recipes(root), root / "recipes")


PLACES = ("checkpoint.remote", "dataset.downloads", "model.initial")
"""The settings that say where something is taken from or sent to; everybody may give null."""
FILES = (".keras", ".h5")
"""What else `model.initial` may be, a run's id or an address in MLflow's registry, is the operator's own."""


def check_named(settings: config.Settings, recipe: str | None) -> None:
    """Refuse what a flow run's parameters name and neither params.yaml nor the recipe does: code whose module is not
    allowed, and a place to take files from, or to send checkpoints to.

    Args:
        settings: with all parameters.
        recipe: as the parameters name it.

    Raises:
        UserError: says how it is allowed.
    """
    if not _is_deployed():
        return
    known: dict[str, str] = {}
    places: dict[str, object] = {}
    with contextlib.suppress(UserError):  # A recipe that needs one of the parameters.
        without = config.load(recipe)
        known, places = own_code.named_in(without), without.flat()
    given = settings.flat()
    for key in PLACES:
        value = given.get(key)
        if value in (None, places.get(key)) or (key == "model.initial" and not str(value).endswith(FILES)):
            continue
        raise UserError(
            f"{key} = '{value}': a flow run may name no place that params.yaml or its recipe does not name. Write it "
            "there, or give null"
        )
    named = own_code.named_in(settings).items()
    own_code.check_allowed([(key, name) for name, key in named if name not in known], "a flow run")


def check_file(key: str, name: str | None, known: Mapping[str, Path], folder: Path) -> None:
    """Refuse a file outside of its folder: those in it are the operator's, and no others are.

    Raises:
        UserError: names the parameter.
    """
    if not _is_deployed() or name is None or name in known:
        return
    if not Path(name).resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{key} = '{name}': a flow run may name what lies in {folder}, and nothing else")


def _is_deployed() -> bool:
    """Return whether this is a flow run that a worker began."""
    context = FlowRunContext.get()
    return context is not None and context.flow_run is not None and context.flow_run.deployment_id is not None
