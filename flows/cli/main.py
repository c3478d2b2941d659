"""The `stratagem` command: parses, calls, prints. Nothing heavy is imported before a command needs it."""

import os
import sys
from typing import Annotated

import typer

from flows.cli import cluster, data, lineage, models, operate, project, runs, stages, training
from flows.cli.command import open_standard_streams

app = typer.Typer(
    help="Train Keras models on more than one device: a dataset and a strategy in, a proven model out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.add_typer(data.app, name="data")
app.add_typer(runs.app, name="runs")
app.add_typer(cluster.app, name="jobs")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"stratagem {version('stratagem')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Take the options that belong to no command."""


for command in (
    training.run,
    training.compare,
    training.sweep,
    stages.download,
    stages.prepare,
    stages.train,
    stages.evaluate,
    stages.register,
    stages.report,
    models.rollback,
    models.export,
    models.predict,
    models.serve_model,
    operate.up,
    operate.down,
    operate.status,
    project.doctor,
    project.init,
    operate.sync,
    cluster.submit,
    cluster.plan,
    lineage.reproduce,
    lineage.trace,
    operate.reconcile,
    project.recipes,
    project.strategies,
    operate.ui,
):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # What a name of a file is to TensorFlow, SQLite and JSON, whatever the locale says; Python 3.15's own default.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)
    open_standard_streams()
    app()
