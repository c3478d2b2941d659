"""Ctrl-C in the middle of something, and models of the user's own."""

import contextlib
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

from tasks import config

# The same examples everywhere, so that a change of the code alone makes a test red.
hypothesis.settings.register_profile(
    "same",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("same")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stop the clock that durations are measured by, at 0; only ``clock(seconds)`` moves it on."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


@pytest.fixture
def interrupted_when() -> Callable[..., contextlib.AbstractContextManager[None]]:
    """Send Ctrl-C to this process when a condition holds: ``with interrupted_when(lambda: path.exists()): ...``; or
    another exception as that comes of a signal."""

    @contextlib.contextmanager
    def interrupted_when(
        condition: Callable[[], object], error: type[BaseException] = KeyboardInterrupt
    ) -> Iterator[None]:
        def end(number: int, frame: object) -> None:
            raise error

        def interrupt() -> None:
            end = time.monotonic() + 300
            while not condition() and time.monotonic() < end:
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, end)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            yield
        finally:
            thread.join()
            signal.signal(signal.SIGINT, before)

    return interrupted_when


@pytest.fixture
def at_step() -> Callable[[int, Callable[[Any], object]], contextlib.AbstractContextManager[None]]:
    """``with at_step(7, act): train(...)`` calls ``act(model)`` once, when a training has done seven steps or more and
    before its callback saves a checkpoint of them."""
    from tasks.training.callbacks.saving import SaveCheckpoints

    @contextlib.contextmanager
    def at_step(step: int, act: Callable[[Any], object]) -> Iterator[None]:
        done = []

        class ActsAtStep(SaveCheckpoints):
            def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
                if self.position.step >= step and not done:
                    done.append(self.position.step)
                    act(self.model)
                super().on_train_batch_end(batch, logs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tasks.train.SaveCheckpoints", ActsAtStep)
            yield
        assert done, f"the training ended before step {step}"

    return at_step


@pytest.fixture
def no_file_larger_than() -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """``with no_file_larger_than(1000)``: so much of a larger one is written, and then the system refuses the rest."""

    @contextlib.contextmanager
    def no_file_larger_than(num_bytes: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return no_file_larger_than


@pytest.fixture
def code_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """``code_in(folder)``: flows/, tasks/ and requirements.lock lie there, as those of an installed package do."""
    return lambda folder: monkeypatch.setattr(config, "code_root", lambda: folder)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str | None], None]:
    """``gpus(4, "0,2")``: NVIDIA's driver tells of so many GPUs, and the user's shell shows these of them, or all."""
    import pynvml

    def gpus(count: int, shown: str | None) -> None:
        driver = {
            "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: count,
            "nvmlDeviceGetHandleByIndex": lambda place: place, "nvmlDeviceGetName": lambda place: "GPU",
        }  # fmt: skip
        monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=pynvml.NVMLError, **driver))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if shown is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)

    return gpus


@pytest.fixture
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster does not depend on this machine's GPUs, nor on what the user has set."""
    for name in ("TF_CONFIG", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, current."""
    folder = tmp_path / "project"
    (folder / ".dvc").mkdir(parents=True)
    (folder / "params.yaml").touch()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def source(project: Path) -> Path:
    """An empty folder outside of the project, which is current."""
    folder = project.with_name("source")
    folder.mkdir()
    return folder


@pytest.fixture
def store(project: Path, empty_store: Path) -> Path:
    (project / "mlruns").mkdir(exist_ok=True)
    return Path(shutil.copy(empty_store, project / "mlruns"))


@pytest.fixture
def settings(project: Path) -> config.Settings:
    """Those of params.yaml."""
    return config.load()


@pytest.fixture
def own_imports() -> Iterator[None]:
    """Where Python looks for modules is as before afterwards, though the user's own code is imported."""
    before = sys.path[:]
    yield
    sys.path[:] = before


@pytest.fixture
def own(project: Path, own_imports: None) -> Iterator[Callable[[str], str]]:
    """``own(code)`` makes a model of the user's own, and returns its name; this process is as before afterwards."""

    def own(code: str) -> str:
        (project / "mine.py").write_text(code)
        return "model.name=mine:build"

    yield own
    sys.modules.pop("mine", None)
