"""Child processes: their environment, complete before a framework is imported, their start, their answers, their end.

A stage process (`python -m tasks serve`) imports TensorFlow once and then serves train, evaluate and register. It is
started as early as possible, so that its imports overlap with Prefect's and DVC's start. Requests and answers are
JSON lines.
"""

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import yaml
from filelock import FileLock, Timeout

from tasks import config, errors, lineage, records
from tasks.errors import Interrupted, StratagemError, UserError
from tasks.records import EvaluationResult, PreparedDataset, Record, Run, RunSummary, TrainingResult

R = TypeVar("R", bound=Record)

# A stage that is interrupted ends at its next training step; a step that hangs is not waited for.
GRACE_SECONDS = 15.0
DVC_BUSY_SECONDS = 600.0

_stage_process: "StageProcess | None" = None


def set_flow_environment(debug: bool) -> None:
    """Set what Prefect reads when it is imported. What the user has set stays.

    Without ``debug`` Prefect logs nothing to the terminal: a failed run ends with its one message, not with tracebacks.
    """
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")  # Without a network it only prints errors.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "INFO" if debug else "CRITICAL")
    if debug:
        os.environ["STRATAGEM_DEBUG"] = "1"


class FlowServer:
    """The Prefect API of this process's run, for a user who has none: one running `python -m flows.server`.

    It ends when its standard input closes, so it cannot outlive this process.
    """

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # Its last line is the reason when it fails.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flows.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("STRATAGEM_DEBUG") else self._log,
            cwd=config.project_root(),
            # What only a server needs that other programs talk to. Each is one more writer to one SQLite file.
            env={
                **os.environ,
                "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",
                "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "false",
                "PREFECT_SERVER_UI_ENABLED": "false",
            },
            text=True,
            process_group=0,  # Ctrl-C must not reach it: the run reports its end to it.
        )

    def await_ready(self) -> None:
        """Wait until the server answers.

        Raises:
            StratagemError: it ended instead.
        """
        self.read()

    def read(self) -> str:
        """Return the next line that the server says: where it serves, then that it is ready.

        Raises:
            StratagemError: it ended instead.
        """
        said = self._process.stdout.readline().strip() if self._process.stdout is not None else ""
        if not said:
            _close(self._process)
            self._log.seek(0)
            last = (self._log.read().decode(errors="replace").strip() or "it said nothing").splitlines()[-1]
            raise StratagemError(f"Prefect's server for this run did not start: {last} (the whole story: --debug)")
        return said

    def close(self) -> None:
        """End the server and wait for it."""
        _close(self._process)
        self._log.close()


def start_flow_server() -> FlowServer | None:
    """Start this run's own Prefect API, before Prefect is imported here; None when Prefect's settings name a server."""
    if os.environ.get("PREFECT_API_URL"):
        return None
    server = FlowServer()
    # Not sooner: Prefect sends its last events while Python ends, and would try for half a minute.
    atexit.register(server.close)
    said = server.read()
    if said == "configured":
        server.close()
        return None
    os.environ["PREFECT_API_URL"] = said.removeprefix("serving ")
    return server


def stage_environment(settings: config.Settings | None) -> dict[str, str]:
    """Return the environment of a process that runs stages with these settings."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "JAX_PLATFORMS": "cpu",  # Orbax imports JAX, which would take the GPU's memory from TensorFlow.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_LOGGING_LEVEL": os.environ.get("MLFLOW_LOGGING_LEVEL", "WARNING"),
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "DO_NOT_TRACK": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    # Set only after the stage process was started, and no stage's business.
    environment.pop("PREFECT_API_URL", None)
    if settings is not None and settings.strategy.kind == "one_device" and settings.strategy.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def set_stage_environment(settings: config.Settings) -> None:
    """Make this process one that runs stages; before a framework is imported."""
    os.environ.update(stage_environment(settings))


def kind_of_process(settings: config.Settings) -> str:
    """Return what is decided once in a process: environment, devices, and whether kernels are deterministic."""
    return json.dumps([stage_environment(settings), settings.strategy.model_dump(), settings.train.deterministic])


class StageProcess:
    """One running `python -m tasks serve`. It ends when its standard input closes, so it cannot outlive this
    process."""

    def __init__(self, settings: config.Settings) -> None:
        self.kind = kind_of_process(settings)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tasks", "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=config.project_root(),
            env=stage_environment(settings),
            text=True,
            process_group=0,  # Ctrl-C reaches this process alone, which passes it on once.
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, stage: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Run a stage in the process and return its record as JSON values.

        Raises:
            UserError: the stage refused its input.
            StratagemError: the stage failed, or the process died.
            Interrupted: Ctrl-C or SIGTERM came; the stage was stopped.
        """
        try:
            answer = self._exchange(json.dumps({"stage": stage, "arguments": arguments}))
        except KeyboardInterrupt as interrupt:
            self._interrupt()
            raise Interrupted(f"{stage} was interrupted", getattr(interrupt, "exit_code", 130)) from None
        except BaseException:  # Prefect cancels a worker's run by an exception of its own.
            self._interrupt()
            raise
        if not answer:
            code = self._process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise StratagemError(f"the process that ran {stage} died ({how})")
        reply = json.loads(answer)
        if "error" in reply:
            raise errors.from_json(reply)
        record: dict[str, Any] | None = reply["record"]
        return record

    def close(self) -> None:
        """End the process and wait for it."""
        _close(self._process)

    def _exchange(self, request: str) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            return ""
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self._process.stdout.readline()

    def _interrupt(self) -> None:
        """Stop the running stage; the process goes on serving, so that the run can be ended properly."""
        ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # A second Ctrl-C would leave the answer unread.
        self._process.send_signal(signal.SIGINT)
        guard = signal.signal(signal.SIGALRM, lambda *_: self._process.kill())
        signal.alarm(int(GRACE_SECONDS))
        try:
            if self._process.stdout is not None:
                self._process.stdout.readline()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, guard)
            signal.signal(signal.SIGINT, ignored)


def _close(process: "subprocess.Popen[str]") -> None:
    """End a process that ends when its standard input closes."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # A request that a dead process did not take.
            process.stdin.close()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def start(settings: config.Settings) -> StageProcess:
    """Return the stage process for these settings; the one that runs already, if it is of the same kind."""
    global _stage_process
    if _stage_process is not None and not (_stage_process.alive and _stage_process.kind == kind_of_process(settings)):
        _stage_process.close()
        _stage_process = None
    if _stage_process is None:
        _stage_process = StageProcess(settings)
    return _stage_process


def stop() -> None:
    """End the stage process, if there is one."""
    global _stage_process
    if _stage_process is not None:
        _stage_process.close()
        _stage_process = None


atexit.register(stop)


def run(stage: str, returns: type[R], settings: config.Settings, **arguments: Any) -> R:
    """Run a stage in the stage process.

    Args:
        stage: ``start``, ``resume``, ``train``, ``evaluate``, ``register`` or ``finish``.
        returns: the class of the record that the stage returns.
        settings: decide the process's environment, and are the stage's first argument.
        **arguments: records and plain values.
    """
    values = {name: v.model_dump(mode="json") if isinstance(v, Record) else v for name, v in arguments.items()}
    answer = start(settings).call(stage, {"settings": settings.to_json(), **values})
    return returns.model_validate(answer)


def prepare_data(settings: config.Settings, stage: str = "prepare", force: bool = False) -> PreparedDataset | None:
    """Bring a dataset up to date through DVC and return its record; None after ``stage`` download.

    A dataset that has no folder in data/ yet gets one; it is taken away again when nothing could be prepared.

    Raises:
        UserError: what the stage refused, or settings that contradict data/<name>/params.yaml.
    """
    root = config.project_root()
    name = settings.dataset.name
    added = _add_dataset(settings.dataset, root)
    try:
        _reproduce(f"data/{name}/dvc.yaml:{stage}", settings.dataset.downloads, root, force)
    except BaseException:
        # What was fetched stays for the next try; a folder that holds nothing but our own three files goes.
        if added and not (root / "data" / name / "raw").exists():
            shutil.rmtree(root / "data" / name)
        raise
    if added:
        print(f"added data/{name}: put it under version control with `git add data/{name}`", file=sys.stderr)
    if stage != "prepare":
        return None
    return load_prepared(name)


def load_prepared(name: str) -> PreparedDataset:
    """Return the record of a dataset that is prepared, with its data version.

    Raises:
        UserError: it is not prepared.
    """
    path = config.project_root() / "data" / name / "prepared" / "manifest.json"
    if not path.exists():
        raise UserError(f"dataset {name} is not prepared: `stratagem prepare --set dataset.name={name}`")
    return records.load(PreparedDataset, path).model_copy(update={"data_version": lineage.data_version(name)})


def check_source(dataset: config.Dataset) -> None:
    """Refuse a dataset that is not here and cannot be fetched, before anything else is started for a run.

    Raises:
        UserError: no such dataset, or no network.
    """
    root = config.project_root()
    if dataset.name in config.names_of("datasets") or (root / "data" / dataset.name / "raw" / "manifest.json").exists():
        return
    values = dataset.model_dump(mode="json", exclude={"image_size"})
    settings = [part for key, value in values.items() for part in ("--set", f"dataset.{key}={json.dumps(value)}")]
    with tempfile.TemporaryDirectory() as scratch:
        problem = Path(scratch) / "error"
        environment = {**stage_environment(None), "STRATAGEM_ERROR": str(problem)}
        command = [sys.executable, "-m", "tasks", "check", *settings]
        subprocess.run(command, check=False, cwd=root, env=environment, stdout=sys.stderr, stdin=subprocess.DEVNULL)
        if problem.exists():
            raise errors.from_json(json.loads(problem.read_text(encoding="utf-8")))


def newest_run(dataset: str) -> str:
    """Return the id of the run on a dataset that began last.

    Raises:
        UserError: there is none.
    """
    root = config.project_root()
    begun = sorted(root.glob("mlruns/runs/*/records/run.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in begun:
        if records.load(Run, path).settings["dataset"]["name"] == dataset:
            return path.parent.parent.name
    raise UserError(f"no run on {dataset} has begun in mlruns/: train one first, or name a run with --run")


def load_training(
    settings: config.Settings, run_id: str | None
) -> tuple[config.Settings, PreparedDataset, Run, TrainingResult]:
    """Return the settings, the data and the records of a run that was trained, for a stage that comes after.

    The settings are those that the run was started with, with ``evaluate`` and ``register`` as they are now.

    Args:
        settings: name the dataset when ``run_id`` is None.
        run_id: the run; None is the newest on that dataset.

    Raises:
        UserError: no such run, or it was not trained to its end.
    """
    root = config.project_root()
    folder = root / "mlruns" / "runs" / (run_id or newest_run(settings.dataset.name))
    if not folder.is_dir():
        known = [path.name for path in folder.parent.glob("*")]
        raise UserError(errors.one_of("run", folder.name, known, f"the runs are the folders of {folder.parent}"))
    run = records.load(Run, folder / "records" / "run.json")
    if not (folder / "records" / "training.json").exists():
        raise UserError(
            f"run {run.run_id} was not trained to its end: go on with `stratagem train --resume --run {run.run_id}`"
        )
    now = settings.to_json()
    trained = config.parse({**run.settings, "evaluate": now["evaluate"], "register": now["register"]})
    return (
        trained,
        load_prepared(trained.dataset.name),
        run,
        records.load(TrainingResult, folder / "records" / "training.json"),
    )


def load_evaluation(run: Run) -> EvaluationResult:
    """Return the evaluation of a run.

    Raises:
        UserError: it was not evaluated.
    """
    if not (config.project_root() / run.folder / "records" / "evaluation.json").exists():
        raise UserError(f"run {run.run_id} was not evaluated: `stratagem evaluate --run {run.run_id}`")
    return records.load(EvaluationResult, config.project_root() / run.folder / "records" / "evaluation.json")


def check_writable() -> None:
    """Refuse a project folder that a run could not write to, before anything starts.

    Raises:
        UserError: names the folder.
    """
    root = config.project_root()
    for folder in (root / "data", root / "mlruns", root / ".dvc"):
        try:
            folder.mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written ({error.strerror}): make the project's folder writable"
            ) from None


def finished_runs() -> list[str]:
    """Return the ids of the runs that have finished."""
    return [path.parent.name for path in config.project_root().glob("mlruns/runs/*/summary.json")]


def unchanged(settings: config.Settings, prepared: PreparedDataset) -> RunSummary | None:
    """Return the newest finished run on this data with these settings and this code, or None."""
    return lineage.finished_run(prepared.name, lineage.trace(settings, prepared.data_version))


def _add_dataset(dataset: config.Dataset, root: Path) -> bool:
    """Make data/<name> if it is not there; return whether it was made."""
    folder, template = root / "data" / dataset.name, root / "data" / "digits"
    size = list(dataset.image_size) if dataset.image_size else None
    described = {"name": dataset.name, "version": dataset.version, "image_size": size}
    path = folder / "params.yaml"
    if path.exists():
        present = yaml.safe_load(path.read_text(encoding="utf-8"))["dataset"]
        for key, wanted in described.items():
            if wanted is not None and present.get(key) != wanted:
                raise UserError(
                    f"dataset.{key} = {wanted}: data/{dataset.name}/params.yaml says {present.get(key)}. "
                    f"Change it there, or leave dataset.{key} null"
                )
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("dvc.yaml", ".gitignore"):
            shutil.copyfile(template / file, folder / file)
        header = "# What this dataset is.\n"
        path.write_text(header + yaml.safe_dump({"dataset": described}, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"data/{dataset.name} cannot be made ({error}): make data/ a folder that you can write to"
        ) from None
    return True


def _reproduce(target: str, downloads: Path | None, root: Path, force: bool) -> None:
    """Run `dvc repro TARGET`; a stage's own message comes through as the error."""
    state = root / ".dvc" / "tmp"
    try:
        state.mkdir(parents=True, exist_ok=True)
        if lineage.git_state(root) == (None, None):
            local = root / ".dvc" / "config.local"
            if not local.exists():
                local.write_text("[core]\n    no_scm = true\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{state} cannot be written ({error}): make the project's folder writable") from None
    with tempfile.TemporaryDirectory() as scratch:
        problem = Path(scratch) / "error"
        environment = {**stage_environment(None), "STRATAGEM_ERROR": str(problem)}
        if downloads is not None:
            environment["STRATAGEM_DOWNLOADS"] = str(downloads.absolute())
        command = [sys.executable, "-m", "dvc", "repro", *(["--force", "--single-item"] if force else []), target]
        try:
            # DVC refuses at once when another of its commands runs; a second flow waits here instead.
            with FileLock(state / "stratagem.lock", timeout=DVC_BUSY_SECONDS):
                _run_dvc(command, environment, root, problem)
        except Timeout:
            raise StratagemError(
                "another run has been preparing data for ten minutes: wait for it, then run again"
            ) from None


def _run_dvc(command: list[str], environment: dict[str, str], root: Path, problem: Path) -> None:
    waiting_since = time.monotonic()
    while True:
        # Quiet DVC, so that the stage has the terminal for its own progress.
        # Its stage reads the pipe, and ends when this process does, however that dies.
        child = subprocess.Popen(
            [*command, "--quiet"],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            process_group=0,
        )
        try:
            code = child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise
        finally:
            if child.stdin is not None:
                child.stdin.close()
        if code == 0:
            return
        if problem.exists():
            raise errors.from_json(json.loads(problem.read_text(encoding="utf-8")))
        told = subprocess.run(
            command, check=False, cwd=root, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if told.returncode == 0:
            return
        if problem.exists():
            continue
        message = next(
            (line for line in told.stderr.splitlines() if line.startswith("ERROR")), told.stderr.strip()[-500:]
        )
        if "busy" not in told.stderr or time.monotonic() - waiting_since > DVC_BUSY_SECONDS:
            raise StratagemError(f"`dvc {' '.join(command[3:])}` failed: {message.removeprefix('ERROR: ')}")
        time.sleep(2)


def serve_ui() -> None:
    """Serve MLflow's pages and a Prefect server on free ports of 127.0.0.1 until this process is interrupted."""
    root = config.project_root()
    database = root / "mlruns" / "mlflow.db"
    store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database}"
    if not (os.environ.get("MLFLOW_TRACKING_URI") or database.exists()):
        # A new store that MLflow's server and a run make at the same moment stays broken for ever.
        make = "from tasks import tracking; tracking.open_store()"
        subprocess.run([sys.executable, "-c", make], check=True, cwd=root, env=stage_environment(None))
    mlflow_port, prefect_port = _free_ports(2)
    python = [sys.executable, "-m"]
    commands = {
        f"MLflow   http://127.0.0.1:{mlflow_port}": [
            *python, "mlflow", "ui", "--host", "127.0.0.1", "--port", str(mlflow_port), "--backend-store-uri", store
        ],
        f"Prefect  http://127.0.0.1:{prefect_port}": [
            *python, "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(prefect_port), "--no-services"
        ],
    }  # fmt: skip
    # Prefect's pages would ask port 4200 whatever port their server has.
    environment = {**stage_environment(None), "PREFECT_SERVER_UI_API_URL": f"http://127.0.0.1:{prefect_port}/api"}
    log = root / "mlruns" / "ui.log"
    with log.open("wb") as output, contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_server(command, environment, root, output)) for command in commands.values()]
        for address, server in zip(commands, servers, strict=True):
            while server.poll() is None and not _answers(address.split()[-1]):
                time.sleep(0.2)
            print(address, flush=True)
        print("Ctrl-C ends both.", flush=True)
        while all(server.poll() is None for server in servers):
            time.sleep(0.5)
        raise StratagemError(f"a server ended by itself; its log is {log}")


@contextlib.contextmanager
def _server(
    command: list[str], environment: dict[str, str], root: Path, output: IO[bytes]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a server, and end it with the processes that it started itself."""
    server = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,
    )
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
