"""The stage process, a worker, or a TensorFlow server: reads requests from standard input, writes answers to standard
output, both as JSON lines. `client` is the other half of the protocol."""

import contextlib
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
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from tasks import config
from tasks.process.stages import STAGES
from tasks.records import Record
from tasks.system import clock, errors, files, lifetime, messages, network, upstream
from tasks.system.errors import StratagemError
from tasks.system.imports import import_quietly

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

    def __init__(self, chief: bool, beat: Callable[[], None]) -> None:
        self._chief = chief
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
        row = STAGES[stage]
        self._stop.clear()
        if row.stops_gently:
            lifetime.set_on_signal(self._stop)
        else:
            lifetime.raise_on_signal()
        settings = config.parse(arguments.pop("settings"))
        function = row.load(self._chief)
        types = get_type_hints(function)
        given = {name: TypeAdapter(types[name]).validate_python(value) for name, value in arguments.items()}
        if row.stops_gently:
            given["stop"] = self._stop
        if settings.strategy.cluster is not None and row.is_shared:
            from tasks import strategies

            # TensorFlow holds Python's lock while it waits for the other members: until then no thread can send a
            # heartbeat, or see standard input close.
            with lifetime.ended_by_the_kernel():
                strategies.build(settings.strategy)
            self._beat()
        with clock.span("stages", stage):
            return function(settings, **given)


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
    with clock.span("stages", "import TensorFlow, Keras, MLflow"):
        import_quietly("tasks.process.tracked" if chief else "tasks.evaluate", "tasks.train")
    lifetime.ignore_signals()
    stages = Stages(chief, answers.beat)
    while True:
        request = json.loads(requests.get())
        answers.write({"id": request["id"], **stages.answer(request["stage"], request["arguments"])})


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
