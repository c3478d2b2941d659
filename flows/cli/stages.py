"""The commands that do one stage alone, without Prefect, such as `stratagem train`.

The parameters of a command are its options, however many it has.
"""

import sys
from json import dumps
from typing import Annotated

import typer

from flows.cli import completion, tables
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
    run_argument,
)

RunId = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="The run, by its id or the first letters of it; without it, the newest one.",
        autocompletion=completion.runs,
    ),
]


def download(
    recipe: Recipe = None,
    overrides: Set = NO_SETTINGS,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Download the dataset and verify its archives."""
    _data("download", recipe, overrides, False, json, debug)


def prepare(
    recipe: Recipe = None,
    overrides: Set = NO_SETTINGS,
    force: Annotated[bool, typer.Option("--force", help="Decode again even if nothing changed.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Download if needed, and decode the dataset into arrays."""
    _data("prepare", recipe, overrides, force, json, debug)


def _data(stage: str, recipe: str | None, overrides: list[str], force: bool, json: bool, debug: bool) -> None:
    with command(debug):
        from tasks import config
        from tasks.operations import dvc_data, preconditions

        preconditions.check_writable()
        record = dvc_data.prepare_data(config.load(recipe, overrides), stage, force)
        tables.print_record(record, json, ("name", "version", "data_version", "folder"))


def train(
    recipe: Recipe = None,
    overrides: Set = NO_SETTINGS,
    resume: Resume = None,
    allow_changes: AllowChanges = False,
    fresh: Fresh = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train alone, without Prefect; the dataset must be prepared.

    An unfinished run with the same settings, data and code is resumed.
    """
    with command(debug):
        from tasks import config
        from tasks.operations import dvc_data, pipeline, preconditions
        from tasks.process import client

        asked = config.load(recipe, overrides)
        check_resume(asked, recipe, resume, allow_changes, fresh)
        preconditions.check_writable()
        preconditions.check_devices(asked)
        if pipeline.join(recipe, overrides):
            return
        settings, prepared = dvc_data.load(recipe, overrides)
        result = pipeline.train_alone(settings, prepared, pipeline.Resumption(resume, allow_changes, fresh))
        client.stop_processes()
        trained = ("run_id", "dataset", "strategy", "epochs", "steps", "examples_per_second")
        tables.print_record(result, json, (*trained, "checkpoint", "best_checkpoint", "weights_digest"))


def evaluate(
    recipe: Recipe = None,
    overrides: Set = NO_SETTINGS,
    run_id: RunId = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Evaluate a checkpoint of a run: --set evaluate.checkpoint=latest, best or a step."""
    with command(debug):
        from tasks.operations import pipeline
        from tasks.process import client

        settings, prepared, running, training = pipeline.load_training(recipe, overrides, run_id)
        result = client.evaluate(settings, prepared, training, running)
        client.write_report(settings, running)
        client.stop_processes()
        if json:
            print(result.model_dump_json())
            return
        tables.print_record(result, False, ("run_id", "checkpoint", "num_examples", "metrics"))
        tables.print_classes(result)
        tables.print_pictures(running)


def register(
    recipe: Recipe = None,
    overrides: Set = NO_SETTINGS,
    run_id: RunId = None,
    force: Annotated[bool, typer.Option("--force", help="Make it @champion, whatever the evidence.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Register the model of a run that was evaluated.

    It gets register.alias, and @champion if it is shown to be better than the champion on the same test rows.
    """
    with command(debug):
        from tasks import runs
        from tasks.operations import pipeline
        from tasks.process import client, stages

        settings, prepared, running, training = pipeline.load_training(recipe, overrides, run_id)
        evaluation = runs.load_evaluation(running)
        with runs.lock(running.key, f"run {running.run_id}"):
            result = stages.register(
                settings, prepared=prepared, training=training, evaluation=evaluation, run=running, force=force
            )
            client.write_report(settings, running)
        client.stop_processes()
        shown = ("run_id", "model_name", "model_version", "aliases", "judgement", "model_uri", "reason", "notes")
        tables.print_record(result, json, shown)


def report(
    run_id: Annotated[str, run_argument("A run, or `latest` for the newest one.")] = "latest",
    open_page: Annotated[bool, typer.Option("--open", help="Show it in this machine's browser.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the report of a run again, from its records and the data, and print where it lies.

    It is one page, report/report.html in the run's folder: what was trained on what, how good it is and how sure that
    is, where it fails, where the time went. That of an unfinished run is partial, and says so.
    """
    with command(debug):
        import webbrowser

        from tasks.operations import pipeline

        path = pipeline.write_report(run_id)
        print(dumps({"report": str(path)}) if json else path)
        if open_page and not webbrowser.open(path.as_uri()):
            print("there is no browser to open it with", file=sys.stderr)
