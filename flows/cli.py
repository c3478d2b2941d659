"""The `stratagem` command: parses, calls, prints. Nothing heavy is imported before a command needs it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows import data
from flows.command import NO_SETTINGS, Debug, Json, command

if TYPE_CHECKING:
    from tasks.config import Settings
    from tasks.records import RunSummary

app = typer.Typer(
    help="Train Keras models on more than one device: a dataset and a strategy in, a proven model out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.add_typer(data.app, name="data")

Recipe = Annotated[str | None, typer.Argument(help="A name in recipes/ or a path; without one, params.yaml alone.")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="One setting, such as train.epochs=3.")]
Resume = Annotated[
    str | None, typer.Option("--resume", metavar="RUN|latest", help="Resume this run, from its latest checkpoint.")
]
AllowChanges = Annotated[
    bool, typer.Option("--allow-changes", help="With --resume: also with settings or data of another training.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start a new run, also where one of the same is unfinished.")]


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
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Download, prepare, train, evaluate and register: the whole pipeline.

    An unfinished run with the same settings, data and code is resumed.
    """
    with command(debug):
        from flows import prefect_server
        from tasks import config, dvc_data, pipeline, runs, timeline
        from tasks.errors import UserError
        from tasks.machine import without_collections
        from tasks.process import client

        settings = config.load(recipe, overrides)
        _check_resume(settings, resume, allow_changes, fresh, if_changed)
        if if_changed and pipeline.in_foreign_cluster(settings):
            raise UserError(
                "--if-changed: the members of the cluster of TF_CONFIG would wait for a chief that has nothing to do. "
                "Leave it out, or give --set strategy.launcher=local"
            )
        pipeline.check_writable()
        if if_changed and (same := pipeline.find_unchanged(settings)):
            _print_run(same, json, changed=False)
            return
        dvc_data.check_source(settings.dataset)
        pipeline.check_devices(settings)
        if _joined(settings, as_run=True):
            return
        runs.refuse_held(settings, resume)
        prefect_server.set_environment(debug)
        client.start_processes(settings)  # Imports its framework while this process imports Prefect.
        with timeline.span("flow", "wait for the API's address"):
            server = prefect_server.start_server()
        with timeline.span("flow", "import Prefect"), without_collections():
            from flows.reporting import run_flow
            from flows.training import training

        if server is not None:
            with timeline.span("flow", "wait for the API"):
                server.await_ready()
        before = set(runs.finished())
        values = config.Overrides(config.read_overrides(overrides))
        options = (if_changed, resume, allow_changes, fresh)
        with timeline.span("flow", "flow"):
            summary = run_flow(training, recipe, values, *options)
        with timeline.span("flow", "end the stages"):
            client.stop_processes()
        _print_run(summary, json, changed=not if_changed or summary.run_id not in before)


def _print_run(summary: "RunSummary", json: bool, changed: bool) -> None:
    from flows import tables  # Not before the run: 0.03 s that its stage process need not wait for.

    print(summary.model_dump_json()) if json else tables.print_run(summary, changed)


def _check_resume(
    settings: "Settings", resume: str | None, allow_changes: bool, fresh: bool, if_changed: bool = False
) -> None:
    """Refuse options that contradict each other, and a run that is another training, before anything is looked up."""
    from tasks import runs
    from tasks.errors import UserError

    if resume is not None and fresh:
        raise UserError(f"--resume {resume} resumes a run, and --fresh starts a new one: give one of them")
    if if_changed and (resume is not None or fresh):
        raise UserError("--if-changed may train nothing, and --resume and --fresh ask for a training: give one of them")
    if resume is None and allow_changes:
        raise UserError("--allow-changes is about a run that you name: give --resume RUN too")
    runs.refuse_resume(settings, resume, allow_changes)


@app.command()
def compare(
    strategies: Annotated[str, typer.Option("--strategies", metavar="A,B,...", help="Which: `stratagem strategies`.")],
    recipe: Recipe = None,
    loops: Annotated[
        str, typer.Option("--loops", metavar="A,B", help="Which loops; a pair that does not exist is left out.")
    ] = "fit,custom",
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="One setting for all, such as train.epochs=3; strategy.devices=2 goes to each strategy that has "
            "devices, strategy.mirrored.devices=2 to one.",
        ),
    ] = NO_SETTINGS,
    repeats: Annotated[
        int | None,
        typer.Option(
            "--repeats",
            min=1,
            metavar="N",
            help="How often each is trained, in rounds. Without it twice; once where a round takes over 10 minutes.",
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train the same under several strategies, one after another, in rounds: a table of speed, time and accuracy.

    Data, seed, epochs and the global batch are those of the settings for all; a batch size for each replica counts as
    the global one. A strategy that fails is a row with its reason.
    """
    with command(debug):
        from flows import prefect_server, tables
        from flows.plan import plan
        from tasks import config, dvc_data, pipeline
        from tasks.machine import without_collections
        from tasks.process import client

        kinds, wanted, values = strategies.split(","), loops.split(","), config.read_overrides(overrides)
        first = plan(kinds, wanted, recipe, values).trainable[0]
        pipeline.check_writable()
        dvc_data.check_source(first.dataset)
        prefect_server.set_environment(debug)
        client.start_processes(first, with_cluster=False)
        server = prefect_server.start_server()
        with without_collections():
            from flows.comparison import comparison
            from flows.reporting import run_flow

        if server is not None:
            server.await_ready()
        compared = run_flow(comparison, kinds, wanted, recipe, values, repeats)
        client.stop_processes()
        if json:
            print(compared.model_dump_json())
        else:
            tables.print_comparison(compared)


@app.command()
def download(recipe: Recipe = None, overrides: Set = NO_SETTINGS, json: Json = False, debug: Debug = False) -> None:
    """Download the dataset and verify its archives."""
    _data("download", recipe, overrides, False, json, debug)


@app.command()
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
        from flows import tables
        from tasks import config, dvc_data, pipeline

        pipeline.check_writable()
        record = dvc_data.prepare_data(config.load(recipe, overrides), stage, force)
        tables.print_record(record, json, ("name", "version", "data_version", "folder"))


@app.command()
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
        from flows import tables
        from tasks import config, dvc_data, pipeline
        from tasks.process import client

        settings = config.load(recipe, overrides)
        _check_resume(settings, resume, allow_changes, fresh)
        pipeline.check_writable()
        pipeline.check_devices(settings)
        if _joined(settings):
            return
        prepared = dvc_data.load_prepared(settings.dataset.name)
        result = pipeline.train_alone(settings, prepared, pipeline.Resumption(resume, allow_changes, fresh))
        client.stop_processes()
        shown = (
            "run_id",
            "dataset",
            "strategy",
            "epochs",
            "steps",
            "examples_per_second",
            "checkpoint",
            "best_checkpoint",
        )
        tables.print_record(result, json, (*shown, "weights_digest"))


def _joined(settings: "Settings", as_run: bool = False) -> bool:
    """Train as a member of a cluster that someone else started; False where this process is to run the pipeline."""
    from tasks import pipeline

    if pipeline.member_name(settings) is None:
        return False
    pipeline.join(settings, as_run)
    return True


RunId = Annotated[str | None, typer.Option("--run", metavar="RUN", help="The run; without it, the newest one.")]


@app.command()
def evaluate(
    recipe: Recipe = None, overrides: Set = NO_SETTINGS, run_id: RunId = None, json: Json = False, debug: Debug = False
) -> None:
    """Evaluate a checkpoint of a run: --set evaluate.checkpoint=latest, best or a step."""
    with command(debug):
        from flows import tables
        from tasks import config, pipeline
        from tasks.process import client

        settings, prepared, running, training = pipeline.load_training(config.load(recipe, overrides), run_id)
        result = client.evaluate(settings, prepared, training, running)
        client.stop_processes()
        if json:
            print(result.model_dump_json())
            return
        tables.print_record(result, False, ("run_id", "checkpoint", "num_examples", "metrics"))
        tables.print_classes(result)
        tables.print_pictures(running)


@app.command()
def register(
    recipe: Recipe = None, overrides: Set = NO_SETTINGS, run_id: RunId = None, json: Json = False, debug: Debug = False
) -> None:
    """Register the model of a run that was evaluated."""
    with command(debug):
        from flows import tables
        from tasks import config, pipeline, runs
        from tasks.process import client

        settings, prepared, running, training = pipeline.load_training(config.load(recipe, overrides), run_id)
        evaluation = runs.load_evaluation(running)
        with runs.hold(running.key, f"run {running.run_id}"):
            result = client.register(settings, prepared, training, evaluation, running)
        client.stop_processes()
        shown = ("run_id", "model_name", "model_version", "aliases", "model_uri", "reason", "notes")
        tables.print_record(result, json, shown)


@app.command()
def export(
    run_id: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="A run, `latest` for the newest one, or models:/NAME@ALIAS or models:/NAME/VERSION."
        ),
    ],
    format: Annotated[
        str, typer.Option("--format", metavar="NAME", help="A file of tasks/exports/, such as keras or savedmodel.")
    ],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FOLDER", help="A folder that is not there yet; without it, one of the run's."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="latest|best", help="Without it, the latest.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the model of a run as files of a format, and compare what these give with Keras on the test split.

    Beside the files lies export.json: where the model comes from, what it takes and gives, and the sha256 of each file.
    """
    with command(debug):
        from flows import tables
        from tasks import exports, pipeline
        from tasks.process import client

        exports.find(format)
        settings, prepared, running, which = pipeline.find_model(run_id, checkpoint)
        result = client.export(settings, prepared, running, format, which, to and to.absolute())
        client.stop_processes()
        print(result.model_dump_json()) if json else tables.print_export(result)


@app.command()
def reconcile(json: Json = False, debug: Debug = False) -> None:
    """End the runs of killed processes in MLflow, Prefect and mlruns/, and deliver what MLflow was not told."""
    with command(debug):
        from json import dumps

        from flows import prefect_server
        from tasks import pipeline

        pipeline.check_writable()
        prefect_server.set_environment(debug)
        server = prefect_server.start_server()
        from flows.reconciliation import reconcile

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

        from flows import tables
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

        from flows import tables
        from tasks import config, report

        if json:
            offers, kinds = report.offers(), config.strategy_kinds()
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
            print(report.offers_page(), end="")
        else:
            tables.print_strategies()


@app.command()
def ui(debug: Debug = False) -> None:
    """Serve the MLflow UI and a Prefect server on 127.0.0.1 until Ctrl-C."""
    with command(debug):
        from flows import prefect_server
        from flows.ui import serve

        prefect_server.set_environment(debug)
        serve()


def main() -> None:
    """Run the command line."""
    app()
