"""The `stratagem` command: parses, calls, prints. Nothing heavy is imported before a command needs it."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tasks.config import Settings
    from tasks.records import Comparison, RunSummary

app = typer.Typer(
    help="Train Keras models on more than one device: a dataset and a strategy in, a proven model out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Recipe = Annotated[str | None, typer.Argument(help="A name in recipes/ or a path; without one, params.yaml alone.")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="One setting, such as train.epochs=3.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON record to standard output, and nothing else there.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Prefect's log.")]
Resume = Annotated[
    str | None, typer.Option("--resume", metavar="RUN|latest", help="Carry this run on, from its latest checkpoint.")
]
AllowChanges = Annotated[
    bool, typer.Option("--allow-changes", help="With --resume: also with settings or data of another training.")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Begin a new run, also where one of the same did not come to its end.")
]
NO_SETTINGS: list[str] = []


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


@contextmanager
def command(debug: bool) -> Iterator[None]:
    """End a command as the shell expects: one message and the error's exit code, no traceback."""
    from tasks import files
    from tasks.errors import Interrupted, StratagemError, Terminated
    from tasks.network import without_secrets
    from tasks.process.environment import keep_private, show_tracebacks

    keep_private()
    if debug:
        show_tracebacks()

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    for number in (signal.SIGTERM, signal.SIGHUP):  # SIGHUP: the terminal was closed.
        if signal.getsignal(number) != signal.SIG_IGN:  # As under nohup.
            signal.signal(number, terminate)
    try:
        try:
            yield
            sys.stdout.flush()
        finally:
            _disarm_signals()
    except BrokenPipeError:  # The reader of the output wants no more of it, as `head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends.
        sys.exit(128 + signal.SIGPIPE)
    except Interrupted as interrupted:
        print(f"interrupted: {interrupted}", file=sys.stderr)
        sys.exit(interrupted.exit_code)
    except StratagemError as error:
        if debug:
            print(without_secrets(traceback.format_exc()), file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(getattr(interrupt, "exit_code", 130))
    except Exception as error:
        if debug:
            print(without_secrets(traceback.format_exc()), file=sys.stderr)
        if full := files.full_disk(error, "the project's folder, or Prefect's,"):
            print(f"error: {full}", file=sys.stderr)
            sys.exit(full.exit_code)
        cause = (str(error).strip() or "no message").splitlines()[0]
        print(f"error: {type(error).__name__}: {without_secrets(cause)} (the whole story: --debug)", file=sys.stderr)
        sys.exit(1)


def _disarm_signals() -> None:
    """Let Python end in peace: an exception of ours in Prefect's last messages leaves it waiting, for 20 s at worst.

    A first signal to a command that ends anyway does nothing, a second one ends it at once.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: signal.signal(number, signal.SIG_DFL))


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

    A run with the same settings, data and code that did not come to its end is carried on.
    """
    with command(debug):
        from flows import prefect_server
        from tasks import config, dvc_data, pipeline, runs, timeline
        from tasks.errors import UserError
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
            print(same.model_dump_json()) if json else _print_run(same, changed=False)
            return
        dvc_data.check_source(settings.dataset)
        pipeline.check_devices(settings)
        if _joined(settings, as_run=True):
            return
        runs.refuse_held(settings, resume)
        prefect_server.set_environment(debug)
        client.start(settings)  # Imports its framework while this process imports Prefect.
        with timeline.span("flow", "wait for the API's address"):
            server = prefect_server.start_server()
        with timeline.span("flow", "import Prefect"):
            from flows.reporting import lead
            from flows.training import training

        if server is not None:
            with timeline.span("flow", "wait for the API"):
                server.await_ready()
        before = set(runs.finished())
        values = config.Overrides(config.read_overrides(overrides))
        options = (if_changed, resume, allow_changes, fresh)
        with timeline.span("flow", "flow"):
            summary = lead(training, recipe, values, *options)
        with timeline.span("flow", "end the stages"):
            client.stop()
        if json:
            print(summary.model_dump_json())
        else:
            _print_run(summary, changed=not if_changed or summary.run_id not in before)


def _print_run(summary: "RunSummary", changed: bool) -> None:
    """Print what a run ends with: how good it is for each class, the run itself, where its pictures are."""
    from flows import tables
    from tasks import config, runs
    from tasks.records import EvaluationResult

    running, root = runs.find(summary.run_id), config.project_root()
    if evaluated := runs.left_by(running, EvaluationResult):
        tables.print_classes(evaluated)
        print()
    tables.print_summary(summary, changed)
    tables.print_pictures(root / running.folder, root)


def _check_resume(
    settings: "Settings", resume: str | None, allow_changes: bool, fresh: bool, if_changed: bool = False
) -> None:
    """Refuse options that contradict each other, and a run that is another training, before anything is looked up."""
    from tasks import runs
    from tasks.errors import UserError

    if resume is not None and fresh:
        raise UserError(f"--resume {resume} carries a run on, and --fresh begins a new one: give one of them")
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
        from flows import prefect_server
        from flows.plan import plan
        from tasks import config, dvc_data, pipeline
        from tasks.process import client

        kinds, wanted, values = strategies.split(","), loops.split(","), config.read_overrides(overrides)
        first = plan(kinds, wanted, recipe, values).trainable[0]
        pipeline.check_writable()
        dvc_data.check_source(first.dataset)
        prefect_server.set_environment(debug)
        client.start(first, with_cluster=False)
        server = prefect_server.start_server()
        from flows.comparison import comparison
        from flows.reporting import lead

        if server is not None:
            server.await_ready()
        compared = lead(comparison, kinds, wanted, recipe, values, repeats)
        client.stop()
        if json:
            print(compared.model_dump_json())
        else:
            print_comparison(compared)


def print_comparison(result: "Comparison") -> None:
    """Print the table that a comparison ends with, in 80 columns."""
    from rich.console import Console
    from rich.table import Table

    from tasks import report

    columns, cells = report.comparison_cells(result, narrow=True)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("strategy", "loop"):
        table.add_column(heading, vertical="bottom")
    for column in columns:
        table.add_column(column.narrow, justify="right")
    for row in cells:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)  # A reason may hold [gpu:0].
    console.print(table)
    for remark in report.comparison_remarks(result):
        console.print(remark)
    console.print(
        f"{result.model} on {result.dataset}, {result.epochs} epochs, {result.global_batch_size} examples a step"
    )
    console.print(f"table: {result.folder}; runs: stratagem ui, under the run {result.run_id}")


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
        tables.print_record(record, json, ("name", "version", "data_version", "folder", "num_classes"))


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

    A training with the same settings, data and code that did not come to its end is carried on.
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
        client.stop()
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
    """Train as a member of a cluster that someone else started; False when this process is the one that leads."""
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
        client.stop()
        if json:
            print(result.model_dump_json())
            return
        tables.print_record(result, False, ("run_id", "checkpoint", "num_examples", "metrics"))
        tables.print_classes(result)
        tables.print_pictures(config.project_root() / running.folder, config.project_root())


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
        client.stop()
        shown = ("run_id", "model_name", "model_version", "aliases", "model_uri", "reason", "notes")
        tables.print_record(result, json, shown)


@app.command()
def reconcile(json: Json = False, debug: Debug = False) -> None:
    """End what killed processes left open in MLflow, Prefect and mlruns/, and deliver what MLflow was not told."""
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
            print("Nothing was left open.")


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

        from rich.console import Console
        from rich.table import Table

        from flows import tables
        from tasks import config, report

        kinds = config.strategy_kinds()
        if json:
            offers = report.offers()
            print(
                dumps(
                    {
                        kind: {
                            "backend": section.backend,
                            "loops": section.loops,
                            "offers": [feature for feature in offers if offers[feature][kind] is None],
                            "refuses": {feature: by[kind] for feature, by in offers.items() if by[kind] is not None},
                        }
                        for kind, section in kinds.items()
                    }
                )
            )
            return
        if markdown:
            print(report.offers_page(), end="")
            return
        rows, reasons = report.offers_cells()
        table = Table(box=None, padding=(0, 1, 0, 0))
        table.add_column("--set")
        for kind in kinds:
            table.add_column(kind.replace("_", "_\n"), vertical="bottom")
        for feature, *marks in rows:
            table.add_row(_fold(feature, 22), *marks)
        Console(highlight=False).print(table)
        tables.print_rows(reasons)
        for backend in dict.fromkeys(section.backend for section in kinds.values()):
            print(f"on {backend}: {', '.join(kind for kind in kinds if kinds[kind].backend == backend)}")


def _fold(name: str, width: int) -> str:
    """Return a long name in two lines, broken after `=`, `_` or `.`."""
    if len(name) <= width:
        return name
    cut = max(name.rfind(sign, 0, width) for sign in "=_.") + 1
    return f"{name[:cut]}\n {name[cut:]}"


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
