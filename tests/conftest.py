"""A project of its own for each test, and a way to run commands in it."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
# What git would ignore, for a checkout without git.
IGNORED = re.compile(
    r"\.git|\.venv|build|metrics|.*\.egg-info|\.\w+_cache|\.hypothesis|\.dvc/(cache|tmp)|data/\w+/(raw|prepared)|mlruns/(?!\.gitkeep).+"
)
# What a user's shell may hold and a test must not see: where runs are tracked, which cluster, repository, make.
FOREIGN = (
    "GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE", "KERAS_BACKEND", "MAKEFLAGS", "MAKELEVEL", "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI", "PREFECT_API_KEY", "PREFECT_API_URL", "PREFECT_PROFILE", "TFDS_DATA_DIR", "TF_CONFIG",
)  # fmt: skip

Run = Callable[..., "subprocess.CompletedProcess[str]"]

_homes: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    # Before any test module is imported: Prefect reads its home when it is imported, and makes a database there.
    home = tempfile.mkdtemp(prefix="stratagem-tests-")
    _homes.append(home)
    for name in FOREIGN:
        os.environ.pop(name, None)
    os.environ.update(
        PREFECT_HOME=f"{home}/prefect",
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        DVC_SITE_CACHE_DIR=f"{home}/dvc",
        DVC_NO_ANALYTICS="1",
        DO_NOT_TRACK="1",
        # `stratagem`, `python` and `dvc` are those of this environment, activated or not.
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    for home in _homes:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def project_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout's files, tracked or new, without what runs left, as a git repository with one commit."""
    template = tmp_path_factory.mktemp("template") / "project"
    for file in _files_of(CHECKOUT):
        (template / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / file, template / file)
    git = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--no-verify", "-m", "the project"]):
        subprocess.run([*git, *command], cwd=template, check=True)
    return template


@pytest.fixture
def project(project_template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project to work and write in: the current folder, and what child processes import."""
    folder = tmp_path / "project"
    shutil.copytree(project_template, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


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
        timeout_seconds: float = 500,
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
