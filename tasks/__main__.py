"""`python -m tasks STAGE`: what DVC and child processes call. Here tracking is put around the plain stages.

python -m tasks download NAME           the stages of data/<name>/dvc.yaml
python -m tasks prepare NAME
python -m tasks train [RECIPE] [--set section.key=value]...      the stages of the root's dvc.yaml
python -m tasks evaluate [RECIPE] [--set section.key=value]...
python -m tasks serve                   JSON lines on standard input, an answer each on standard output
"""

import argparse
import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import yaml

from tasks import config, errors, lineage, processes, records
from tasks.errors import StratagemError, UserError
from tasks.records import EvaluationResult, PreparedDataset, Record, RegisteredModel, Run, TrainingResult

Status = Literal["FINISHED", "FAILED", "KILLED"]


@contextlib.contextmanager
def quiet_standard_error() -> Iterator[None]:
    """Hold back what is written to descriptor 2, and write it only if the block fails.

    TensorFlow's C++ start-up lines ignore TF_CPP_MIN_LOG_LEVEL.
    """
    import tempfile

    with tempfile.TemporaryFile() as held:
        visible = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(visible, 2)
            held.seek(0)
            sys.stderr.write(held.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(visible, 2)
            os.close(visible)


def start_run(settings: config.Settings, prepared: PreparedDataset, flow_run_id: str | None = None) -> Run:
    """Begin the MLflow run of a pipeline, unless its training would be refused."""
    from tasks import tracking
    from tasks.train import check

    check(settings, prepared)
    return tracking.start(settings, prepared, lineage.trace(settings, prepared.data_version), flow_run_id)


def resume_run(settings: config.Settings, run_id: str) -> Run:
    """Take up a run that was begun before."""
    from tasks import tracking

    return tracking.resume(run_id)


def train(settings: config.Settings, prepared: PreparedDataset, run: Run, resume: bool = False) -> TrainingResult:
    """Train, with metrics and the processor's load going to MLflow meanwhile."""
    from tasks import report, tracking
    from tasks.train import train as train_stage

    with tracking.MetricWriter(run) as writer, tracking.system_metrics(writer, settings):
        result = train_stage(settings, prepared, run, writer.write, resume)
    folder = config.project_root() / run.folder
    records.save(result, folder / "records" / "training.json")
    history = report.history_table(result, folder / "report" / "history.csv")
    tracking.log_files(run, [folder / "records" / "training.json", history], "training")
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
    return result


def evaluate(
    settings: config.Settings, prepared: PreparedDataset, training: TrainingResult, run: Run
) -> EvaluationResult:
    """Evaluate, with metrics, records and the confusion matrix going to MLflow."""
    from tasks import report, tracking
    from tasks.evaluate import evaluate as evaluate_stage

    result = evaluate_stage(settings, prepared, training)
    folder = config.project_root() / run.folder
    records.save(result, folder / "records" / "evaluation.json")
    title = f"{run.name}: test accuracy {result.metrics['test/accuracy']:.4f}"
    picture = report.confusion_matrix(result, title, folder / "report" / "confusion_matrix.png")
    tracking.log_metrics(run, result.metrics)
    tracking.log_files(run, [folder / "records" / "evaluation.json", picture], "evaluation")
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

    result = register_stage(settings, run, prepared, training, evaluation)
    records.save(result, config.project_root() / run.folder / "records" / "registration.json")
    return result


def finish_run(settings: config.Settings, run: Run, status: Status, reason: str | None = None) -> Run:
    """End the MLflow run."""
    from tasks import tracking

    tracking.finish(run, status, reason)
    return run


REQUESTS: dict[str, Callable[..., Record]] = {
    "start": start_run,
    "resume": resume_run,
    "train": train,
    "evaluate": evaluate,
    "register": register,
    "finish": finish_run,
}
RECORDS: dict[str, type[Record]] = {
    "prepared": PreparedDataset,
    "run": Run,
    "training": TrainingResult,
    "evaluation": EvaluationResult,
}


def serve() -> None:
    """Answer requests until standard input closes, which also happens when the process that started this one dies."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # What a library prints must not mix with the answers.
    requests: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Nothing has begun: Ctrl-C need not wait for the imports.
    threading.Thread(target=read, daemon=True).start()
    # Now, while the flow's process is starting Prefect and DVC.
    _import_quietly("tasks.train", "tasks.evaluate", "tasks.report", "tasks.tracking")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Outside of a stage there is nothing to interrupt.
    while True:
        request = json.loads(requests.get())
        answers.write(json.dumps(_answer(request["stage"], request["arguments"])) + "\n")
        answers.flush()


def _answer(stage: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            settings = config.parse(arguments.pop("settings"))
            given = {name: RECORDS[name].model_validate(v) if name in RECORDS else v for name, v in arguments.items()}
            return {"record": REQUESTS[stage](settings, **given).model_dump(mode="json")}
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        return errors.to_json(errors.Interrupted(f"{stage} was interrupted"))
    except StratagemError as error:
        return errors.to_json(error)
    except Exception as error:
        return errors.to_json(_unexpected(stage, error))


def _unexpected(stage: str, error: Exception) -> StratagemError:
    """Return the one message for an error that nobody foresaw; its traceback is for --debug."""
    if os.environ.get("STRATAGEM_DEBUG"):
        traceback.print_exc()
    # TensorFlow and Keras put the cause last, after the user code that led there.
    cause = (str(error).strip() or "no message").splitlines()[-1].strip()
    return StratagemError(f"{stage} failed: {type(error).__name__}: {cause} (the whole story: --debug)")


def _import_quietly(*modules: str) -> None:
    """Import what a stage needs, with TensorFlow's start-up lines held back, and set who may log."""
    with quiet_standard_error():
        for module in modules:
            importlib.import_module(module)
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


def _sizes(splits: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in splits.items())


def model_stage(stage: str, settings: config.Settings) -> None:
    """Run train or evaluate as a stage of the root's dvc.yaml: a run of its own, its tables in metrics/."""
    root = config.project_root()
    folder = root / "metrics"
    prepared = processes.load_prepared(settings.dataset.name)
    _import_quietly(f"tasks.{stage}", "tasks.report", "tasks.tracking")
    from tasks import report

    if stage == "train":
        run = start_run(settings, prepared)
        status: Status = "FAILED"
        try:
            training = train(settings, prepared, run)
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            finish_run(settings, run, status)
        records.save(training, folder / "training.json")
        report.history_table(training, folder / "history.csv")
        return
    training = records.load(TrainingResult, folder / "training.json")
    run = records.load(Run, root / "mlruns" / "runs" / training.run_id / "records" / "run.json")
    evaluation = evaluate(settings, prepared, training, run)
    records.save(evaluation, folder / "evaluation.json")
    report.metrics_table(evaluation, folder / "test.json")
    report.confusion_table(evaluation, folder / "confusion.csv")


def main() -> None:
    """Run one stage, and end with its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tasks", description="Run one stage; `stratagem` runs them all.")
    parser.add_argument("stage", choices=["check", "download", "prepare", "train", "evaluate", "serve"])
    parser.add_argument("name", nargs="?", metavar="NAME|RECIPE")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", dest="overrides")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        if arguments.stage == "serve":
            serve()
        elif arguments.stage in ("download", "prepare"):
            if arguments.name is None:
                raise UserError(f"python -m tasks {arguments.stage}: give the name of a folder in data/")
            if os.environ.get("STRATAGEM_ERROR"):
                _end_with_parent()
            data_stage(arguments.stage, arguments.name)
        elif arguments.stage == "check":
            from tasks.download import refuse_early

            refuse_early(config.load(arguments.name, arguments.overrides).dataset)
        else:
            settings = config.load(arguments.name, arguments.overrides)
            processes.set_stage_environment(settings)
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
