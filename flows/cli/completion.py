"""Shell completion with the names in this project; `stratagem --show-completion` prints the script.

It runs at each press of the key, so it reads only names of files and the schema of the settings. Without a readable
project it completes nothing, because a shell has no place for a message.
"""

from collections.abc import Callable, Iterable
from types import ModuleType

from tasks.system.errors import UserError

MOST_RUNS = 20
"""The maximum number of completed ids."""
Names = Callable[[str], list[str]]


def _completion(names: Callable[[ModuleType, str], Iterable[str]]) -> Names:
    """Return a completion by ``names``, which receives the module `tasks.config` and the typed text; Typer keeps the
    names that start with it."""

    def found(incomplete: str) -> list[str]:
        from tasks import config

        try:
            return list(names(config, incomplete))
        except (OSError, UserError):
            return []

    return found


def _list(names: Callable[[ModuleType], Iterable[str]]) -> Names:
    """Return a completion of lists such as A,B, which adds one name to the typed ones."""

    @_completion
    def found(config: ModuleType, incomplete: str) -> Iterable[str]:
        *given, _ = incomplete.split(",")
        return [",".join([*given, name]) for name in names(config) if name not in given]

    return found


recipes = _completion(lambda config, _: sorted(config.recipes(config.project_root())))
spaces = _completion(lambda config, _: sorted(one.stem for one in config.project_root().glob("recipes/sweeps/*.yaml")))
datasets = _completion(
    lambda config, _: sorted(one.parent.name for one in config.project_root().glob("data/*/params.yaml"))
)
strategies = _completion(lambda config, _: config.strategy_kinds())
strategy_lists = _list(lambda config: config.strategy_kinds())
loop_lists = _list(lambda _: ("fit", "custom"))
formats = _completion(lambda config, _: config.names_of("serving/formats"))


@_completion
def checks(config: ModuleType, incomplete: str) -> Iterable[str]:
    """Return the names of the doctor's checks."""
    from tasks.operations import doctor

    return doctor.CHECKS


@_completion
def runs(config: ModuleType, incomplete: str) -> Iterable[str]:
    """Return `latest` and the ids of runs, the newest first."""
    folders = [one for one in (config.project_root() / "mlruns" / "runs").glob("*") if one.is_dir()]
    newest = sorted(folders, key=lambda one: one.stat().st_mtime, reverse=True)
    return ["latest", *[one.name for one in newest if one.name.startswith(incomplete)][:MOST_RUNS]]


@_completion
def settings(config: ModuleType, incomplete: str) -> Iterable[str]:
    """Return the keys of the settings with `=`; after `strategy.kind=` and other kinds, the kinds."""
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{key}={kind}" for kind in config.kinds_of(key.removesuffix(".kind")) if key.endswith(".kind")]
    return dict.fromkeys(f"{key}=" for key, _ in config.fields_of(config.Settings))
