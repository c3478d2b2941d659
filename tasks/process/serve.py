"""The stage process, a worker, or a TensorFlow server: reads requests from standard input, writes answers to standard
output, both as JSON lines. `client` is the other half of the protocol."""

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tasks import config
from tasks.process.cluster import SHARED
from tasks.process.model_loader import Clean
from tasks.records import (
    Comparison,
    EvaluationResult,
    Limits,
    PreparedDataset,
    Record,
    Run,
    Sweep,
    TrainingResult,
    Trial,
)
from tasks.system import clock, errors, files, lifetime, messages, network, upstream
from tasks.system.errors import StratagemError
from tasks.system.imports import import_quietly

# Requests that end after their next training step when the process is told to stop.
GENTLE = ("train", "assist")
RECORDS: dict[str, type[Record]] = {
    "prepared": PreparedDataset,
    "run": Run,
    "training": TrainingResult,
    "evaluation": EvaluationResult,
    "comparison": Comparison,
    "limits": Limits,
    "trial": Trial,
    "sweep": Sweep,
}
# What tf.distribute raises where another member of the cluster died or hangs.
LOST_PEER = ("AbortedError", "CancelledError", "DeadlineExceededError", "UnavailableError")
# The same, where a port that was free when it was chosen has been taken since.
LOST_PORT = "Could not start gRPC server"
# How JAX says that a device has no memory left.
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


class Answers:
    """The JSON lines that a child process writes to standard output; everything else that is printed there goes to
    standard error."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        self._beating = False
        os.dup2(2, 1)

    def write(self, answer: dict[str, Any]) -> None:
        """Write one line."""
        with self._lock:
            self._file.write(json.dumps(answer) + "\n")
            self._file.flush()

    def beat(self) -> None:
        """Send a heartbeat every few seconds from now on, if the process that started this one listens for it."""
        seconds = os.environ.get("STRATAGEM_HEARTBEAT_SECONDS")
        if seconds is None or self._beating:
            return
        self._beating = True

        def beat_on() -> None:
            with contextlib.suppress(BrokenPipeError):  # The other process has ended; this one ends, too.
                while True:
                    self.write({"heartbeat": os.getpid()})
                    time.sleep(float(seconds))

        threading.Thread(target=beat_on, daemon=True).start()


class Stages:
    """Runs stages on request, one after another."""

    def __init__(self, functions: dict[str, Callable[..., Any]], beat: Callable[[], None]) -> None:
        self._functions = functions
        self._beat = beat
        self._stop = threading.Event()
        """Set when this process is told to stop while it trains."""

    def answer(self, stage: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run a stage; return its record, or its error, as JSON values."""
        try:
            try:
                record = self._run(stage, arguments)
                return {"record": record.model_dump(mode="json") if isinstance(record, Record) else None}
            finally:
                lifetime.ignore_signals()
        except KeyboardInterrupt:
            return errors.to_json(errors.Interrupted(f"{stage} was interrupted"))
        except StratagemError as error:
            return {**errors.to_json(error), "told_to_stop": self._stop.is_set()}
        except Exception as error:
            lost = type(error).__name__ in LOST_PEER or LOST_PORT in str(error) or upstream.is_lost_peer(error)
            return {**errors.to_json(unexpected(stage, error)), "lost_peer": lost}

    def _run(self, stage: str, arguments: dict[str, Any]) -> Any:
        self._stop.clear()
        if stage in GENTLE:
            lifetime.set_on_signal(self._stop)
        else:
            lifetime.raise_on_signal()
        settings = config.parse(arguments.pop("settings"))
        given = {name: RECORDS[name].model_validate(v) if name in RECORDS else v for name, v in arguments.items()}
        if stage in GENTLE:
            given["stop"] = self._stop
        if settings.strategy.cluster is not None and stage in {*SHARED, *SHARED.values()}:
            from tasks import strategies

            # TensorFlow holds Python's lock while it waits for the other members: until then no thread can send a
            # heartbeat, or see standard input close.
            with lifetime.ended_by_the_kernel():
                strategies.build(settings.strategy)
            self._beat()
        with clock.span("stages", stage):
            return self._functions[stage](settings, **given)


def serve(chief: bool) -> None:
    """Answer requests until standard input closes.

    Args:
        chief: whether this process also tracks, evaluates and registers.
    """
    answers = Answers()
    if chief and (log := os.environ.get("STRATAGEM_LOG")):
        _put_noise_aside(Path(log))
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Nothing has begun: Ctrl-C need not wait for the imports.
    requests: SimpleQueue[str] = SimpleQueue()
    lifetime.when_input_closes(lambda: os._exit(0), requests.put)
    # Now, while the flow's process is starting Prefect and DVC.
    forked: list[Clean] = []
    with clock.span("stages", "import TensorFlow, Keras, MLflow"):
        if chief:
            import_quietly("tasks.process.tracked", "tasks.train", before_devices=lambda: forked.append(Clean()))
        else:
            import_quietly("tasks.evaluate", "tasks.train")
    lifetime.ignore_signals()
    stages = Stages(_chiefs_stages(forked[0]) if chief else _workers_stages(), answers.beat)
    while True:
        request = json.loads(requests.get())
        answers.write({"id": request["id"], **stages.answer(request["stage"], request["arguments"])})


def _chiefs_stages(clean: Clean) -> dict[str, Callable[..., Any]]:
    from tasks import train
    from tasks.process import tracked
    from tasks.serving import export
    from tasks.tracking.lifecycle import end_run
    from tasks.tracking.models import find_model
    from tasks.training import step_time

    def evaluate(settings: config.Settings, run: Run, **given: Any) -> EvaluationResult:
        if settings.register_.enabled and run.parent_run_id is None:  # A comparison registers nothing.
            clean.get_ready()  # An evaluation leaves one of two cores idle for much of its time.
        return tracked.evaluate(settings, run=run, **given)

    return {
        "check": train.check,
        "measure_pace": step_time.measure_pace,
        "start_run": tracked.start_run,
        "start_comparison": tracked.start_comparison,
        "resume_parent": tracked.resume_parent,
        "start_sweep": tracked.start_sweep,
        "start_trial": tracked.start_trial,
        "resume_trial": tracked.resume_trial,
        "end_trial": tracked.end_trial,
        "report_sweep": tracked.report_sweep,
        "resume_run": tracked.resume_run,
        "train": tracked.train,
        "evaluate": evaluate,
        "evaluate on one device": evaluate,
        "register": functools.partial(tracked.register, load_back=clean.ask),
        "write_report": tracked.write_report,
        "find_model": lambda settings, uri: find_model(uri),
        "export": export.export,
        "report_comparison": tracked.report_comparison,
        "report_restarts": tracked.report_restarts,
        "end_run": lambda settings, **given: end_run(**given),
    }


def _workers_stages() -> dict[str, Callable[..., Any]]:
    """Return what a worker runs together with the chief, on its part of the data; it tracks and writes nothing."""
    from tasks import evaluate, train

    # `check` waits on the chief until this worker has built the strategy.
    return {"check": train.check, "assist": train.assist, "assist_evaluation": evaluate.assist}


def run_tf_server() -> None:
    """Run TensorFlow's server, as a worker or a parameter server, until standard input closes."""
    answers = Answers()
    lifetime.ignore_signals()  # The chief gets the signal, too, and needs this server to finish and save its step.
    lifetime.when_input_closes(lambda: os._exit(0))
    import_quietly("tasks.strategies.parameter_server")
    from tasks.strategies import parameter_server

    answers.beat()
    parameter_server.run_server()


def _put_noise_aside(log: Path) -> None:
    """Keep standard error for Python; descriptors 2 and 1, to which TensorFlow and Gloo write at length about members
    that come and go, lead to a log."""
    sys.stderr = sys.stdout = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def unexpected(stage: str, error: Exception) -> StratagemError:
    """Return one message for an unexpected error; --debug also prints its traceback."""
    if os.environ.get("STRATAGEM_DEBUG"):
        print(network.without_secrets(traceback.format_exc()), file=sys.stderr)
    if full := files.find_full_disk(error, f"{config.project_root()}, or the temporary folder,"):
        return full
    if forbidden := files.find_no_access(error):
        return forbidden
    if (
        isinstance(error, MemoryError)
        or type(error).__name__ == "ResourceExhaustedError"
        or OUT_OF_MEMORY in str(error)
    ):
        return StratagemError(
            f"{stage} ran out of memory ({type(error).__name__}): give a smaller train.global_batch_size or "
            "train.per_replica_batch_size, or another strategy; the same command goes on from the latest checkpoint"
        )
    if (words := messages.translate(error)) is not None:
        return StratagemError(f"{stage} failed: {words}")
    # TensorFlow and Keras put the cause last, after the user code that led there.
    cause = (str(error).strip() or "no message").splitlines()[-1].strip()
    return StratagemError(f"{stage} failed: {type(error).__name__}: {cause} (the whole story: --debug)")
