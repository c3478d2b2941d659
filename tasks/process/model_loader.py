"""A process that knows nothing of the run: models are loaded back in it, as on the machine that will serve them.

It is forked from the stage process when that has imported its framework, and before it has used a device, a thread of
the framework's or the user's own code. It has neither the project's modules nor its folder. A process started afresh
would import the framework once more, 4 to 5 s of a processor; this one costs nothing until it is asked.
"""

import contextlib
import functools
import json
import os
import select
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tasks.system import lifetime
from tasks.system.errors import StratagemError, cut

LIMIT_SECONDS = 1800.0
"""After so long a process that was asked hangs: a champion that is scored again may take minutes of one CPU."""


class Clean:
    """The process; ``ask`` has it do one thing at a time."""

    def __init__(self) -> None:
        requests, self._to = os.pipe()
        self._from, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _answer_until_closed(requests, answers)
        os.close(requests)
        os.close(answers)
        self._alive = True

    def get_ready(self) -> None:
        """Let the process do now what it needs once, half a second of a processor; return at once."""
        if self._alive:
            with contextlib.suppress(OSError):  # It has died: the next request says so.
                os.write(self._to, json.dumps({"what": None}).encode() + b"\n")

    def ask(self, what: str, features: Mapping[str, Path], rows: list[int] | None = None, **arguments: Any) -> Any:
        """Return what a function of ``_functions`` gives for rows of prepared features, (n, num_outputs).

        Args:
            what: names the function.
            features: the files of the arrays, absolute.
            rows: which rows of these; all if not given.
            arguments: of the function, as JSON values.

        Raises:
            StratagemError: it raised something, or the process died or hangs.
        """
        if not self._alive:
            raise StratagemError("the process that loads models back has died")
        with tempfile.TemporaryDirectory() as folder:
            to = Path(folder) / "outputs.npy"
            paths = {name: str(path) for name, path in features.items()}
            request = {"what": what, "features": paths, "rows": rows, "to": str(to), "arguments": arguments}
            try:
                os.write(self._to, json.dumps(request).encode() + b"\n")
                answer = json.loads(self._line())
            except BaseException as error:  # An answer that comes later must not be taken for the next one.
                self.end()
                if isinstance(error, OSError | ValueError):
                    raise StratagemError("the process that loads models back has died") from None
                raise
            if "error" in answer:
                raise StratagemError(answer["error"])
            return np.load(to)

    def end(self) -> None:
        """End the process, whatever it does."""
        if self._alive:
            self._alive = False
            os.close(self._to)
            os.close(self._from)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)

    def _line(self) -> bytes:
        until, line = time.monotonic() + LIMIT_SECONDS, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise StratagemError(f"the process that loads models back has not answered for {LIMIT_SECONDS:.0f} s")
            part = os.read(self._from, 65536)
            if not part:
                raise ValueError
            line += part
        return line


@functools.cache
def clean() -> Clean:
    """Return the one process of this one; the first call forks it."""
    return Clean()


def functions() -> dict[str, Callable[..., Any]]:
    """Return what the process does, by name: the first argument of each is a mapping of arrays."""
    from tasks.serving import outputs
    from tasks.tracking.models import predict

    return {"load_back": predict, "score": outputs.of_keras_file}


def _slow_imports() -> Callable[[], None]:
    """Return what imports what takes seconds; it is called before the first request, which then need not wait."""
    from tasks.serving import outputs
    from tasks.tracking.models import import_flavor

    def do() -> None:
        import_flavor()
        outputs.start_backend()

    return do


def _answer_until_closed(requests: int, answers: int) -> None:
    """Answer requests until the pipe closes or the process that forked this one dies."""
    try:
        lifetime.end_with_parent()
        lifetime.ignore_signals()
        known, ready = functions(), _slow_imports()
        _keep_only({requests, answers})
        _forget_project()
        with open(requests, encoding="utf-8") as lines:
            for line in lines:
                request = json.loads(line)
                if request["what"] is None:
                    ready()
                else:
                    os.write(answers, json.dumps(_answer(known, request)).encode() + b"\n")
    finally:
        os._exit(0)


def _answer(known: Mapping[str, Callable[..., Any]], request: Mapping[str, Any]) -> dict[str, str]:
    try:
        arrays = {name: np.load(path, mmap_mode="r") for name, path in request["features"].items()}
        if request["rows"] is not None:
            arrays = {name: np.asarray(array[request["rows"]]) for name, array in arrays.items()}
        np.save(request["to"], known[request["what"]](features=arrays, **request["arguments"]))
        return {}
    except Exception as error:
        if os.environ.get("STRATAGEM_DEBUG"):
            return {"error": traceback.format_exc()}
        lines = str(error).strip().splitlines() or ["no message"]
        return {"error": f"{type(error).__name__}: {cut(lines[-1].strip(), 300)}"}


def _keep_only(own: set[int]) -> None:
    """Close all pipes and sockets but this process's own: a process that waits for the end of one must not wait for
    it."""
    silent = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(silent, number)
    for name in os.listdir("/dev/fd"):  # As Linux and macOS have it.
        number = int(name)
        with contextlib.suppress(OSError):
            mode = os.fstat(number).st_mode
            if number not in own and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                os.close(number)


def _forget_project() -> None:
    """Leave the project's folder and modules, its classes in Keras, and accelerators: a server of models has none of
    them."""
    import keras

    root = Path(__file__).resolve().parents[2]
    os.chdir(tempfile.gettempdir())
    os.environ.pop("PYTHONPATH", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_platforms", "cpu")
    sys.path[:] = [path for path in sys.path if path and Path(path).resolve() != root]
    # An installation that leads to a folder of sources.
    sys.meta_path[:] = [one for one in sys.meta_path if not getattr(one, "__module__", "").startswith("__editable__")]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tasks", "flows")]:
        del sys.modules[name]
    keras.saving.get_custom_objects().clear()
