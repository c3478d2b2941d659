"""The stage process, a worker or a process for one call reads requests from standard input and writes answers to
standard output, both as JSON lines; a TensorFlow server only writes heartbeats. `client` and `child` are the other side
of the protocol."""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from tasks import config
from tasks.process.child import StandardError
from tasks.process.stages import STAGES, Stage
from tasks.system import errors, lifetime, network
from tasks.system.child import Message
from tasks.system.errors import StratagemError
from tasks.system.imports import import_quietly

# The error of tf.distribute if another process has taken a port since it was chosen.
LOST_PORT = "Could not start gRPC server"


class Answers:
    """The JSON lines that a child process writes to standard output; all other output is redirected to standard
    error."""

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
        """Send a heartbeat every few seconds from now on, if the parent process expects it."""
        seconds = os.environ.get("STRATAGEM_HEARTBEAT_SECONDS")
        if seconds is None or self._beating:
            return
        self._beating = True

        def beat_on() -> None:
            with contextlib.suppress(BrokenPipeError):  # The parent process has ended, so this one ends, too.
                while True:
                    self.write({"heartbeat": os.getpid()})
                    time.sleep(float(seconds))

        threading.Thread(target=beat_on, daemon=True).start()


def _answer(row: Stage[..., Any], given: dict[str, Any], chief: bool, answers: Answers) -> Message:
    """Run the function of a row, and return its result or its error as JSON values."""
    stop = threading.Event()  # Set by a signal during a training.
    try:
        try:
            found = _run(row, given, chief, answers, stop)
            return {"record": None if row.output is object else TypeAdapter(row.output).dump_python(found, mode="json")}
        finally:
            lifetime.ignore_signals()
    except KeyboardInterrupt:
        return errors.to_json(errors.Interrupted(f"{row.name} was interrupted"))
    except StratagemError as error:
        _show_traceback()
        return {**errors.to_json(error), "told_to_stop": stop.is_set()}
    except (Exception, SystemExit) as error:  # sys.exit() in the user's own code.
        cause = type(error).__name__
        lost = LOST_PORT in str(error) or errors.is_lost_peer(error)
        return {**errors.to_json(unexpected(row.name, error, given.get("settings"))), "lost_peer": lost, "cause": cause}


def _run(row: Stage[..., Any], given: dict[str, Any], chief: bool, answers: Answers, stop: threading.Event) -> Any:
    def heed_signals(gently: bool) -> None:
        lifetime.set_on_signal(stop) if gently else lifetime.raise_on_signal()

    heed_signals(row.ends_run)
    if "settings" in given:
        given["settings"] = config.parse(given["settings"])
    module, _, name = str(row.function if chief else row.workers).partition(":")
    if row.imports_framework:
        import_quietly(module)
    function = getattr(import_module(module), name)
    types = get_type_hints(function)  # Determine the records to which the JSON values are converted.
    stops_gently = row.ends_run or "stop" in types
    heed_signals(stops_gently)
    arguments = {name: TypeAdapter(types[name]).validate_python(value) for name, value in given.items()}
    arguments |= {name: own for name, own in {"stop": stop, "tell": answers.write}.items() if name in types}
    if row.is_shared and given["settings"].strategy.cluster is not None:
        from tasks import strategies

        # TensorFlow holds Python's global lock while it waits for the other members: meanwhile, no thread can send a
        # heartbeat or notice that standard input closes.
        with lifetime.ended_by_the_kernel():
            strategies.build(given["settings"].strategy)
        heed_signals(stops_gently)  # TensorFlow replaces the handler of SIGTERM when it builds a cluster's strategy.
        answers.beat()
    return function(**arguments)


def serve(entry: str) -> None:
    """Answer requests until standard input closes.

    Args:
        entry: ``serve`` runs every stage; ``assist`` is another worker, which checks, trains and evaluates; ``call``
            answers one request.
    """
    answers = Answers()
    if entry == "serve" and (log := os.environ.get("STRATAGEM_LOG")):
        _put_noise_aside(Path(log))
    requests: SimpleQueue[str] = SimpleQueue()
    lifetime.when_input_closes(lambda: os._exit(0), requests.put)
    if entry != "call":  # Import now, while the flow's process starts Prefect and DVC.
        import_quietly("tasks.tracked" if entry == "serve" else "tasks.evaluate", "tasks.train")
        lifetime.ignore_signals()
    while True:
        request = json.loads(requests.get())
        answer = _answer(STAGES[request["stage"]], request["arguments"], entry != "assist", answers)
        answers.write({"id": request["id"], **answer})
        if entry == "call":
            return


def run_tf_server() -> None:
    """Run TensorFlow's server, as a worker or a parameter server, until standard input closes."""
    answers = Answers()
    lifetime.ignore_signals()  # The chief receives the signal, too, and needs this server to finish and save its step.
    lifetime.when_input_closes(lambda: os._exit(0))
    import_quietly("tasks.strategies.parameter_server")
    from tasks.strategies import parameter_server

    answers.beat()
    parameter_server.run_server()


def _put_noise_aside(log: Path) -> None:
    """Keep standard error for Python, but redirect descriptors 1 and 2 to a log: TensorFlow and Gloo write many lines
    to them about members that start and end."""
    sys.stderr = sys.stdout = StandardError(os.dup(2))
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


def _show_traceback() -> None:
    if os.environ.get("STRATAGEM_DEBUG"):
        print(network.without_secrets(traceback.format_exc()), file=sys.stderr)


def unexpected(stage: str, error: BaseException, settings: config.Settings | None = None) -> StratagemError:
    """Return one message for an unexpected error; --debug also prints its traceback."""
    from tasks.modeling import own_code
    from tasks.system import messages

    _show_traceback()
    if errors.is_out_of_memory(error):
        return StratagemError(
            f"{stage} ran out of memory ({type(error).__name__}): set a smaller train.global_batch_size or "
            "train.per_replica_batch_size, or another strategy; the same command continues from the latest checkpoint"
        )
    if settings is not None and (blamed := own_code.blame(error, settings)) is not None:
        return blamed
    place = f"{config.project_root()}, or the temporary folder,"
    if (explained := messages.explain(error, place, f"{stage} failed: ")) is not None:
        return explained
    return StratagemError(f"{stage} failed: {errors.last_line(error)} (--debug shows the traceback)")
