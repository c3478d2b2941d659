"""Checks before a run starts: devices, the remote, the project's folder."""

import importlib.util
import os
import re
import sys
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path

from tasks import config
from tasks.modeling import own_code
from tasks.runs import entries, outcome, remote
from tasks.strategies import engines
from tasks.system.errors import UserError

NO_SIGNS = "?%[{}"
"""MLflow cuts a file's name at `?` and decodes `%` as in an address; `[` begins a pattern in TFDS, and DVC replaces
braces by values."""


def check_settings(settings: config.Settings) -> None:
    """Check the devices of a run, and that modules of the user's own code exist and have the names, without imports.

    Raises:
        UserError: as ``check_devices``, or a module does not exist or does not have the name.
    """
    check_devices(settings)
    root = str(config.project_root())
    for name, key in own_code.named_in(settings).items():
        module = name.partition(":")[0].partition(".")[0]
        if not module.isidentifier():  # The import explains what is wrong with it.
            continue
        if not (module in sys.modules or importlib.util.find_spec(module) or PathFinder.find_spec(module, [root])):
            raise UserError(own_code.no_module(key, name, module))
        module, _, function = name.partition(":")
        file = Path(root, *module.split(".")).with_suffix(".py")
        made_there = re.compile(rf"\b{function}\b|import \*|\b(?:__getattr__|exec|globals|setattr)\b")
        if file.is_file() and not made_there.search(file.read_text(encoding="utf-8", errors="replace")):
            raise UserError(f"{key} = '{name}': {module} has no function or class '{function}'")


def check_devices(settings: config.Settings) -> None:
    """Refuse a strategy that cannot work on this machine, before a run starts anything, without importing a framework.

    Raises:
        UserError: not enough GPUs, TF_CONFIG is wrong or its port is taken, JAX is not installed, KERAS_BACKEND
            contradicts the strategy, or the run ``model.initial`` does not exist.
    """
    section = settings.strategy
    present = os.environ.get("KERAS_BACKEND")
    if present and present != section.backend:
        others = [kind for kind, other in config.strategy_kinds().items() if other.backend == present]
        why = ": keras.distribution does nothing on another one" if section.backend == "jax" else ""
        raise UserError(
            f"KERAS_BACKEND = '{present}' contradicts strategy.kind = '{section.kind}', which trains on "
            f"{section.backend}{why}. Unset KERAS_BACKEND"
            + (f", or set strategy.kind={' or '.join(others)}" if others else "")
        )
    if section.backend == "jax" and importlib.util.find_spec("jax") is None:
        raise UserError(
            f"strategy.kind = '{section.kind}' trains on JAX, which is not installed: install requirements.lock, or "
            "set strategy.kind=mirrored"
        )
    engines.members(section)
    if settings.model.initial is not None and entries.is_id(settings.model.initial):
        outcome.refuse_pruned(entries.find_run(settings.model.initial))


def check_remote(settings: config.Settings, resume: str | None = None) -> None:
    """Check ``checkpoint.remote`` before a run starts anything; fetch the run to resume from there if mlruns/ lacks it.

    Raises:
        UserError: ``checkpoint.remote`` cannot be used, or the run does not exist.
        StratagemError: mlruns/ lacks the run, and the remote does not answer.
    """
    if settings.checkpoint.remote is not None:
        remote.check(settings.checkpoint.remote)
        remote.bring(settings, resume)


def check_writable() -> None:
    """Refuse a project folder that is not writable or has a character in its path that breaks MLflow, TFDS or DVC.

    Raises:
        UserError: names the folder.
    """
    root = config.project_root()
    if sign := next((sign for sign in NO_SIGNS if sign in str(root.resolve())), None):
        raise UserError(
            f"{root.resolve()} has '{sign}' in its path, which MLflow, TFDS or DVC would misread: "
            "move the project to a path without it"
        )
    for folder in (root / "data", root / "mlruns", root / ".dvc"):
        try:
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written ({error.strerror}): make the project's folder writable"
            ) from None
