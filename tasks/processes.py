"""Child processes: their environment, complete before a framework is imported, their start and their end.

The stage process imports its framework once and then serves train, evaluate and register. It is started as early as
possible, so that its imports overlap with Prefect's and DVC's start. Where the strategy is a cluster, the other members
stand beside it.
"""

import atexit
import contextlib
import importlib
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import yaml
from filelock import FileLock, Timeout

from tasks import config, errors, launchers, lineage, records, runs
from tasks.errors import StratagemError, UserError
from tasks.launchers.cluster import GRACE_SECONDS, Cluster
from tasks.records import PreparedDataset, Record, Run, RunSummary, TrainingResult

R = TypeVar("R", bound=Record)

DVC_BUSY_SECONDS = 600.0
# With fewer threads than devices that wait for each other, JAX aborts the process after 40 s.
MIN_JAX_THREADS = 32

_stage_process: Cluster | None = None


def show_tracebacks() -> None:
    """Let the processes that are started from now on show tracebacks of their own."""
    os.environ["STRATAGEM_DEBUG"] = "1"


def stage_environment(settings: config.Settings | None) -> dict[str, str]:
    """Return the environment of a process that runs stages with these settings."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "JAX_PLATFORMS": "cpu",  # TensorFlow imports JAX, which would take the GPU's memory from TensorFlow.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # By default MLflow's client tries for minutes where a server hangs.
        "MLFLOW_HTTP_REQUEST_TIMEOUT": os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1"),
        "MLFLOW_LOGGING_LEVEL": os.environ.get("MLFLOW_LOGGING_LEVEL", "WARNING"),
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "DO_NOT_TRACK": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    # Set only after the stage process was started, and no stage's business.
    environment.pop("PREFECT_API_URL", None)
    environment.pop("TF_CONFIG", None)  # A launcher says who is a member of a cluster.
    if settings is not None and settings.strategy.kind == "one_device" and settings.strategy.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if settings is not None and settings.strategy.backend == "jax":
        environment |= _jax_environment(settings)
    return environment


def _jax_environment(settings: config.Settings) -> dict[str, str]:
    """Return what makes Keras run on JAX; CPU devices can be made only when a process starts."""
    section = settings.strategy
    wanted: int | list[str] | None = None
    if isinstance(section, config.DataParallel):
        wanted = section.devices
    elif isinstance(section, config.ModelParallel):
        wanted = section.devices or math.prod(section.mesh_shape)
    named = wanted if isinstance(wanted, list) else []
    on_cpu = [int(name.removeprefix("cpu:")) for name in named if name.startswith("cpu:")]
    count = wanted if isinstance(wanted, int) else max(on_cpu, default=-1) + 1
    environment = {
        "KERAS_BACKEND": "jax",
        # The accelerators of this machine, unless the user wants none.
        "JAX_PLATFORMS": "cpu" if on_cpu and len(on_cpu) == len(named) else os.environ.get("JAX_PLATFORMS", ""),
        "NPROC": str(max(MIN_JAX_THREADS, 4 * count)),
    }
    flags = [f"--xla_force_host_platform_device_count={count}"] if count else []
    if settings.train.deterministic:
        flags.append("--xla_gpu_deterministic_ops=true")
    if flags:
        environment["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
    if settings.train.dtype_policy == "float64":
        environment["JAX_ENABLE_X64"] = "1"
    return environment


def kind_of_process(settings: config.Settings) -> str:
    """Return what is decided once in a process: environment, devices, and whether kernels are deterministic."""
    return json.dumps([stage_environment(settings), settings.strategy.model_dump(), settings.train.deterministic])


def check_devices(settings: config.Settings) -> None:
    """Refuse what can be known without a framework, before anything is started for a run.

    Raises:
        UserError: no TPU, not enough GPUs, a TF_CONFIG that cannot be used, its port is taken, JAX is not installed, or
            KERAS_BACKEND is another one than the strategy's.
    """
    section = settings.strategy
    present = os.environ.get("KERAS_BACKEND")
    if present and present != section.backend:
        others = [kind for kind, other in config.strategy_kinds().items() if other.backend == present]
        why = ": keras.distribution does nothing on another one" if section.backend == "jax" else ""
        raise UserError(
            f"KERAS_BACKEND = '{present}' contradicts strategy.kind = '{section.kind}', which trains on "
            f"{section.backend}{why}. Unset KERAS_BACKEND"
            + (f", or give strategy.kind={' or '.join(others)}" if others else "")
        )
    if section.backend == "jax" and importlib.util.find_spec("jax") is None:
        raise UserError(
            f"strategy.kind = '{section.kind}' trains on JAX, which is not installed: install requirements.lock, or "
            "give strategy.kind=mirrored"
        )
    if isinstance(section, config.Tpu):
        importlib.import_module("tasks.launchers.tpu").check(section)
    launchers.members(section)


def start(settings: config.Settings, whole: bool = True) -> Cluster:
    """Return the stage process for these settings, with its cluster; the one that runs already, if it will do.

    Args:
        settings: decide the environment.
        whole: False is enough for what is done with a trained model: one process, and no cluster.
    """
    global _stage_process
    running, kind = _stage_process, kind_of_process(settings)
    if running is not None and running.kind == kind:
        # After a training that failed its chief can still do what needs no other member.
        enough = running.usable and running.whole if whole else running.first.alive
        if enough:
            return running
    stop()
    _stage_process = Cluster(settings.strategy, stage_environment(settings), kind, whole)
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
    values["settings"] = settings.to_json()
    process = start(settings, whole=stage in ("start", "resume", "train"))
    if not process.first.member.is_chief:
        name = process.first.member.name
        stop()
        raise UserError(
            f"TF_CONFIG makes this process {name}, and only the chief leads a pipeline: start the members with "
            "`stratagem run` or `stratagem train`, or unset TF_CONFIG"
        )
    if stage != "train":
        return returns.model_validate(process.call(stage, values))
    told: dict[str, Any] = {"settings": values["settings"], "run": values["run"]}
    try:
        answer = process.call(stage, values)
    except BaseException:
        if process.restarts:
            start(settings, whole=False).call("report_restarts", told | {"restarts": process.restarts})
        raise
    if process.restarts:
        answer = process.call("report_restarts", told | {"restarts": process.restarts, "training": answer})
    return returns.model_validate(answer)


def begin(
    settings: config.Settings,
    prepared: PreparedDataset,
    held: runs.Hold,
    *,
    resume: str | None = None,
    allow_changes: bool = False,
    fresh: bool = False,
    flow_run_id: str | None = None,
) -> Run:
    """Begin a run, or take up one that did not come to its end.

    Args:
        settings: of the run.
        prepared: its data.
        held: this process's hold on runs with these settings and on ``resume``.
        resume: the id of the run to take up, or ``latest`` on this dataset; None is the newest one with these settings,
            data and code, if it did not come to its end.
        allow_changes: take up ``resume`` even where settings or data make it another training.
        fresh: take up none.
        flow_run_id: the run of Prefect's flow.

    Raises:
        UserError: the training is refused, or what ``resume`` names cannot be carried on.
    """
    runs.remove_leftovers()
    unfinished = None
    if resume is None and not fresh:
        unfinished = runs.find_unfinished(settings, lineage.trace(settings, prepared.data_version))
    taken = unfinished or runs.find_named(settings, resume)
    if taken is None:
        run_of = run("start", Run, settings, prepared=prepared, flow_run_id=flow_run_id)
    else:
        run_id = taken.run_id
        if unfinished is not None:
            print(f"going on with run {run_id}, which did not end; --fresh begins a new one", file=sys.stderr)
        options = {"flow_run_id": flow_run_id, "allow_changes": allow_changes}
        run_of = run("resume", Run, settings, prepared=prepared, run_id=run_id, **options)
    held.note(run_id=run_of.run_id)
    return run_of


def end_failed(settings: config.Settings, run_of: Run, error: BaseException) -> None:
    """End the MLflow run as failed, or as killed when somebody stopped it.

    A failure of that is told, not raised, because ``error`` is what the user has to know.
    """
    killed = isinstance(error, errors.Interrupted) or not isinstance(error, Exception)
    status, reason = "KILLED" if killed else "FAILED", str(error) or type(error).__name__
    try:
        run("finish", Run, settings, run=run_of, status=status, reason=reason)
    except StratagemError as other:
        print(f"run {run_of.run_id} could not be ended as {status}: {other}", file=sys.stderr)


def trained_before(settings: config.Settings, run_of: Run) -> TrainingResult | None:
    """Return what the training of a run left that was taken up after its end, else None.

    Members of a cluster that someone else started wait for a training: there the chief does one, of no steps.
    """
    return None if in_foreign_cluster(settings) else runs.left_by(run_of, TrainingResult)


def train_alone(
    settings: config.Settings,
    prepared: PreparedDataset,
    *,
    resume: str | None = None,
    allow_changes: bool = False,
    fresh: bool = False,
) -> TrainingResult:
    """Train as a run of its own, without Prefect; see ``begin``.

    Raises:
        UserError: another process does the same, or the training is refused.
        Interrupted: the training was told to stop.
        StratagemError: it failed.
    """
    with runs.hold_run(settings, resume) as held:
        run_of = begin(settings, prepared, held, resume=resume, allow_changes=allow_changes, fresh=fresh)
        try:
            result = trained_before(settings, run_of)
            if result is None:
                result = run("train", TrainingResult, settings, prepared=prepared, run=run_of)
        except BaseException as error:
            end_failed(settings, run_of, error)
            raise
        run("finish", Run, settings, run=run_of, status="FINISHED")
    return result


def reconcile() -> list[records.Ended]:
    """End what killed processes left open in MLflow and in mlruns/, in a process that imports MLflow; remove what they
    left half-written.

    Raises:
        StratagemError: the store cannot be used, or does not answer.
    """
    removed = [path.relative_to(config.project_root()) for path in runs.remove_leftovers()]
    with tempfile.TemporaryDirectory() as scratch:
        problem = Path(scratch) / "error"
        environment = {**stage_environment(None), "STRATAGEM_ERROR": str(problem)}
        command = [sys.executable, "-m", "tasks", "reconcile"]
        root = config.project_root()
        with _held_open() as stdin:
            done = subprocess.run(
                command, check=False, cwd=root, env=environment, stdin=stdin, stdout=subprocess.PIPE, text=True
            )
        if problem.exists():
            raise errors.from_json(json.loads(problem.read_text(encoding="utf-8")))
        done.check_returncode()
    return [
        *(records.Ended(what=str(path), status="removed", reason="it was half-written") for path in removed),
        *(records.Ended.model_validate_json(line) for line in done.stdout.splitlines()),
    ]


def in_foreign_cluster(settings: config.Settings) -> bool:
    """Return whether this command is to join a cluster that someone else starts."""
    return isinstance(settings.strategy, config.Cluster) and not launchers.find(settings.strategy).WHOLE


def member_name(settings: config.Settings) -> str | None:
    """Return what this process is in a cluster that someone else started, such as ``worker 1``; None where it is the
    chief or there is no such cluster: then it runs the pipeline."""
    member = launchers.members(settings.strategy)[0]
    return None if member.is_chief else member.name


def join(settings: config.Settings, prepare: bool = False) -> None:
    """Do the part of a member that is not the chief, until the chief has trained.

    Args:
        settings: those of the chief.
        prepare: bring the data up to date first, as the chief does; without it they must be prepared.

    Raises:
        UserError: the settings, the data or TF_CONFIG are refused.
        StratagemError: the training failed, or another member was lost.
    """
    if prepare:
        prepare_data(settings)
    prepared = load_prepared(settings.dataset.name)
    cluster = start(settings)
    name = cluster.first.member.name
    print(f"{name} joins the cluster of TF_CONFIG; its log: {cluster.logs}", file=sys.stderr)
    if isinstance(settings.strategy, config.ParameterServer):
        cluster.stand_by()
    else:
        arguments = {"settings": settings.to_json(), "prepared": prepared.model_dump(mode="json")}
        # What the chief asks of the workers on its own machine: who builds a model waits until all others build it.
        for stage in ("check", "train"):
            cluster.call(stage, arguments)
    stop()
    chief = "has ended" if isinstance(settings.strategy, config.ParameterServer) else "tells the result"
    print(f"{name} has done its part; the chief {chief}", file=sys.stderr)


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
        with _held_open() as stdin:
            subprocess.run(command, check=False, cwd=root, env=environment, stdout=sys.stderr, stdin=stdin)
        if problem.exists():
            raise errors.from_json(json.loads(problem.read_text(encoding="utf-8")))


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
    run = runs.newest(settings.dataset.name) if run_id is None else runs.find(run_id)
    training = runs.load_training(run)
    now = settings.to_json()
    trained = config.parse({**run.settings, "evaluate": now["evaluate"], "register": now["register"]})
    return trained, load_prepared(trained.dataset.name), run, training


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


def find_unchanged(settings: config.Settings) -> RunSummary | None:
    """Return what ``unchanged`` does, where DVC finds the data up to date as they are; nothing is made, and neither
    Prefect nor a framework is imported for it."""
    name = settings.dataset.name
    try:
        same = unchanged(settings, load_prepared(name))
    except UserError:  # The data are not there, or damaged: a run makes them.
        return None
    if same is None:
        return None
    command = [sys.executable, "-m", "dvc", "status", "--quiet", "--with-deps", f"data/{name}/dvc.yaml:prepare"]
    with _held_open() as stdin:
        looked = subprocess.run(
            command,
            check=False,
            cwd=config.project_root(),
            env=stage_environment(None),
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    return same if looked.returncode == 0 else None


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
        with _held_open() as stdin:
            told = subprocess.run(
                command, check=False, cwd=root, env=environment, stdin=stdin, capture_output=True, text=True
            )
        if told.returncode == 0:
            return
        if problem.exists():
            continue
        message = next(
            (line for line in told.stderr.splitlines() if line.startswith("ERROR")), told.stderr.strip()[-500:]
        )
        # Said of a stage's files, and, after three seconds, of the whole project.
        busy = "is busy" in told.stderr or "Unable to acquire lock" in told.stderr
        if not busy or time.monotonic() - waiting_since > DVC_BUSY_SECONDS:
            raise StratagemError(f"`dvc {' '.join(command[3:])}` failed: {message.removeprefix('ERROR: ')}")
        time.sleep(2)


@contextlib.contextmanager
def _held_open() -> Iterator[int]:
    """Give a child process a standard input that closes when the block ends or this process dies, however it does."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def guard(command: list[str]) -> int:
    """Run a command until it ends or standard input closes; return its exit code. What it started ends with it."""
    guarded = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)

    def end_with_input() -> None:
        sys.stdin.read()
        guarded.terminate()
        try:
            guarded.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            guarded.kill()

    threading.Thread(target=end_with_input, daemon=True).start()
    code = guarded.wait()
    with contextlib.suppress(ProcessLookupError):  # What is left of its group.
        os.killpg(guarded.pid, signal.SIGKILL)
    return code
