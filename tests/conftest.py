"""A project of its own for each test, and a way to run commands in it."""

import base64
import collections
import contextlib
import gc
import hashlib
import http.client
import http.server
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from flows.operate.prefect_server import guarded_environment
from tasks import config, records
from tasks.runs import lineage
from tasks.runs.resume import refuse_other_training

CHECKOUT = Path(__file__).resolve().parent.parent
# What git would ignore, for a checkout without git.
IGNORED = re.compile(
    r"\.git|\.venv|build|metrics|.*\.egg-info|\.\w+_cache|\.hypothesis|\.dvc/(cache|tmp|site|config\.local)|data/\w+/(raw|prepared|report)|mlruns/(?!\.gitkeep).+"
)
# What a user's shell may hold and a test must not see: where runs are tracked, which cluster, repository, make (which
# hands ARGS on), and with PYTHONUNBUFFERED an answer is there that nobody flushes.
FOREIGN = (
    "ARGS", "GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE", "KERAS_BACKEND", "MAKEFLAGS", "MAKELEVEL",
    "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY",
    "PREFECT_API_URL", "PREFECT_PROFILE", "PREFECT_SERVER_API_AUTH_STRING", "PYTHONDONTWRITEBYTECODE",
    "PYTHONUNBUFFERED", "SLURM_CPUS_PER_TASK", "SLURM_STEP_NUM_TASKS", "TFDS_DATA_DIR", "TF_CONFIG",
)  # fmt: skip

# A file of which all tests are slow.
ALL_SLOW = re.compile(r"^pytestmark = (?:\[[^\]]*)?pytest\.mark\.slow\b", re.MULTILINE)

# What the `train` fixture trains.
SMALL = """
input: {augmentation: {crop_padding: 0}}
model: {name: mlp, options: {units: [16]}}
schedule: {kind: constant, learning_rate: 0.01}
train: {epochs: 2}
"""

# Folders, and the one large file, that only few tests change.
LINKED = (".ci", ".github", "benchmarks", "deploy", "docs", "flows", "requirements.lock", "tasks", "tests")

Run = Callable[..., "subprocess.CompletedProcess[str]"]

_homes: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module is imported: Prefect reads its home when it is imported, and makes a database there.
    sys.dont_write_bytecode = False  # To make all tests anew takes 7 s of each process that runs some of them.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # Its own folders outlive the tests.
    home = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-")  # Short: a socket's path has at most 107 characters.
    os.chmod(home, 0o711)  # Some tests are another user in a folder of theirs.
    _homes.append(home)
    for name in FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(
        TMPDIR=home,  # For what processes that are killed leave, such as TensorFlow's __autograph_generated_file*.py.
        PREFECT_HOME=f"{home}/prefect",
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        DVC_SITE_CACHE_DIR=f"{home}/dvc",
        DVC_NO_ANALYTICS="1",
        DO_NOT_TRACK="1",
        # A server of MLflow starts seven more processes for them, which took 0.35 of a core as long as it was there.
        MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
        TF_CPP_MIN_LOG_LEVEL="2",  # JAX sets it to 1 where it is imported, for the commands that tests start too.
        # `stratagem`, `python` and `dvc` are those of this environment, activated or not.
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file that has nothing but slow tests where these are not asked for: to import it takes a while."""
    if config.option.markexpr == "not slow" and collection_path.suffix == ".py":
        return bool(ALL_SLOW.search(collection_path.read_text(encoding="utf-8"))) or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``exhaustive`` the cases that ``in_ci(*places)`` leaves out, and as ``slow`` all that is exhaustive."""
    places: collections.Counter[str] = collections.Counter()
    for item in items:
        in_ci = item.get_closest_marker("in_ci")
        if in_ci is not None and not item.callspec.marks:
            test = item.nodeid.partition("[")[0]
            if places[test] not in in_ci.args:
                item.add_marker("exhaustive")
            places[test] += 1
        if item.get_closest_marker("exhaustive") is not None:
            item.add_marker("slow")


def pytest_collection_finish(session: pytest.Session) -> None:
    # What the tests imported stays: looking through it again and again was a sixth of the time of their trainings.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_unconfigure(config: pytest.Config) -> None:
    for home in _homes:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def machine_with_cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the operating system say that this process may use so many cores, whatever machine the tests run on."""
    return lambda number: monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(number)))


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a folder that all tests read: ``made_once("digits", make)``.

    ``make(folder)`` fills it, in the first process of the tests that asks for it; the others wait.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def made_once(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = shared / name, shared / f"{name}.done"
        with FileLock(shared / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # Of a process that failed in the middle.
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return made_once


def commit(folder: Path) -> None:
    """Make a git repository of a folder, with one commit of all its files."""
    git = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    commit = ["commit", "--quiet", "--no-verify", "-m", "the project"]
    # One pack in place of 330 files, and no samples of hooks: most tests copy them.
    for command in (["init", "--quiet", "--template="], ["add", "--all"], commit, ["repack", "--quiet", "-ad"]):
        subprocess.run([*git, *command], cwd=folder, check=True)


@pytest.fixture(scope="session")
def project_template(made_once: Callable[..., Path]) -> Path:
    """The checkout's files, tracked or new, without what runs left, as a git repository with one commit."""

    def make(template: Path) -> None:
        for file in _files_of(CHECKOUT):
            (template / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / file, template / file)
        commit(template)
        # Once, and not by each process that is the first in a copy.
        subprocess.run([sys.executable, "-m", "compileall", "-q", "flows", "tasks"], cwd=template, check=True)
        with contextlib.chdir(template):
            lineage.code_of(config.load())  # It keeps what each file means in mlruns/code.json: 0.5 s of a processor.
        (template / "mlruns" / "code.json").chmod(0o600)  # As a command leaves it.

    return made_once("template", make)


@pytest.fixture(scope="session")
def linked_template(made_once: Callable[..., Path], project_template: Path) -> Iterator[Path]:
    """The same in 90 files and folders, not 950: what holds code, documents and tests is a link to the template's."""

    def make(folder: Path) -> None:
        for path in project_template.iterdir():
            if path.name in LINKED:
                (folder / path.name).symlink_to(path)
            elif path.name != ".git":
                subprocess.run(["cp", "-a", path, folder], check=True)
        commit(folder)

    def state() -> dict[Path, tuple[int, int]]:
        # Git touches a pack when it is given an object that the pack has.
        others = {"__pycache__", ".git"}
        found = (path for path in project_template.rglob("*") if others.isdisjoint(path.parts) and path.is_file())
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in found}

    folder = made_once("linked", make)
    before = state()
    yield folder
    assert state() == before, "a test without own_code has changed the code that is that of others, too"


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project to work and write in: the current folder, and what child processes import.

    Its code and documents are not to be changed, unless the test is a slow one or has ``own_code``: 1,200 copies of
    all files were 14 GB, and to remove them took 100 s of the next run of the tests.
    """
    whole = request.node.get_closest_marker("slow") is not None
    template = request.getfixturevalue("project_template" if whole else "linked_template")
    folder = tmp_path / "project"
    # Python's own copytree takes half as long again, and a third of the tests have a copy.
    subprocess.run(["cp", "-a", template, folder], check=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
def own_code(project: Path, project_template: Path) -> None:
    """All files of the project are its own, and in its repository: a test may change the code."""
    for link in (path for path in project.iterdir() if path.is_symlink()):
        link.unlink()
        subprocess.run(["cp", "-a", project_template / link.name, project], check=True)
    shutil.rmtree(project / ".git")
    subprocess.run(["cp", "-a", project_template / ".git", project], check=True)


@pytest.fixture
def run() -> Run:
    """Run a command to its end in the current folder, and return its exit code and both outputs as text.

    ``run(["stratagem", "run", "--json"])`` inherits the environment; ``env={...}`` adds to it. The time limit is there
    for a command that hangs: then all that it started is ended, and the test fails with what it printed.
    """

    def run(
        args: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        timeout_seconds: float = 1200,
    ) -> "subprocess.CompletedProcess[str]":
        # A session, so a process group, of its own: what hangs can be ended without touching anything else.
        process = subprocess.Popen(
            [str(arg) for arg in args],
            cwd=cwd,
            env=os.environ | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout_seconds)
        except BaseException as stopped:  # Ctrl-C and pytest's own time limit, too, must leave nothing running.
            # The group lives as long as any member, even when the command itself has ended.
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            if isinstance(stopped, subprocess.TimeoutExpired):
                pytest.fail(f"{process.args} did not end within {timeout_seconds} s\n{out}\n{err}")
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


@pytest.fixture
def mount_small() -> Iterator[Callable[[Path, str], None]]:
    """``mount_small(folder, "size=64k")``: a file system with so little room lies there until the test ends."""
    mounted = []

    def mount_small(folder: Path, option: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(folder)]
        mounting = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounting.returncode:
            pytest.skip(f"a file system cannot be mounted here: {mounting.stderr.strip()}")
        mounted.append(folder)

    yield mount_small
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="session")
def archives() -> Path:
    """Real MNIST and Fashion-MNIST archives, for machines that have them: FOLDER/<dataset>/<last part of the URL>."""
    folder = Path(os.environ.get("STRATAGEM_TEST_DOWNLOADS", CHECKOUT.parent / "shared" / "tfds_downloads"))
    if not (folder / "mnist").is_dir():
        pytest.skip("no real archives: set STRATAGEM_TEST_DOWNLOADS to a folder of them")
    return folder.absolute()


@pytest.fixture(scope="session")
def digits_folder(made_once: Callable[..., Path]) -> Path:
    """data/digits with raw and prepared, as the real stages leave it."""

    def make(root: Path) -> None:
        from tasks.download import download
        from tasks.prepare import prepare

        (root / "params.yaml").touch()
        (root / ".dvc").mkdir()
        with contextlib.chdir(root):
            assert config.project_root() == root
            dataset = config.Dataset(name="digits", builder=None, version=None, image_size=None, downloads=None)
            download(dataset)
            prepare(config.Tfds(name="digits"))

    return made_once("digits", make) / "data" / "digits"


@pytest.fixture(scope="session")
def empty_store(made_once: Callable[..., Path]) -> Path:
    """A new MLflow store: to make one takes 2 s of a processor."""

    def make(folder: Path) -> None:
        from tasks.tracking.store import make_store

        make_store(folder / "mlflow.db")
        (folder / "mlflow.db").chmod(0o600)  # As a command leaves it.

    return made_once("store", make) / "mlflow.db"


@pytest.fixture(scope="session")
def prefect_database(made_once: Callable[..., Path]) -> Path:
    """The new database of a Prefect server: to make one takes 4 s of a processor."""

    def make(folder: Path) -> None:
        environment = os.environ | {"PREFECT_HOME": str(folder)}
        command = ["prefect", "server", "database", "upgrade", "--yes"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return made_once("prefect", make) / "prefect.db"


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[dict[str, str]]:
    """What commands need to use one Prefect server. One of its own takes a run 4.4 s of a processor."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        key = "stratagem:of-these-tests"
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.operate.server", str(listening.fileno())],
            cwd=CHECKOUT,
            env=os.environ | guarded_environment(key, address),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[listening.fileno()],
        )
    with process:  # It ends when its standard input closes.
        assert [process.stdout.readline() for _ in range(2)] == ["serving\n", "ready\n"]
        yield {"PREFECT_API_URL": f"{address}/api", "PREFECT_API_AUTH_STRING": key}


@pytest.fixture(scope="module")
def one_prefect_server(prefect_server: dict[str, str]) -> Iterator[None]:
    """The runs of a module use the same Prefect server, like those of a user who has started one."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in prefect_server.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def prefect_home(prefect_database: Path, tmp_path: Path) -> Path:
    """A Prefect home of the test's own."""
    home = tmp_path / "prefect_home"
    home.mkdir()
    shutil.copy(prefect_database, home)
    return home


@pytest.fixture
def digits(project: Path, digits_folder: Path) -> records.PreparedDataset:
    """The real digits, downloaded and prepared in the project."""
    shutil.copytree(digits_folder, project / "data" / "digits", dirs_exist_ok=True)
    return records.load(records.PreparedDataset, project / "data" / "digits" / "prepared" / "manifest.json")


@pytest.fixture
def make_dataset(project: Path) -> Callable[..., records.PreparedDataset]:
    """Write arrays into the project as `prepare` does: ``make_dataset("tiny", train=(images, labels), test=...)``."""

    def make_dataset(
        name: str, num_classes: int = 10, **splits: tuple[np.ndarray, np.ndarray]
    ) -> records.PreparedDataset:
        folder = project / "data" / name / "prepared"
        folder.mkdir(parents=True, exist_ok=True)
        parts = {}
        for split, arrays in splits.items():
            paths = []
            for kind, array in zip(("images", "labels"), arrays, strict=True):
                path = folder / f"{split}_{kind}.npy"
                np.save(path, array)
                paths.append(path.relative_to(project).as_posix())
            images, labels = arrays
            parts[split] = records.PreparedSplit(
                num_examples=len(labels),
                features={"image": paths[0]},
                labels=paths[1],
                sha256={path: hashlib.sha256((project / path).read_bytes()).hexdigest() for path in paths},
                class_counts=tuple(np.bincount(labels, minlength=num_classes).tolist()),
            )
        images = splits["train"][0]
        pixels = {"mean": tuple(images.mean((0, 1, 2)).tolist()), "deviation": tuple(images.std((0, 1, 2)).tolist())}
        prepared = records.PreparedDataset(
            name=name,
            kind="tfds",
            version="1.0.0",
            tfds_version="4.9.10",
            folder=f"data/{name}/prepared",
            raw_folder=f"data/{name}/raw",
            features={"image": records.Feature(kind="image", shape=images.shape[1:], dtype="uint8", **pixels)},
            target=records.Target(
                task="classification",
                num_outputs=num_classes,
                class_names=tuple(f"class {i}" for i in range(num_classes)),
            ),
            splits=parts,
            sources=(),
            licence=None,
        )
        records.save(prepared, folder / "manifest.json")
        return prepared

    return make_dataset


@pytest.fixture
def tiny(make_dataset: Callable[..., records.PreparedDataset]) -> records.PreparedDataset:
    """The first few digits: 200 to train on, 53 to test on."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
    return make_dataset(
        "tiny", train=(images[:200], digits.target[:200]), test=(images[200:253], digits.target[200:253])
    )


@pytest.fixture
def train(project: Path) -> Iterator[Callable[..., records.TrainingResult]]:
    """Train in the project as the stage does, without tracking: ``train(prepared, "train.epochs=3", run_id="first")``.

    The settings are SMALL over params.yaml, then the overrides.
    """
    from tensorflow.python.framework import config as tf_config

    from tasks.modeling import models
    from tasks.train import train as train_stage

    small = project.with_name("small.yaml")
    small.write_text(SMALL, encoding="utf-8")
    first_settings: dict[str, dict[str, Any]] = {}

    def train(
        prepared: records.PreparedDataset,
        *overrides: str,
        run_id: str = "first",
        resume: bool = False,
        send: Callable[..., None] = lambda step, metrics: None,
        stop: threading.Event | None = None,
    ) -> records.TrainingResult:
        settings = config.load(str(small), overrides)
        started = first_settings.setdefault(run_id, settings.to_json())
        origin = records.Lineage(
            git_commit=None, git_dirty=None, code_digest="", settings_digest=settings.digest(), data_version=None
        )
        run = records.Run(
            run_id=run_id,
            experiment="tests",
            name="tests",
            folder=f"mlruns/runs/{run_id}",
            lineage=origin,
            settings=started,
        )
        if resume:
            refuse_other_training(settings, run, prepared=prepared)
        return train_stage(settings, prepared, run, send, stop or threading.Event())

    # What a training sets for its whole process.
    yield train
    models.set_precision("float32")
    tf_config.disable_op_determinism()


class Proxy:
    """An HTTP server on 127.0.0.1 in front of another one: it may want a password, lose replies, and give its own."""

    def __init__(self, upstream: int, password: str | None = None) -> None:
        self.lose: list[str] = []
        """The ends of paths: the reply of the next request to each is lost, after the server has done it."""
        self.own: dict[str, tuple[float, bytes]] = {}
        """For paths with these parts: how many seconds it waits, and what it answers instead of the server."""
        self.status = 200
        """The status of these answers, but for a server's health."""
        self.asked: list[str] = []
        """The paths of the requests that it answered so."""
        self.password = password
        self._upstream = upstream
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.forward(self)

            do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def forward(self, asked: http.server.BaseHTTPRequestHandler) -> None:
        wanted = self.password and f"Basic {base64.b64encode(self.password.encode()).decode()}"
        if wanted and asked.headers.get("Authorization") != wanted:
            asked.send_response(401)
            asked.end_headers()
            return
        body = asked.rfile.read(int(asked.headers.get("Content-Length", 0)))
        if (part := next((part for part in self.own if part in asked.path), None)) is not None:
            self.asked.append(asked.path)
            seconds, content = self.own[part]
            time.sleep(seconds)
            with contextlib.suppress(OSError):  # The client no longer waits.
                asked.send_response(200 if asked.path.endswith("/health") else self.status)
                asked.send_header("Content-Length", str(len(content)))
                asked.end_headers()
                asked.wfile.write(content)
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=60)
        upstream.request(asked.command, asked.path, body, dict(asked.headers))
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        if lost := next((end for end in self.lose if asked.path.partition("?")[0].endswith(end)), None):
            self.lose.remove(lost)
            return
        asked.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("connection", "content-length", "transfer-encoding", "server", "date"):
                asked.send_header(name, value)
        asked.send_header("Content-Length", str(len(content)))
        asked.end_headers()
        asked.wfile.write(content)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def proxy() -> Iterator[Callable[..., Proxy]]:
    """Stand in front of a server: ``proxy(port, password="me:secret").port``."""
    made: list[Proxy] = []

    def proxy(upstream: int, password: str | None = None) -> Proxy:
        made.append(Proxy(upstream, password))
        return made[-1]

    yield proxy
    for one in made:
        one.close()


def _files_of(checkout: Path) -> Iterator[Path]:
    """Yield the checkout's files relative to it, whether it is a git repository or an unpacked archive."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    files = [Path(name) for name in listing.stdout.split("\0") if name]
    # An archive that was unpacked inside another repository, which ignores it, lists nothing.
    if listing.returncode or Path("params.yaml") not in files:
        files = list(_walk(checkout, checkout))
    yield from (file for file in files if (checkout / file).is_file())


def _walk(folder: Path, checkout: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        relative = path.relative_to(checkout)
        if path.name == "__pycache__" or IGNORED.fullmatch(str(relative)):
            continue
        if path.is_dir():
            yield from _walk(path, checkout)
        else:
            yield relative
