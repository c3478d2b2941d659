"""The `stratagem` command: parses, calls, prints. Nothing heavy is imported before a command needs it."""

import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from flows.cli import cluster, data, models, operate, project, runs, training
from flows.cli.command import Result, command

Function = Callable[..., Result | None]
EXAMPLES = {
    "run": (
        "stratagem run mnist",
        "stratagem run mnist laptop.yaml -S train.epochs=3   two recipes, a setting",
        "stratagem run mnist -S strategy.kind=mirrored -n    only print the plan",
    ),
    "compare": ("stratagem compare mnist --strategies one_device,mirrored --loops fit",),
    "sweep": ("stratagem sweep digits --trials 30 --parallel 2",),
    "data": (
        "stratagem data add photos/",
        "stratagem data add flowers.csv --target species",
        "stratagem data show flowers",
    ),
    "add": ("stratagem data add photos/", "stratagem data add flowers.csv --target species"),
    "runs": (
        "stratagem runs --dataset digits --sort test/accuracy",
        "stratagem runs show latest",
        "stratagem runs diff 3f2a 9b41",
    ),
    "report": ("stratagem report latest --open",),
    "predict": (
        "stratagem predict photos/ --model models:/digits-convnet2@champion",
        "stratagem predict table.csv --output predictions.csv",
    ),
    "ui": ("stratagem ui",),
    "up": ("stratagem up --detach",),
    "status": ("stratagem status --json",),
    "doctor": ("stratagem doctor mlflow prefect   only these checks",),
    "submit": ("stratagem submit mnist --nodes 2 --time 01:00:00 -n   only print the job",),
}


class Command(TyperCommand):
    """Shows its arguments without their Python types."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; `--explain` is an older name of `--dry-run`."""
        if any(one.name == "dry_run" for one in self.params):
            args = ["--dry-run" if one == "--explain" else one for one in args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options."""
        shown = [(one.param_type_name, one.get_help_record(ctx)) for one in self.get_params(ctx)]
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            if rows := [record for of, record in shown if of == kind and record is not None]:
                with formatter.section(title):
                    formatter.write_dl([(re.sub(r" <.*>$", "", name), text) for name, text in rows])


class Commands(TyperGroup):
    """Prints the commands by purpose, or the commands of a group in one list."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a list for each purpose."""
        panels = {"Commands": self.commands} if ctx.parent else PANELS
        width = max(len(name) for names in panels.values() for name in names)
        for title, names in panels.items():
            texts = [(f"{name:{width}}", self.commands[name].get_short_help_str(200)) for name in names]
            with formatter.section(title):
                formatter.write_dl(texts)


class Lists(Commands):
    """A group of commands; without a command it lists."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments: `runs --sort loss` is `runs list --sort loss`."""
        if args or not ctx.resilient_parsing:  # A shell completes all commands if there are no arguments.
            args = ["list", *args] if not args or (args[0][:1] == "-" and args[0] != "--help") else args
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete the names of the commands, and the options of the list."""
        listing = self.commands["list"].shell_complete(ctx, incomplete) if incomplete.startswith("-") else []
        return [*super().shell_complete(ctx, incomplete), *listing]


def _named(*functions: Function) -> dict[str, Function]:
    return {function.__name__.strip("_"): function for function in functions}


def _epilog(name: str) -> str | None:
    lines = "".join(f"\n  {line}" for line in EXAMPLES.get(name, ()))
    return f"\b\nExamples:{lines}" if lines else None


def _group(help: str, functions: dict[str, Function]) -> typer.Typer:
    group = typer.Typer(cls=Lists, help=help)
    for own, function in functions.items():
        group.command(own, cls=Command, epilog=_epilog(own))(command(function))
    return group


app = typer.Typer(
    cls=Commands,
    help="Train Keras models on more than one device: from a dataset and a strategy to a tested model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Importing rich's Markdown would double the time that --help takes.
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"stratagem {version('stratagem')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Accept the options of `stratagem` itself."""


PANELS: dict[str, Mapping[str, Function | typer.Typer]] = {
    "Train": _named(
        training.run, training.compare, training.sweep, training.train, training.evaluate, project.recipes,
        project.strategies,
    ),
    "Data": {
        "data": _group(
            "Add, list, show, compare, share and remove datasets.",
            _named(
                data.add, data.list_, data.show, data.diff, data.download, data.prepare, data.push, data.pull,
                data.remove,
            ),
        ),
    },
    "Results": {
        "runs": _group(
            "List the runs; show, compare, reproduce or remove them.",
            _named(runs.list_, runs.show, runs.logs, runs.diff, runs.reproduce, runs.prune, operate.sync),
        ),
        **_named(runs.report, runs.trace),
    },
    "Models": {
        "predict": models.predict,
        "models": _group(
            "List the models; predict, serve, export, register and roll back.",
            _named(models.list_, models.predict, models.serve, models.export, training.register, models.rollback),
        ),
    },
    "Operate": _named(
        operate.ui, operate.up, operate.down, operate.status, project.doctor, project.init, operate.reconcile
    ),
    "Cluster": {
        "submit": cluster.submit,
        "jobs": _group(
            "List the submitted jobs; print the log of one, or cancel it.",
            _named(cluster.list_, cluster.logs, cluster.cancel),
        ),
        "plan": cluster.plan,
    },
}  # fmt: skip
"""The commands in the order of `stratagem --help`."""
OLDER_NAMES = {
    **_named(data.download, data.prepare, training.register, runs.reproduce),
    **_named(operate.sync, models.export, models.rollback),
    "serve-model": models.serve,
    "logs": runs.logs,
}
"""Short and older names of commands in groups."""

for _name, _function in {
    **OLDER_NAMES,
    **{name: one for panel in PANELS.values() for name, one in panel.items()},
}.items():
    if isinstance(_function, typer.Typer):
        app.add_typer(_function, name=_name, epilog=_epilog(_name))
    else:
        app.command(_name, cls=Command, hidden=_name in OLDER_NAMES, epilog=_epilog(_name))(command(_function))


def main() -> None:
    """Run the command line."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # TensorFlow, SQLite and JSON use UTF-8 for file names in any locale; it is the default of Python 3.15.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)
    app()
