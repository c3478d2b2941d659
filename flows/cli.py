"""The `stratagem` command: parses, calls, prints. Nothing heavy is imported before a command needs it."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tasks.records import EvaluationResult, Record, RunSummary

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
NO_SETTINGS: list[str] = []


@contextmanager
def command(debug: bool) -> Iterator[None]:
    """End a command as the shell expects: one message and the error's exit code, no traceback."""
    from tasks.errors import StratagemError, Terminated

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    for number in (signal.SIGTERM, signal.SIGHUP):  # SIGHUP: the terminal was closed.
        if signal.getsignal(number) != signal.SIG_IGN:  # As under nohup.
            signal.signal(number, terminate)
    try:
        yield
    except StratagemError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(getattr(interrupt, "exit_code", 130))
    except Exception as error:
        if debug:
            raise
        cause = (str(error).strip() or "no message").splitlines()[0]
        print(f"error: {type(error).__name__}: {cause} (the whole story: --debug)", file=sys.stderr)
        sys.exit(1)


@app.command()
def run(
    recipe: Recipe = None,
    overrides: Set = NO_SETTINGS,
    if_changed: Annotated[
        bool, typer.Option("--if-changed", help="Train nothing when data, settings and code are those of the last run.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Download, prepare, train, evaluate and register: the whole pipeline."""
    with command(debug):
        from tasks import config, processes

        settings = config.load(recipe, overrides)
        processes.check_writable()
        processes.check_source(settings.dataset)
        processes.set_flow_environment(debug)
        if not if_changed:
            processes.start(settings)  # Imports its framework while this process imports Prefect.
        server = processes.start_flow_server()
        from flows.training import Overrides, training

        if server is not None:
            server.await_ready()
        before = set(processes.finished_runs())
        summary = training(recipe, Overrides(**config.read_overrides(overrides)), if_changed)
        processes.stop()
        if json:
            print(summary.model_dump_json())
        else:
            print_summary(summary, changed=summary.run_id not in before)


def print_summary(summary: "RunSummary", changed: bool = True) -> None:
    """Print the short table that a run ends with."""
    if not changed:
        print("Nothing to do: data, settings and code are those of this finished run:")
    speed = (
        "one call of the step function only"
        if summary.examples_per_second is None
        else f"{summary.examples_per_second:,.0f}"
    )
    replicas = f"{summary.num_replicas} replica{'s' * (summary.num_replicas > 1)}"
    rows = {
        "dataset": f"{summary.dataset}, data version {(summary.data_version or 'not under DVC')[:12]}",
        "strategy": f"{summary.strategy}, {replicas}, loop {summary.loop}",
        "trained": f"{summary.epochs} epochs, {summary.steps:,} steps",
        "examples/s": speed,
        "test accuracy": f"{summary.metrics['test/accuracy']:.4f}",
        "checkpoint": summary.checkpoint,
        "model": f"{summary.model_version} {' '.join('@' + alias for alias in summary.aliases)}"
        if summary.model_version
        else f"not registered: {summary.reason}",
        "run": summary.run_id,
        "finished": summary.finished_at,
        "seconds": ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in summary.seconds.items()),
        "next": "stratagem ui",
    }
    _print_rows(rows)


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
        from tasks import config, processes

        processes.check_writable()
        record = processes.prepare_data(config.load(recipe, overrides), stage, force)
        _print_record(record, json, ("name", "version", "data_version", "folder", "num_classes"))


@app.command()
def train(
    recipe: Recipe = None,
    overrides: Set = NO_SETTINGS,
    resume: Annotated[
        bool, typer.Option("--resume", help="Carry on from the latest checkpoint of --run, or of the newest run.")
    ] = False,
    run_id: Annotated[str | None, typer.Option("--run", metavar="RUN", help="The run to resume.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train alone, without Prefect; the dataset must be prepared."""
    with command(debug):
        from tasks import config, processes
        from tasks.errors import Interrupted, UserError
        from tasks.records import Run, TrainingResult

        if run_id is not None and not resume:
            raise UserError(f"--run {run_id} names a run to resume: give --resume too")
        settings = config.load(recipe, overrides)
        processes.check_writable()
        prepared = processes.load_prepared(settings.dataset.name)
        if resume:
            begun = run_id or processes.newest_run(prepared.name)
            running = processes.run("resume", Run, settings, run_id=begun)
        else:
            running = processes.run("start", Run, settings, prepared=prepared)
        try:
            result = processes.run("train", TrainingResult, settings, prepared=prepared, run=running, resume=resume)
        except BaseException as error:
            status = "KILLED" if isinstance(error, Interrupted | KeyboardInterrupt) else "FAILED"
            reason = str(error) or type(error).__name__
            processes.run("finish", Run, settings, run=running, status=status, reason=reason)
            raise
        processes.run("finish", Run, settings, run=running, status="FINISHED")
        processes.stop()
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
        _print_record(result, json, (*shown, "weights_digest"))


RunId = Annotated[str | None, typer.Option("--run", metavar="RUN", help="The run; without it, the newest one.")]


@app.command()
def evaluate(
    recipe: Recipe = None, overrides: Set = NO_SETTINGS, run_id: RunId = None, json: Json = False, debug: Debug = False
) -> None:
    """Evaluate a checkpoint of a run: --set evaluate.checkpoint=latest, best or a step."""
    with command(debug):
        from tasks import config, processes
        from tasks.records import EvaluationResult

        settings = config.load(recipe, overrides)
        settings, prepared, running, training = processes.load_training(settings, run_id)
        result = processes.run(
            "evaluate", EvaluationResult, settings, prepared=prepared, training=training, run=running
        )
        processes.stop()
        if json:
            print(result.model_dump_json())
            return
        _print_record(result, False, ("run_id", "checkpoint", "num_examples", "metrics"))
        _print_classes(result)


@app.command()
def register(
    recipe: Recipe = None, overrides: Set = NO_SETTINGS, run_id: RunId = None, json: Json = False, debug: Debug = False
) -> None:
    """Register the model of a run that was evaluated."""
    with command(debug):
        from tasks import config, processes
        from tasks.records import RegisteredModel

        settings = config.load(recipe, overrides)
        settings, prepared, running, training = processes.load_training(settings, run_id)
        evaluation = processes.load_evaluation(running)
        result = processes.run(
            "register",
            RegisteredModel,
            settings,
            prepared=prepared,
            training=training,
            evaluation=evaluation,
            run=running,
        )
        processes.stop()
        _print_record(result, json, ("run_id", "model_name", "model_version", "aliases", "model_uri", "reason"))


@app.command()
def recipes(json: Json = False) -> None:
    """List the recipes."""
    with command(False):
        from json import dumps

        from rich.console import Console
        from rich.table import Table

        from tasks import config

        known = config.recipes(config.project_root())
        if json:
            print(dumps({name: str(path) for name, path in known.items()}))
            return
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("recipe")
        table.add_column("what it is", overflow="fold")
        for name, path in known.items():
            table.add_row(name, path.read_text(encoding="utf-8").splitlines()[0].lstrip("# "))
        Console(highlight=False).print(table)


@app.command()
def ui(debug: Debug = False) -> None:
    """Serve the MLflow UI and a Prefect server on 127.0.0.1 until Ctrl-C."""
    with command(debug):
        from tasks import processes

        processes.set_flow_environment(debug)
        processes.serve_ui()


def _print_record(record: "Record | None", json: bool, fields: tuple[str, ...]) -> None:
    """Print a record as JSON, or some of its fields as a short table."""
    if record is None:
        return
    if json:
        print(record.model_dump_json())
        return
    rows = {}
    for field in fields:
        value = getattr(record, field)
        if isinstance(value, dict):
            value = ", ".join(f"{name} {number:.4f}" for name, number in value.items())
        elif isinstance(value, tuple):
            value = ", ".join(map(str, value))
        rows[field.replace("_", " ")] = f"{value:,.0f}" if isinstance(value, float) else str(value)
    _print_rows(rows)


def _print_rows(rows: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _print_classes(result: "EvaluationResult") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("class", "precision", "recall", "f1", "examples"):
        table.add_column(heading, justify="left" if heading == "class" else "right")
    for entry in result.classes:
        table.add_row(
            entry.name, f"{entry.precision:.4f}", f"{entry.recall:.4f}", f"{entry.f1:.4f}", str(entry.support)
        )
    Console(highlight=False).print(table)


def main() -> None:
    """Run the command line."""
    app()
