"""The folder data/<name> of a dataset: its description in params.yaml, and its DVC pipeline."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import yaml

from tasks import config
from tasks.data import prepared_data
from tasks.modeling import own_code
from tasks.system import files
from tasks.system.errors import UserError, shown

MADE_BY_TFDS = re.compile(r"(dataset_info|features|metadata)\.json|.+\.labels\.txt|.+\.tfrecord-\d+-of-\d+")
"""The names of the files in raw/."""
# The two stages of a dataset; a dataset from the user's own files has nothing to download.
HEAD = """\
# data/<name>/params.yaml says which dataset this is.
# persist: DVC would remove a folder that is to be made again, with what else lies in it; the stages keep that.
stages:
"""
INSTALLED_COMMAND = "python -m stratagem stage"
"""In place of `python -m tasks`: an installed package has no top-level name `tasks` (``stratagem.py``)."""
READER = "reader.json"
"""Contains the version of the kind's reader. ``prepare`` depends on it, not on source files: these have other paths in
an installed package, and most of their changes do not affect the data."""
STAGES = {
    "download": ({"params.yaml": "dataset.version"}, "raw"),
    "prepare": ({"params.yaml": "dataset", READER: "version"}, "prepared"),
}
"""The params of each stage, by file, and its output."""
VERSION = re.compile(r"^VERSION = (\d+)$", re.MULTILINE)
GITIGNORE = """\
/raw
/prepared
/.scratch.*
/.prepared.*
/*.bad*
"""


def names(root: Path) -> list[str]:
    """Return the names of the datasets that have a folder in data/, sorted."""
    return sorted(path.parent.name for path in (root / "data").glob("*/params.yaml"))


def missing_source(name: str, root: Path) -> str | None:
    """Return a missing source file or folder of a dataset, as in a clone; None if all exist."""
    return next((source for source in sources_of(name, root) if not (root / source).exists()), None)


def sources_of(name: str, root: Path) -> tuple[str, ...]:
    """Return the user's own files and folders that a dataset is read from; none for a TFDS dataset.

    Raises:
        UserError: data/<name>/params.yaml does not describe a dataset.
    """
    folder = root / "data" / name
    if not (folder / "params.yaml").exists():
        return ()
    described = config.read_description(folder)
    sources: tuple[str, ...] = described.sources if described.is_local else ()
    return sources


def changed_since_prepared(folder: Path) -> str | None:
    """Return a key of params.yaml, except the source, whose value differs from dvc.lock; None if all agree."""
    now = config.read_description(folder).model_dump(mode="json")
    stage = yaml.safe_load((folder / "dvc.lock").read_text(encoding="utf-8"))["stages"]["prepare"]
    before = stage["params"][f"data/{folder.name}/params.yaml"]["dataset"]
    return next((key for key, value in now.items() if key != "source" and before.get(key, value) != value), None)


def check_name(name: str, asked: bool) -> str:
    """Return the name of a dataset from the user's own files: the name asked for, or the file's name as a word.

    Raises:
        UserError: it is not a valid name of a folder.
    """
    word = name if asked else re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_")
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,99}", word):
        given = f"--name {shown(name)}" if asked else f"SOURCE = '{name}'"
        raise UserError(
            f"{given} cannot be the name of a folder in data/. Allowed: lower-case letters, digits, _ and -, beginning "
            "with a letter. Use --name NAME"
        )
    return word


def add(dataset: config.Dataset, root: Path) -> list[Path]:
    """Create the folder of a TFDS dataset if it does not exist; return the new files and folders.

    Raises:
        UserError: settings contradict data/<name>/params.yaml, or the user's files are in the way.
    """
    folder = root / "data" / dataset.name
    _refuse_link(folder, root)
    if (folder / "params.yaml").exists():
        _keep_to_description(dataset, folder)
        return []
    return _make(folder, tfds_pipeline(dataset.name, root, dataset.builder), "tfds", _described(dataset))


def add_local(description: config.LocalDescription, root: Path) -> list[Path]:
    """Create the folder of a dataset from the user's own files; return the new files and folders.

    Raises:
        UserError: the folder belongs to another dataset, or the user's files are in the way.
    """
    if is_there(description, root):
        return []
    described = description.model_dump(mode="json")
    described = {key: described.pop(key) for key in ("kind", "name", "source")} | described
    return _make(root / "data" / description.name, local_pipeline(description, root), description.kind, described)


def is_there(description: config.LocalDescription, root: Path) -> bool:
    """Return whether the folder of a dataset from the user's own files exists.

    Raises:
        UserError: the folder belongs to another dataset, is a link, or lies in the source.
    """
    folder = root / "data" / description.name
    _refuse_link(folder, root)
    if around := [source for source in description.sources if folder.is_relative_to(root / source)]:
        raise UserError(
            f"dataset.source = '{around[0]}': data/{description.name} is inside it, and its files "
            "would become part of the source. Move the source elsewhere, or use --name NAME"
        )
    if not (folder / "params.yaml").exists():
        return False
    if config.read_description(folder) != description:
        raise UserError(
            f"data/{description.name} already exists and is a different dataset: edit data/{description.name}/"
            "params.yaml and run `stratagem data prepare --set dataset.name="
            f"{description.name}`, use --name NAME, or remove it: stratagem data remove {description.name}"
        )
    return True


def _refuse_link(folder: Path, root: Path) -> None:
    if not files.is_inside(folder, root):
        raise UserError(
            f"data/{folder.name} is a link to another folder, in which DVC finds nothing: move it away, then run again"
        )


def _make(folder: Path, pipeline: str, kind: str, described: dict[str, Any]) -> list[Path]:
    wanted = {
        "dvc.yaml": pipeline,
        ".gitignore": GITIGNORE,
        READER: _reader(kind),
        # Last, because it marks the folder as complete.
        "params.yaml": "# What this dataset is.\n" + yaml.safe_dump({"dataset": described}, sort_keys=False),
    }
    for file, text in wanted.items():
        path = folder / file
        if path.is_symlink() or (path.exists() and not (path.is_file() and path.read_bytes() == text.encode())):
            raise UserError(
                f"data/{folder.name}/{file} already exists, but dataset.name={folder.name} needs other content: move "
                f"it away, then run again (the other files in data/{folder.name} stay as they are)"
            )
    made = [path for path in (folder.parent, folder) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in wanted.items():
            if not (folder / file).exists():
                made.append(folder / file)
                (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        take_away(made)
        raise UserError(f"data/{folder.name} cannot be created ({error}): make data/ writable") from None
    return made


def local_pipeline(description: config.LocalDescription, root: Path) -> str:
    """Return the dvc.yaml of a dataset from the user's own files."""
    return HEAD + _stage("prepare", [json.dumps(source, ensure_ascii=False) for source in description.sources], root)


def _stage(name: str, dependencies: list[str], root: Path) -> str:
    command = "python -m tasks" if config.has_own_code(root) else INSTALLED_COMMAND
    params, output = STAGES[name]
    deps = "".join(f"      - {one}\n" for one in dependencies)
    place = "      - data/${dataset.name}"
    return (
        f"  {name}:\n    wdir: ../..\n    cmd: {command} {name} ${{dataset.name}}\n"
        + (f"    deps:\n{deps}" if deps else "")
        + "    params:\n"
        + "".join(f"{place}/{file}:\n          - {key}\n" for file, key in params.items())
        + f"    outs:\n{place}/{output}:\n          persist: true\n"
    )


def _reader(kind: str) -> str:
    """Return the content of ``READER``: VERSION in the file of the kind, 1 without it."""
    code = (config.code_root() / "tasks" / "data" / "kinds" / f"{kind}.py").read_text(encoding="utf-8")
    found = VERSION.search(code)
    return json.dumps({"version": int(found[1]) if found else 1}) + "\n"


def is_reader_noted(folder: Path) -> bool:
    """Return whether ``READER`` contains the version of the current reader, so DVC detects data of an earlier one."""
    path = folder / READER
    return path.is_file() and path.read_text(encoding="utf-8") == _reader(config.read_description(folder).kind)


def note_reader(folder: Path) -> None:
    """Write the version of the current reader into ``READER``."""
    if not is_reader_noted(folder):
        (folder / READER).write_text(_reader(config.read_description(folder).kind), encoding="utf-8")


def _described(dataset: config.Dataset) -> dict[str, Any]:
    size = list(dataset.image_size) if dataset.image_size else None
    own = {"builder": dataset.builder} if dataset.builder else {}
    return {"name": dataset.name, **own, "version": dataset.version, "image_size": size}


def _keep_to_description(dataset: config.Dataset, folder: Path) -> None:
    """Refuse settings that contradict data/<name>/params.yaml."""
    present = config.read_description(folder).model_dump(mode="json")
    for key, value in _described(dataset).items():
        if value is not None and (known := present.get(key)) != value:
            raise UserError(
                f"dataset.{key} = {value}: data/{folder.name}/params.yaml says {'null' if known is None else known}. "
                f"Change it there, or leave dataset.{key} null"
            )


def tfds_pipeline(name: str, root: Path, builder: str | None = None) -> str:
    """Return the dvc.yaml of a TFDS dataset. A dataset in tasks/data/builders/ depends on its own file, a user's
    ``module:Class`` on all that it imports from the project's folder."""
    builder_name, _ = config.split_folder_name(name)
    file = f"tasks/data/builders/{builder_name}.py"
    own = [file] if (root / file).is_file() else []
    if builder is not None:
        own = [path.as_posix() for path in own_code.files(builder)]
    return HEAD + _stage("download", own, root) + _stage("prepare", ["data/${dataset.name}/raw", *own], root)


def remove(folder: Path, root: Path) -> list[str]:
    """Remove all generated files in data/<name>, and the folder if it is then empty; return the files that stay.

    Archives stay in raw/downloads.

    Raises:
        UserError: it is not a dataset's folder, or it is a link.
    """
    _refuse_link(folder, root)
    described = config.read_description(folder)
    files.remove_scratch([*folder.glob(".scratch.*"), *folder.glob(".prepared.*")], root)
    prepared_data.set_foreign_aside(folder.name)
    own = [path for part in ("prepared", "report") for path in (*_below(folder / part), folder / part)]
    if not described.is_local:
        by_tfds = folder / "raw" / config.split_folder_name(folder.name)[0]
        own += [path for path in _below(by_tfds) if path.is_dir() or MADE_BY_TFDS.fullmatch(path.name)]
        own += [by_tfds, folder / "raw" / "manifest.json", folder / "raw"]
    take_away([path for path in own if path.exists() and not path.is_symlink()])
    # The description last: while it exists, the command can be repeated.
    for name in (".gitignore", READER, "dvc.lock", "dvc.yaml", "params.yaml"):
        (folder / name).unlink(missing_ok=True)
    take_away([folder])
    return [path.relative_to(root).as_posix() for path in _below(folder) if not path.is_dir()]


def _below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*")) if folder.is_dir() and not folder.is_symlink() else []


def take_away(made: list[Path]) -> None:
    """Remove these files, and these folders if they are then empty."""
    for path in sorted(made, reverse=True):
        with contextlib.suppress(OSError):  # Not empty, or never made.
            path.rmdir() if path.is_dir() else path.unlink()
