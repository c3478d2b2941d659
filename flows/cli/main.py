"""The `stratagem` command: parses, calls, prints. Nothing heavy is imported before a command needs it.

The parameters of a command are its options, however many it has.
"""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import (
    comparison_command,
    completion,
    data,
    doctor,
    jobs,
    model_commands,
    operate_commands,
    project_command,
    reproduce,
    runs,
    scaling,
    stage_commands,
    sweep_command,
    sync,
)
from flows.cli.command import (
    NO_SETTINGS,
    AllowChanges,
    Debug,
    Fresh,
    Json,
    Recipe,
    Resume,
    Set,
    check_resume,
    command,
    open_standard_streams,
)
from flows.cli.explanation import Explain
from flows.cli.explanation import explain as show_explanation

if TYPE_CHECKING:
    from tasks.records import RunSummary

app = typer.Typer(
    help="Train Keras models on more than one device: a dataset and a strategy in, a proven model out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.add_typer(data.app, name="data")
app.add_typer(runs.app, name="runs")
app.add_typer(jobs.app, name="jobs")


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


@app.command()
def run(
    recipe: Recipe = None,
    overrides: Set = NO_SETTINGS,
    if_changed: Annotated[
        bool, typer.Option("--if-changed", help="Train nothing when data, settings and code are those of the last run.")
    ] = False,
    resume: Resume = None,
    allow_changes: AllowChanges = False,
    fresh: Fresh = False,
    explain: Explain = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Download, prepare, train, evaluate and register: the whole pipeline.

    An unfinished run with the same settings, data and code is resumed.
    """
    if explain:
        with command(debug):
            given = {"--if-changed": if_changed, "--resume": resume, "--allow-changes": allow_changes, "--fresh": fresh}
            show_explanation(recipe, overrides, json, beside=given)
        return
    with command(debug):
        from flows.operate import notifications, prefect_server
        from tasks import config
        from tasks import runs as all_runs
        from tasks.operations import dvc_data, pipeline, preconditions
        from tasks.process import client
        from tasks.system import timeline

        settings = config.load(recipe, overrides)
        notifications.check()
        check_resume(settings, resume, allow_changes, fresh, if_changed)
        preconditions.check_writable()
        if if_changed and (same := pipeline.find_unchanged(settings)):
            _print_run(same, json, changed=False)
            return
        dvc_data.check_source(settings.dataset)
        preconditions.check_devices(settings)
        if pipeline.join(settings, as_run=True):
            return
        all_runs.refuse_locked(settings, resume)
        with prefect_server.starting(settings, debug):
            from flows.reporting import run_flow
            from flows.training import training

        before = set(all_runs.finished())
        values = config.Overrides(config.read_overrides(overrides))
        options = (if_changed, resume, allow_changes, fresh)
        with timeline.span("flow", "flow"):
            summary = run_flow(training, recipe, values, *options)
        with timeline.span("flow", "end the stages"):
            client.stop_processes()
        _print_run(summary, json, changed=not if_changed or summary.run_id not in before)


def _print_run(summary: "RunSummary", json: bool, changed: bool) -> None:
    from flows.cli import tables  # Not before the run: 0.03 s that its stage process need not wait for.

    print(summary.model_dump_json()) if json else tables.print_run(summary, changed)


for stage_command in (
    comparison_command.compare,
    sweep_command.sweep,
    stage_commands.download,
    stage_commands.prepare,
    stage_commands.train,
    stage_commands.evaluate,
    stage_commands.register,
    stage_commands.report,
    stage_commands.rollback,
    stage_commands.export,
    model_commands.predict,
    model_commands.serve_model,
    operate_commands.up,
    operate_commands.down,
    operate_commands.status,
    doctor.doctor,
    project_command.init,
    sync.sync,
    jobs.submit,
    scaling.plan,
):
    app.command()(stage_command)
app.command()(reproduce.reproduce)


@app.command()
def trace(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="X",
            help="A version of a model (NAME@ALIAS, NAME/3); a run, a flow run, a data version or a commit, by its id "
            "or the first letters of it; a dataset; or the path of a checkpoint, prepared data, a report or an export.",
            autocompletion=completion.runs,
        ),
    ],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell what something was made of, and what was made of it: from the source of the data to the model's versions."""
    with command(debug):
        from flows.cli import run_tables
        from tasks.operations import trace

        found = trace.trace(reference)
        print(found.model_dump_json()) if json else run_tables.print_provenance(found)


@app.command()
def reconcile(json: Json = False, debug: Debug = False) -> None:
    """End the runs of killed processes in MLflow, Prefect and mlruns/, and deliver what MLflow was not told."""
    with command(debug):
        from json import dumps

        from flows.operate import prefect_server
        from tasks.operations import preconditions

        preconditions.check_writable()
        prefect_server.set_environment(debug)
        server = prefect_server.start_server()
        from flows.operate.reconciliation import reconcile

        if server is not None:
            server.await_ready()
        ended, kept = reconcile()
        if json:
            print(dumps({"ended": [record.model_dump() for record in ended], "undelivered": kept}))
            return
        for record in ended:
            print(f"{record.what} is {record.status} now: {record.reason}")
        for run_id in kept:
            print(f"run {run_id} has more to tell its MLflow store, which does not answer or is not the one set now")
        if not ended and not kept:
            print("There is nothing to end.")


@app.command()
def recipes(json: Json = False) -> None:
    """List the recipes."""
    with command(False):
        from json import dumps

        from flows.cli import tables
        from tasks import config

        known = config.recipes(config.project_root())
        if json:
            print(dumps({name: str(path) for name, path in known.items()}))
            return
        tables.print_recipes(known)


@app.command()
def strategies(
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table that docs/strategies.md has.")] = False,
) -> None:
    """List the strategies and what each offers, with the reasons for what it does not."""
    with command(False):
        from json import dumps

        from flows.cli import tables
        from tasks import config, reports

        if json:
            offers, kinds = reports.offers(), config.strategy_kinds()
            offered = {
                kind: {
                    "backend": section.backend,
                    "loops": section.loops,
                    "offers": [feature for feature in offers if offers[feature][kind] is None],
                    "refuses": {feature: by[kind] for feature, by in offers.items() if by[kind] is not None},
                }
                for kind, section in kinds.items()
            }
            print(dumps(offered))
        elif markdown:
            print(reports.offers_page(), end="")
        else:
            tables.print_strategies()


@app.command()
def ui(debug: Debug = False) -> None:
    """Serve the MLflow UI and a Prefect server on 127.0.0.1 until Ctrl-C."""
    with command(debug):
        from flows.operate import prefect_server
        from flows.operate.ui import serve

        prefect_server.set_environment(debug)
        serve()


def main() -> None:
    """Run the command line."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        # What a name of a file is to TensorFlow, SQLite and JSON, whatever the locale says; Python 3.15's own default.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, sys.orig_argv)
    open_standard_streams()
    app()
