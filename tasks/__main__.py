"""`python -m tasks STAGE`: what DVC and child processes call. Here tracking is put around the plain stages.

python -m tasks download NAME           the stages of data/<name>/dvc.yaml
python -m tasks prepare NAME
python -m tasks train [RECIPE] [--set section.key=value]...      the stages of the root's dvc.yaml
python -m tasks evaluate [RECIPE] [--set section.key=value]...
python -m tasks reconcile               ends the MLflow runs of processes that were killed
python -m tasks guard COMMAND...         runs a command, and ends it when standard input closes
python -m tasks serve                   JSON lines on standard input, an answer each on standard output
python -m tasks assist                  the same for a worker that is not the chief: it checks, trains, evaluates
python -m tasks member                  a worker or a parameter server that the chief gives work to
"""

import argparse
import contextlib
import fcntl
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import yaml

from tasks import config, dvc_data, errors, files, lineage, network, prepared_data, processes, records, runs, timeline
from tasks.errors import StratagemError, UserError
from tasks.launchers.cluster import SHARED
from tasks.process import signals
from tasks.process.environment import keep_private
from tasks.records import Comparison, EvaluationResult, PreparedDataset, Record, RegisteredModel, Run, TrainingResult

Status = Literal["FINISHED", "FAILED", "KILLED"]

# Set when this process is told to stop while it trains, which it does after a checkpoint of its next step.
_stop = threading.Event()


@contextlib.contextmanager
def quiet_standard_error() -> Iterator[None]:
    """Hold back what is written to descriptor 2, and write it only if the block fails for a reason that it may explain.

    TensorFlow's C++ start-up lines ignore TF_CPP_MIN_LOG_LEVEL.
    """
    import tempfile

    with tempfile.TemporaryFile() as held:
        visible = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException as error:
            os.dup2(visible, 2)
            held.seek(0)
            # A refusal is one message.
            if not isinstance(error, StratagemError) or os.environ.get("STRATAGEM_DEBUG"):
                sys.stderr.write(held.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(visible, 2)
            os.close(visible)


def start_run(
    settings: config.Settings,
    prepared: PreparedDataset,
    flow_run_id: str | None = None,
    parent_run_id: str | None = None,
) -> Run:
    """Begin the MLflow run of a pipeline, unless its training would be refused."""
    from tasks import tracking
    from tasks.train import check

    check(settings, prepared)
    _end_abandoned(runs.key_of(settings))
    traced = lineage.trace(settings, prepared.data_version)
    return tracking.start(settings, prepared, traced, flow_run_id, parent_run_id)


def start_comparison(
    settings: config.Settings, prepared: PreparedDataset, key: str, flow_run_id: str | None = None
) -> Run:
    """Begin the MLflow run that is the parent of a comparison's runs."""
    from tasks import tracking

    _end_abandoned(key)
    traced = lineage.trace(settings, prepared.data_version)
    return tracking.start_comparison(settings, prepared, traced, key, flow_run_id)


def resume_run(
    settings: config.Settings,
    prepared: PreparedDataset,
    run_id: str,
    flow_run_id: str | None = None,
    allow_changes: bool = False,
) -> Run:
    """Take up a run that was begun before, unless that would be another training."""
    from tasks import tracking
    from tasks.train import check

    run = runs.find(run_id)
    runs.refuse_other_training(settings, run, allow_changes, prepared)
    check(settings, prepared)
    traced = lineage.trace(settings, prepared.data_version)
    _end_abandoned(runs.key_of(settings), run_id)
    return tracking.resume(run, settings, traced, flow_run_id)


def _end_abandoned(key: str, run_id: str | None = None) -> None:
    """End what processes that were killed left open, before another run begins."""
    from tasks import tracking

    with contextlib.suppress(tracking.Unavailable):
        for ended in tracking.end_abandoned(key, run_id):
            print(f"{ended.what} was left open and is {ended.status} now: {ended.reason}", file=sys.stderr)


def train(settings: config.Settings, prepared: PreparedDataset, run: Run) -> TrainingResult:
    """Train, with metrics and the processor's load going to MLflow meanwhile."""
    from tasks import report, tracking
    from tasks.train import train as train_stage

    try:
        with tracking.MetricWriter(run) as writer, tracking.system_metrics(writer, settings):
            result = train_stage(settings, prepared, run, writer.write, _stop)
    finally:
        if steps := runs.nonfinite_steps(run):
            tracking.set_tags(run, {"nonfinite_steps": ", ".join(map(str, steps))})
    folder = config.project_root() / run.folder
    history = report.history_table(result, folder / "report" / "history.csv")
    found = [folder / "records" / name for name in ("placement.json", "tuning.json")]
    tracking.log_files(run, [*(path for path in found if path.exists()), history], "training")
    performance = {"performance/examples_per_second": result.examples_per_second}
    tracking.log_metrics(run, {name: v for name, v in performance.items() if v is not None})
    tracking.set_tags(
        run,
        {
            "checkpoint": result.checkpoint,
            "best_checkpoint": result.best_checkpoint,
            "weights_digest": result.weights_digest,
            "num_replicas": str(result.num_replicas),
            "devices": ", ".join(result.devices),
            "num_parameters": str(result.num_parameters),
        },
    )
    # When MLflow has all of it: who finds the record does not train again.
    record = records.save(result, folder / "records" / "training.json")
    tracking.log_files(run, [record], "training")
    return result


def evaluate(
    settings: config.Settings, prepared: PreparedDataset, training: TrainingResult, run: Run
) -> EvaluationResult:
    """Evaluate, with metrics, records and pictures going to MLflow."""
    from tasks import report, tracking
    from tasks.evaluate import evaluate as evaluate_stage

    result = evaluate_stage(settings, prepared, training)
    folder = config.project_root() / run.folder
    title = f"{run.name}: test accuracy {result.metrics['test/accuracy']:.4f}"
    pictures = [
        report.confusion_matrix(result, title, folder / "report" / "confusion_matrix.png"),
        report.learning_curve(training, title, folder / "report" / "learning_curve.png"),
    ]
    tracking.log_metrics(run, result.metrics)
    tracking.log_files(run, pictures, "evaluation")
    # When MLflow has all of it: who finds the record does not evaluate again.
    record = records.save(result, folder / "records" / "evaluation.json")
    tracking.log_files(run, [record], "evaluation")
    return result


def register(
    settings: config.Settings,
    prepared: PreparedDataset,
    training: TrainingResult,
    evaluation: EvaluationResult,
    run: Run,
) -> RegisteredModel:
    """Register the evaluated model."""
    from tasks.register import register as register_stage

    prepared_data.verify(prepared)  # The model's version names the data.
    result = register_stage(settings, run, prepared, training, evaluation)
    records.save(result, config.project_root() / run.folder / "records" / "registration.json")
    return result


def report_comparison(settings: config.Settings, run: Run, comparison: Comparison) -> Comparison:
    """Write a comparison's table into its folder and into MLflow."""
    from tasks import report, tracking

    folder = config.project_root() / run.folder
    tables = [
        records.save(comparison, folder / "comparison.json"),
        report.comparison_table(comparison, folder / "comparison.csv"),
    ]
    page = report.comparison_page(comparison, folder / "comparison.md")
    tracking.log_comparison(run, comparison, page, tables)
    return comparison


def finish_run(settings: config.Settings, run: Run, status: Status, reason: str | None = None) -> Run:
    """End the MLflow run."""
    from tasks import tracking

    tracking.finish(run, status, reason)
    return run


def report_restarts(
    settings: config.Settings, run: Run, restarts: list[str], training: TrainingResult | None = None
) -> TrainingResult | None:
    """Put down why members of the cluster were started again while it trained; ``training`` is None where it failed."""
    from tasks import tracking

    tracking.set_tags(run, {"restarts": str(len(restarts)), "restart_reasons": "; ".join(restarts)})
    if training is None:
        return None
    result = training.model_copy(update={"restarts": tuple(restarts)})
    path = records.save(result, config.project_root() / run.folder / "records" / "training.json")
    tracking.log_files(run, [path], "training")
    return result


def check(settings: config.Settings, prepared: PreparedDataset) -> None:
    """Refuse what the chief refuses too, on a worker; it waits there until this worker has built the strategy."""
    from tasks.train import check as check_training

    check_training(settings, prepared)


def assist(settings: config.Settings, prepared: PreparedDataset) -> None:
    """Train with the chief: the same steps on this worker's part of the data. Nothing is tracked or written."""
    from tasks.train import assist as assist_training

    assist_training(settings, prepared, _stop)


def assist_evaluation(settings: config.Settings, prepared: PreparedDataset) -> None:
    """Evaluate with the chief: the outputs for this worker's part of the data. Nothing is tracked or written."""
    from tasks.evaluate import assist as assist_evaluate

    assist_evaluate(settings, prepared)


REQUESTS: dict[str, Callable[..., Record | None]] = {
    "start": start_run,
    "start_comparison": start_comparison,
    "resume": resume_run,
    "train": train,
    "evaluate": evaluate,
    "evaluate on one device": evaluate,
    "register": register,
    "report_comparison": report_comparison,
    "report_restarts": report_restarts,
    "finish": finish_run,
    "check": check,
    "assist": assist,
    "assist_evaluation": assist_evaluation,
}
RECORDS: dict[str, type[Record]] = {
    "prepared": PreparedDataset,
    "run": Run,
    "training": TrainingResult,
    "evaluation": EvaluationResult,
    "comparison": Comparison,
}


class Answers:
    """What a child process says on standard output: JSON lines. Whatever else is written there goes to standard error,
    because it must not mix with them."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        self._beating = False
        os.dup2(2, 1)

    def write(self, answer: dict[str, Any]) -> None:
        """Say one line."""
        with self._lock:
            self._file.write(json.dumps(answer) + "\n")
            self._file.flush()

    def beat(self) -> None:
        """Give a sign of life every few seconds from now on, if whoever started this process listens for it."""
        seconds = os.environ.get("STRATAGEM_HEARTBEAT_SECONDS")
        if seconds is None or self._beating:
            return
        self._beating = True

        def say() -> None:
            with contextlib.suppress(BrokenPipeError):  # Nobody listens any more; this process ends too.
                while True:
                    self.write({"heartbeat": os.getpid()})
                    time.sleep(float(seconds))

        threading.Thread(target=say, daemon=True).start()


def _read_requests() -> "SimpleQueue[str]":
    """Return the lines of standard input. When it closes, as when the process that started this one dies, this ends."""
    requests: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return requests


def serve(chief: bool) -> None:
    """Answer requests until standard input closes.

    Args:
        chief: whether this process tracks, evaluates and registers, too.
    """
    answers = Answers()
    if chief and (log := os.environ.get("STRATAGEM_LOG")):
        _put_noise_aside(Path(log))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Nothing has begun: Ctrl-C need not wait for the imports.
    requests = _read_requests()
    # Now, while the flow's process is starting Prefect and DVC.
    with timeline.span("stages", "import TensorFlow, Keras, MLflow"):
        _import_quietly("tasks.train", "tasks.evaluate", *(("tasks.report", "tasks.tracking") if chief else ()))
    signals.ignore()
    while True:
        request = json.loads(requests.get())
        answers.write({"id": request["id"], **_answer(request["stage"], request["arguments"], answers.beat)})


def serve_member() -> None:
    """Be a worker or a parameter server until standard input closes."""
    answers = Answers()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # A server waits where no handler of Python's would be called.
    _read_requests()
    _import_quietly("tasks.strategies.parameter_server")
    from tasks.strategies import parameter_server

    answers.beat()
    parameter_server.serve_member()


def _put_noise_aside(log: Path) -> None:
    """Keep standard error for what Python says; descriptor 2, where TensorFlow tells at length about members of the
    cluster that have gone, becomes a log."""
    sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)


@contextlib.contextmanager
def _ending_with_standard_input() -> Iterator[None]:
    """Let the kernel end this process when the one that started it does, within the block; no request comes in it."""
    flags = fcntl.fcntl(0, fcntl.F_GETFL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, flags | os.O_ASYNC)  # SIGIO, which ends a process that does not handle it.
    try:
        yield
    finally:
        fcntl.fcntl(0, fcntl.F_SETFL, flags)


# What tf.distribute raises where another member of the cluster died or hangs.
LOST_PEER = ("AbortedError", "CancelledError", "DeadlineExceededError", "UnavailableError")
# And where a port that was free when it was chosen has been taken since.
LOST_PORT = "Could not start gRPC server"
# How JAX says that a device has no memory left.
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def _answer(stage: str, arguments: dict[str, Any], beat: Callable[[], None]) -> dict[str, Any]:
    try:
        _stop.clear()
        gently = stage in ("train", "assist")
        if gently:
            signals.stop_gently(_stop)
        else:
            signals.stop_at_once()
        try:
            settings = config.parse(arguments.pop("settings"))
            given = {name: RECORDS[name].model_validate(v) if name in RECORDS else v for name, v in arguments.items()}
            if isinstance(settings.strategy, config.Cluster) and stage in {*SHARED, *SHARED.values()}:
                from tasks import strategies

                # TensorFlow holds Python's lock while it waits for the other members: there is no sign of life before,
                # and no thread that could see standard input close.
                with _ending_with_standard_input():
                    strategies.build(settings.strategy)
                beat()
            with timeline.span("stages", stage):
                record = REQUESTS[stage](settings, **given)
            return {"record": None if record is None else record.model_dump(mode="json")}
        finally:
            signals.ignore()
    except KeyboardInterrupt:
        return errors.to_json(errors.Interrupted(f"{stage} was interrupted"))
    except StratagemError as error:
        return {**errors.to_json(error), "told": _stop.is_set()}
    except Exception as error:
        lost = type(error).__name__ in LOST_PEER or LOST_PORT in str(error)
        return {**errors.to_json(_unexpected(stage, error)), "lost_peer": lost}


def _unexpected(stage: str, error: Exception) -> StratagemError:
    """Return the one message for an error that nobody foresaw; its traceback is for --debug."""
    if os.environ.get("STRATAGEM_DEBUG"):
        print(network.without_secrets(traceback.format_exc()), file=sys.stderr)
    if full := files.full_disk(error, f"{config.project_root()}, or the temporary folder,"):
        return full
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "ResourceExhaustedError"
        or OUT_OF_MEMORY in str(error)
    ):
        return StratagemError(
            f"{stage} ran out of memory ({type(error).__name__}): give a smaller train.global_batch_size or "
            "train.per_replica_batch_size, or another strategy; the same command goes on from the latest checkpoint"
        )
    # TensorFlow and Keras put the cause last, after the user code that led there.
    cause = (str(error).strip() or "no message").splitlines()[-1].strip()
    return StratagemError(f"{stage} failed: {type(error).__name__}: {cause} (the whole story: --debug)")


@contextlib.contextmanager
def _without(*packages: str) -> Iterator[None]:
    """Let imports of these packages fail within the block, unless they are there already."""
    left_out = [name for name in packages if name not in sys.modules]
    sys.modules |= dict.fromkeys(left_out)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in left_out:
            del sys.modules[name]


def _import_quietly(*modules: str) -> None:
    """Import what a stage needs, with a framework's start-up lines held back, and set who may log."""
    on_tensorflow = os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow"
    # Keras would import scikit-learn for wrappers that nobody uses here, and with it SciPy's statistics: 0.4 s of the
    # 5.3 s of processor time that a stage process takes to start. TensorFlow would import JAX for a converter: 0.5 s.
    left_out = ("sklearn", "jax") if on_tensorflow else ("sklearn",)
    with quiet_standard_error():
        with _without(*left_out):
            for module in modules:
                importlib.import_module(module)
        if on_tensorflow:
            import tensorflow as tf

            tf.config.list_physical_devices()  # Looks for a GPU, and says so at length when there is none.
    from rich.console import Console
    from rich.highlighter import NullHighlighter
    from rich.logging import RichHandler

    # Lines end at a word where the terminal ends.
    console = Console(stderr=True, highlight=False)
    plain = RichHandler(
        console=console, show_time=False, show_level=False, show_path=False, highlighter=NullHighlighter()
    )
    logging.basicConfig(level=logging.ERROR, format="%(message)s", handlers=[plain], force=True)
    logging.getLogger("tasks").setLevel(logging.INFO)
    logging.getLogger("mlflow").setLevel(logging.ERROR)  # It has a handler of its own.


def data_stage(stage: str, name: str) -> None:
    """Run download or prepare for the dataset that data/<name>/params.yaml describes."""
    root = config.project_root()
    path = root / "data" / name / "params.yaml"
    if not path.is_file():
        raise UserError(
            f"there is no dataset folder data/{name}: `stratagem {stage}` with dataset.name={name} makes it"
        )
    section = yaml.safe_load(path.read_text(encoding="utf-8"))["dataset"]
    overrides = [f"dataset.{key}={json.dumps(value)}" for key, value in section.items()]
    if downloads := os.environ.get("STRATAGEM_DOWNLOADS"):
        overrides.append(f"dataset.downloads={json.dumps(downloads)}")
    dataset = config.load(None, overrides, root).dataset
    if stage == "download":
        from tasks.download import download, refuse_early

        with quiet_standard_error():
            refuse_early(dataset)
        _import_quietly()
        manifest = download(dataset)
        print(f"downloaded {manifest.name} {manifest.version}: {_sizes(manifest.num_examples)}", file=sys.stderr)
        return
    _import_quietly("tasks.prepare")
    from tasks.prepare import prepare

    prepared = prepare(dataset, records.load(records.DatasetManifest, root / "data" / name / "raw" / "manifest.json"))
    sizes = {split: part.num_examples for split, part in prepared.splits.items()}
    print(f"prepared {prepared.name} {prepared.version}: {_sizes(sizes)}", file=sys.stderr)
    if held := prepared.held_out:
        print(
            f"it has no test split: {held.num_examples:,} of its training examples, drawn with seed {held.seed}, are "
            "the test split from now on",
            file=sys.stderr,
        )


def _sizes(splits: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in splits.items())


def model_stage(stage: str, settings: config.Settings) -> None:
    """Run train or evaluate as a stage of the root's dvc.yaml: a run of its own, its tables in metrics/."""
    from tasks import report

    root = config.project_root()
    folder = root / "metrics"
    prepared = dvc_data.load_prepared(settings.dataset.name)
    if stage == "train":
        processes.check_devices(settings)
        training = processes.train_alone(settings, prepared)
        records.save(training, folder / "training.json")
        report.history_table(training, folder / "history.csv")
        return
    training = records.load(TrainingResult, folder / "training.json")
    run = runs.find(training.run_id)
    given = {"prepared": prepared, "training": training, "run": run}
    evaluation = processes.run("evaluate", EvaluationResult, settings, **given)
    records.save(evaluation, folder / "evaluation.json")
    report.metrics_table(evaluation, folder / "test.json")
    report.confusion_table(evaluation, folder / "confusion.csv")
    for picture in ("confusion_matrix.png", "learning_curve.png"):
        shutil.copyfile(root / run.folder / "report" / picture, folder / picture)


STAGES = ("check", "download", "prepare", "train", "evaluate", "reconcile", "serve", "assist", "member")


def main() -> None:
    """Run one stage, and end with its exit code."""
    if sys.argv[1:2] == ["guard"]:
        sys.exit(processes.guard(sys.argv[2:]))
    keep_private()
    parser = argparse.ArgumentParser(prog="python -m tasks", description="Run one stage; `stratagem` runs them all.")
    parser.add_argument("stage", choices=[*STAGES])
    parser.add_argument("name", nargs="?", metavar="NAME|RECIPE")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", dest="overrides")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminate)
    if os.environ.get("STRATAGEM_ERROR"):
        _end_with_parent()
    try:
        if arguments.stage in ("serve", "assist"):
            serve(chief=arguments.stage == "serve")
        elif arguments.stage == "member":
            serve_member()
        elif arguments.stage in ("download", "prepare"):
            if arguments.name is None:
                raise UserError(f"python -m tasks {arguments.stage}: give the name of a folder in data/")
            data_stage(arguments.stage, arguments.name)
        elif arguments.stage == "reconcile":
            from tasks import tracking

            for ended in tracking.end_abandoned():
                print(ended.model_dump_json())
        elif arguments.stage == "check":
            from tasks.download import refuse_early

            dataset = config.load(arguments.name, arguments.overrides).dataset
            with quiet_standard_error():
                refuse_early(dataset)
        else:
            settings = config.load(arguments.name, arguments.overrides)
            model_stage(arguments.stage, settings)
    except KeyboardInterrupt as interrupt:
        sys.exit(getattr(interrupt, "exit_code", 130))
    except Exception as error:
        told = error if isinstance(error, StratagemError) else _unexpected(arguments.stage, error)
        if place := os.environ.get("STRATAGEM_ERROR"):
            Path(place).write_text(json.dumps(errors.to_json(told)), encoding="utf-8")
        else:
            print(f"error: {told}", file=sys.stderr)
        sys.exit(told.exit_code)


def _terminate(number: int, frame: object) -> None:
    raise errors.Terminated


def _end_with_parent() -> None:
    """End this process when the flow's process dies, which holds the other end of standard input."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
