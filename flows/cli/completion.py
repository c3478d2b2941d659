"""What a shell completes after Tab: the names that this project has. `stratagem --show-completion` prints the script.

It runs at each press of the key, so it reads names of files and the schema of the settings, and imports no framework.
Where there is no project, or its files cannot be read, nothing is completed: a shell has no place for a message.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from types import ModuleType

MOST_RUNS = 20
"""More ids than this help nobody to choose; those that begin with the letters typed so far are all there."""
Names = Callable[[str], list[str]]


def _quietly(names: Callable[[str], Iterable[str]]) -> Names:
    """Return nothing where the names cannot be found out; of the others, Typer takes those that begin as typed."""

    @wraps(names)
    def found(incomplete: str) -> list[str]:
        from tasks.system.errors import UserError

        try:
            return list(names(incomplete))
        except (OSError, UserError):
            return []

    return found


def _all_names(names: Callable[[ModuleType], Iterable[str]]) -> Names:
    """Return a completion with names that do not depend on what is typed; ``names`` gets the module `tasks.config`."""

    @_quietly
    def found(incomplete: str) -> Iterable[str]:
        from tasks import config

        return names(config)

    return found


recipes = _all_names(lambda config: sorted(config.recipes(config.project_root())))
spaces = _all_names(lambda config: sorted(one.stem for one in config.project_root().glob("recipes/sweeps/*.yaml")))
datasets = _all_names(
    lambda config: sorted(one.parent.name for one in config.project_root().glob("data/*/params.yaml"))
)
strategies = _all_names(lambda config: config.strategy_kinds())
formats = _all_names(lambda config: config.names_of("serving/formats"))
checks = _all_names(lambda config: config.names_of("operations/doctor"))


@_quietly
def runs(incomplete: str) -> Iterable[str]:
    """Return `latest` and the ids of runs, the newest first."""
    from tasks import config

    folders = [one for one in (config.project_root() / "mlruns" / "runs").glob("*") if one.is_dir()]
    newest = sorted(folders, key=lambda one: one.stat().st_mtime, reverse=True)
    return ["latest", *[one.name for one in newest if one.name.startswith(incomplete)][:MOST_RUNS]]


@_quietly
def strategy_lists(incomplete: str) -> Iterable[str]:
    """Return lists of strategies, A,B,...: what is typed already, and one more kind that is not in it."""
    from tasks import config

    *given, _ = incomplete.split(",")
    return [",".join([*given, kind]) for kind in config.strategy_kinds() if kind not in given]


@_quietly
def loop_lists(incomplete: str) -> Iterable[str]:
    """Return lists of loops, A,B: what is typed already, and one more."""
    *given, _ = incomplete.split(",")
    return [",".join([*given, loop]) for loop in ("fit", "custom") if loop not in given]


@_quietly
def settings(incomplete: str) -> Iterable[str]:
    """Return the keys of the settings, each with its `=`; after `strategy.kind=` and the like, the kinds."""
    from tasks import config

    key, equals, _ = incomplete.partition("=")
    if equals:
        return [f"{key}={kind}" for kind in config.kinds_of(key.removesuffix(".kind")) if key.endswith(".kind")]
    return dict.fromkeys(f"{key}=" for key, _ in config.fields_of(config.Settings))
