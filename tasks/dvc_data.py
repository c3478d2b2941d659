"""The data through DVC: a folder data/<name> for each dataset, its stages up to date, and its data version."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from tasks import config, data_state, errors, files, lineage, prepared_data, records
from tasks.errors import StratagemError, UserError
from tasks.process import dvc_cache, scratch
from tasks.process.apart import run_apart
from tasks.process.environment import stage_environment
from tasks.process.guard import held_open
from tasks.records import PreparedDataset

DVC_BUSY_SECONDS = 600.0

PIPELINE = """\
# data/<name>/params.yaml says which dataset this is.
# persist: DVC would remove a folder that is to be made again, with what else lies in it; the stages keep that.
stages:
  download:
    wdir: ../..
    cmd: python -m tasks download ${dataset.name}
    deps:
      - tasks/datasets/__init__.py
      - OWN
      - tasks/download.py
    params:
      - data/${dataset.name}/params.yaml:
          - dataset.version
    outs:
      - data/${dataset.name}/raw:
          persist: true
  prepare:
    wdir: ../..
    cmd: python -m tasks prepare ${dataset.name}
    deps:
      - data/${dataset.name}/raw
      - tasks/datasets/__init__.py
      - OWN
      - tasks/prepare.py
    params:
      - data/${dataset.name}/params.yaml:
          - dataset.image_size
    outs:
      - data/${dataset.name}/prepared:
          persist: true
"""
# How the pipeline of a dataset ended that was added before its prepared folder was persisted.
REMOVED_BY_DVC = "      - data/${dataset.name}/prepared\n"
GITIGNORE = """\
/raw
/prepared
/.download.lock
/.prepare.lock
/.scratch.*
/.prepared.*
/*.bad*
"""


def prepare_data(settings: config.Settings, stage: str = "prepare", force: bool = False) -> PreparedDataset | None:
    """Bring a dataset up to date through DVC and return its record; None after ``stage`` download.

    A dataset that has no folder in data/ yet gets one; what was made of it is taken away again when nothing could be
    fetched.

    Raises:
        UserError: what the stage refused, settings that contradict data/<name>/params.yaml, or files of the user's in
            the place of those that are to be made.
    """
    root = config.project_root()
    name = settings.dataset.name
    folder = root / "data" / name
    locks = [folder / lock for lock in (".download.lock", ".prepare.lock") if not (folder / lock).exists()]
    made = _add_dataset(settings.dataset, root)
    prepared_data.set_foreign_aside(name)
    if not force and data_state.is_known(root, name):
        return load_prepared(name) if stage == "prepare" else None
    try:
        with data_state.remembered(root, name) if stage == "prepare" else contextlib.nullcontext():
            _reproduce(f"data/{name}/dvc.yaml:{stage}", settings.dataset.downloads, root, force)
    except BaseException:
        # What was fetched stays for the next try.
        if made and not (folder / "raw").exists():
            _take_away([*made, *locks])
        raise
    if made:
        print(f"added data/{name}: put it under version control with `git add data/{name}`", file=sys.stderr)
    if stage != "prepare":
        return None
    return load_prepared(name)


def load_prepared(name: str) -> PreparedDataset:
    """Return the record of a dataset that is prepared, with its data version.

    Raises:
        UserError: it is not prepared, or its manifest cannot be read.
    """
    path = config.project_root() / "data" / name / "prepared" / "manifest.json"
    if not path.exists():
        raise UserError(f"dataset {name} is not prepared: `stratagem prepare --set dataset.name={name}`")
    try:
        prepared = records.load(PreparedDataset, path)
    except UserError as error:
        raise UserError(f"{error}. {prepared_data.remedy(name)}") from None
    return prepared.model_copy(update={"data_version": lineage.data_version(name)})


def is_up_to_date(name: str) -> bool:
    """Return whether DVC finds the prepared data to be what their stages would make now; nothing is made."""
    if data_state.is_known(config.project_root(), name):
        return True
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
    fetched = root / "data" / dataset.name / "raw" / "manifest.json"
    if dataset.name.partition("-")[0] in config.names_of("datasets") or fetched.exists():
        return
    values = dataset.model_dump(mode="json", exclude={"image_size"})
    settings = [part for key, value in values.items() for part in ("--set", f"dataset.{key}={json.dumps(value)}")]
    run_apart("check", *settings)


def _add_dataset(dataset: config.Dataset, root: Path) -> list[Path]:
    """Make data/<name>/params.yaml and what belongs to it, if it is not there; return the files and folders made."""
    name = dataset.name
    folder = root / "data" / name
    if (folder / "params.yaml").exists():
        _keep_to_description(dataset, folder)
        _persist_prepared(folder)
        return []
    wanted = {
        "dvc.yaml": _pipeline(name),
        ".gitignore": GITIGNORE,
        "params.yaml": _description(_described(dataset)),  # Last: it says that the folder is whole.
    }
    _refuse_files_of_the_users(folder, wanted)
    made = [path for path in (folder.parent, folder) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in wanted.items():
            if not (folder / file).exists():
                made.append(folder / file)
                (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        _take_away(made)
        raise UserError(f"data/{name} cannot be made ({error}): make data/ a folder that you can write to") from None
    return made


def _refuse_files_of_the_users(folder: Path, wanted: dict[str, str]) -> None:
    """Refuse a folder that holds what would be overwritten, or what DVC would take for its own and delete."""
    place = f"data/{folder.name}"
    for file, text in wanted.items():
        path = folder / file
        if path.is_symlink() or (path.exists() and not (path.is_file() and path.read_bytes() == text.encode())):
            raise UserError(
                f"{place}/{file} is there already, and is not what dataset.name={folder.name} needs there: move it "
                f"away, then run again (the other files in {place} stay as they are)"
            )
    for made, own in (("raw", {"downloads"}), ("prepared", set())):
        held = [path.name for path in (folder / made).iterdir()] if (folder / made).is_dir() else []
        if (folder / made).is_file() or not own.issuperset(held):
            raise UserError(
                f"{place}/{made} is there already, and a dataset that is made there would take its place: move it "
                "away, then run again"
            )


def _described(dataset: config.Dataset) -> dict[str, Any]:
    size = list(dataset.image_size) if dataset.image_size else None
    return {"name": dataset.name, "version": dataset.version, "image_size": size}


def _description(described: dict[str, Any]) -> str:
    return "# What this dataset is.\n" + yaml.safe_dump({"dataset": described}, sort_keys=False)


def _keep_to_description(dataset: config.Dataset, folder: Path) -> None:
    """Refuse settings that contradict data/<name>/params.yaml.

    As long as nothing was prepared and nobody has edited that file, it is written anew instead: a first try that
    failed must not hold its user to what nobody said.
    """
    path = folder / "params.yaml"
    try:
        text = path.read_text(encoding="utf-8")
        present = dict(yaml.safe_load(text)["dataset"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"data/{folder.name}/params.yaml is there already, and does not say what dataset it is "
            f"({type(error).__name__}): mend it, or move it away, then run again"
        ) from None
    asked = {key: value for key, value in _described(dataset).items() if value is not None}
    different = [key for key, value in asked.items() if present.get(key) != value]
    if not different:
        return
    untouched = text == _description(present)
    if untouched and lineage.data_version(folder.name) is None and not (folder / "prepared").exists():
        path.write_text(_description({**present, **asked}), encoding="utf-8")
        return
    key = different[0]
    raise UserError(
        f"dataset.{key} = {asked[key]}: data/{folder.name}/params.yaml says {present.get(key)}. "
        f"Change it there, or leave dataset.{key} null"
    )


def _persist_prepared(folder: Path) -> None:
    """Let DVC leave data/<name>/prepared to its stage, where the dataset was added before that was so."""
    path = folder / "dvc.yaml"
    with contextlib.suppress(OSError):  # DVC says what is wrong with it.
        text = path.read_text(encoding="utf-8")
        if text.endswith(REMOVED_BY_DVC):
            with files.replacing(path) as written:
                written.write_text(f"{text[:-1]}:\n          persist: true\n", encoding="utf-8")
            print(
                f"data/{folder.name}/dvc.yaml: `prepared` is persisted now, so that DVC removes no file of yours in it",
                file=sys.stderr,
            )


def _pipeline(name: str) -> str:
    """Return the dvc.yaml of a dataset. One of tasks/datasets/ depends on its own file, and on no other one's."""
    builder = name.partition("-")[0]
    own = f"      - tasks/datasets/{builder}.py\n" if builder in config.names_of("datasets") else ""
    return PIPELINE.replace("      - OWN\n", own)


def _take_away(made: list[Path]) -> None:
    """Remove these files, and these folders where nothing else lies in them."""
    for path in sorted(made, reverse=True):
        with contextlib.suppress(OSError):  # Not empty, or never made.
            path.rmdir() if path.is_dir() else path.unlink()


def _reproduce(target: str, downloads: Path | None, root: Path, force: bool) -> None:
    """Run `dvc repro TARGET`; a stage's own message comes through as the error."""
    dvc_cache.configure()
    state = root / ".dvc" / "tmp"
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{state} cannot be written ({error}): make the project's folder writable") from None
    with tempfile.TemporaryDirectory(dir=scratch.folder()) as folder:
        problem = Path(folder) / "error"
        environment = {**stage_environment(None), "STRATAGEM_ERROR": str(problem)}
        if downloads is not None:
            environment["STRATAGEM_DOWNLOADS"] = str(downloads.absolute())
        command = [sys.executable, "-m", "tasks.process.repro", *(["--force"] if force else []), target]
        try:
            # DVC refuses at once when another of its commands runs; a second flow waits here instead.
            with FileLock(state / "stratagem.lock", timeout=DVC_BUSY_SECONDS):
                code = _run(command, environment, root)
        except Timeout:
            raise StratagemError(
                "another run has been preparing data for ten minutes: wait for it, then run again"
            ) from None
        if problem.exists():
            raise errors.from_json(json.loads(problem.read_text(encoding="utf-8")))
        if code != 0:
            raise StratagemError(f"{target}: the process in which DVC makes it died (exit code {code}): run again")


def _run(command: list[str], environment: dict[str, str], root: Path) -> int:
    """Run DVC in a process of its own, and return its exit code; its stage ends when this process does."""
    child = subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=sys.stderr, process_group=0
    )
    try:
        return child.wait()
    except BaseException:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait()
        raise
    finally:
        if child.stdin is not None:
            child.stdin.close()
