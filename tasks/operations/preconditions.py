"""What is refused before anything is started for a run: devices, a remote, a project's folder that cannot do."""

import importlib.util
import os
import tempfile

from tasks import config, runs
from tasks.runs import remote
from tasks.strategies import engines
from tasks.system.errors import UserError

NO_SIGNS = "?%[{}"
"""MLflow ends a file's name at the first and takes the second for the start of a sign in an address, TFDS begins a
pattern at the third, DVC names a value between the others."""


def check_devices(settings: config.Settings) -> None:
    """Refuse what can be known without a framework, before anything is started for a run.

    Raises:
        UserError: no TPU, not enough GPUs, a TF_CONFIG that cannot be used, its port is taken, JAX is not installed, or
            KERAS_BACKEND is another one than the strategy's; or there is no run ``model.initial``.
    """
    section = settings.strategy
    present = os.environ.get("KERAS_BACKEND")
    if present and present != section.backend:
        others = [kind for kind, other in config.strategy_kinds().items() if other.backend == present]
        why = ": keras.distribution does nothing on another one" if section.backend == "jax" else ""
        raise UserError(
            f"KERAS_BACKEND = '{present}' contradicts strategy.kind = '{section.kind}', which trains on "
            f"{section.backend}{why}. Unset KERAS_BACKEND"
            + (f", or give strategy.kind={' or '.join(others)}" if others else "")
        )
    if section.backend == "jax" and importlib.util.find_spec("jax") is None:
        raise UserError(
            f"strategy.kind = '{section.kind}' trains on JAX, which is not installed: install requirements.lock, or "
            "give strategy.kind=mirrored"
        )
    engines.check(section)
    if settings.model.initial is not None and runs.is_id(settings.model.initial):
        runs.refuse_pruned(runs.find_run(settings.model.initial))


def check_remote(settings: config.Settings, resume: str | None = None) -> None:
    """Refuse an address that a run cannot be copied to, before anything is started for it; bring the run that is to be
    resumed from there, where it is not here.

    Raises:
        UserError: names what is wrong with ``checkpoint.remote``; or there is no such run.
        StratagemError: the run is not here, and the remote does not answer.
    """
    if settings.checkpoint.remote is not None:
        remote.check(settings.checkpoint.remote)
        remote.bring(settings, resume)


def check_writable() -> None:
    """Refuse a project folder that a run could not write to or find its files in, before anything starts.

    Raises:
        UserError: names the folder.
    """
    root = config.project_root()
    if sign := next((sign for sign in NO_SIGNS if sign in str(root.resolve())), None):
        raise UserError(
            f"{root.resolve()} has '{sign}' in its path, which MLflow, TFDS or DVC take for something else than a "
            "letter of a name: move the project to a folder without it"
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
