"""The data through DVC: a folder data/<name> for each dataset, its stages up to date, and its data version."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from tasks import config, errors, lineage, records
from tasks.errors import StratagemError, UserError
from tasks.process import dvc_cache
from tasks.process.environment import stage_environment
from tasks.process.guard import held_open
from tasks.records import PreparedDataset

DVC_BUSY_SECONDS = 600.0


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


def is_up_to_date(name: str) -> bool:
    """Return whether DVC finds the prepared data to be what their stages would make now; nothing is made."""
    dvc_cache.configure()
    command = [sys.executable, "-m", "dvc", "status", "--quiet", "--with-deps", f"data/{name}/dvc.yaml:prepare"]
    with held_open() as stdin:
        looked = subprocess.run(
            command,
            check=False,
            cwd=config.project_root(),
            env=stage_environment(None),
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    return looked.returncode == 0


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
        with held_open() as stdin:
            subprocess.run(command, check=False, cwd=root, env=environment, stdout=sys.stderr, stdin=stdin)
        if problem.exists():
            raise errors.from_json(json.loads(problem.read_text(encoding="utf-8")))


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
    dvc_cache.configure()
    state = root / ".dvc" / "tmp"
    try:
        state.mkdir(parents=True, exist_ok=True)
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
        with held_open() as stdin:
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
