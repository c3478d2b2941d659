"""The folder data/<name> of a dataset: its description in params.yaml, and its own small pipeline for DVC."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import yaml

from tasks import config
from tasks.data import prepared_data, quality_report
from tasks.modeling import own_code
from tasks.runs import lineage
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
STAGE = """\
  STAGE:
    wdir: ../..
    cmd: COMMAND STAGE ${dataset.name}
DEPENDENCIES    params:
PARAMS    outs:
      - data/${dataset.name}/OUTPUT:
          persist: true
"""
INSTALLED_COMMAND = "python -m stratagem stage"
"""In place of `python -m tasks`: an installed package has no top-level name `tasks` (``stratagem.py``)."""
PARAMETER = "      - data/${dataset.name}/%s:\n          - %s\n"
READER = "reader.json"
"""Has the version of the kind's reader, on which ``prepare`` depends in place of the files of our code: these lie
elsewhere in an installed package, and most of their changes change no data."""
VERSION = re.compile(r"^VERSION = (\d+)$", re.MULTILINE)
GITIGNORE = """\
/raw
/prepared
/.download.lock
/.prepare.lock
/.scratch.*
/.prepared.*
/*.bad*
"""
NO_BUILDER = {"kind", "builder"}


def names(root: Path) -> list[str]:
    """Return the names of the datasets that have a folder in data/, sorted."""
    return sorted(path.parent.name for path in (root / "data").glob("*/params.yaml"))


def is_local(name: str, root: Path) -> bool:
    """Return whether the dataset data/<name> is read from a file or folder of the user's.

    Raises:
        UserError: data/<name>/params.yaml does not say what dataset it is.
    """
    return bool(sources_of(name, root))


def missing_source(name: str, root: Path) -> str | None:
    """Return a file or folder that a dataset is read from and that is missing, as in a clone; else None."""
    return next((source for source in sources_of(name, root) if not (root / source).exists()), None)


def sources_of(name: str, root: Path) -> tuple[str, ...]:
    """Return the files and folders of the user's that a dataset is read from, none for one of TFDS.

    Raises:
        UserError: data/<name>/params.yaml does not say what dataset it is.
    """
    folder = root / "data" / name
    if not (folder / "params.yaml").exists():
        return ()
    described = config.read_description(folder)
    sources: tuple[str, ...] = described.sources if described.is_local else ()
    return sources


def changed_since_prepared(folder: Path) -> str | None:
    """Return a key whose value in params.yaml is not the one that dvc.lock has, other than where the source is."""
    now = config.read_description(folder).model_dump(mode="json")
    stage = yaml.safe_load((folder / "dvc.lock").read_text(encoding="utf-8"))["stages"]["prepare"]
    before = stage["params"][f"data/{folder.name}/params.yaml"]["dataset"]
    return next((key for key, value in now.items() if key != "source" and before.get(key, value) != value), None)


def check_name(name: str, asked: bool) -> str:
    """Return the name of a dataset from the user's own files: the name asked for, or the file's name as a word.

    Raises:
        UserError: it cannot be a folder's name.
    """
    word = name if asked else re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_")
    if not re.fullmatch(r"[a-z][a-z0-9_-]{0,99}", word):
        given = f"--name {shown(name)}" if asked else f"SOURCE = '{name}'"
        raise UserError(
            f"{given}: the dataset becomes the folder data/NAME, of small letters, digits, _ and -, and begins with a "
            "letter. Give --name NAME"
        )
    return word


def add(dataset: config.Dataset, root: Path) -> list[Path]:
    """Make the folder of a dataset of TFDS, if it is not there; return the files and folders made.

    Raises:
        UserError: settings contradict data/<name>/params.yaml, or files of the user's are in the way.
    """
    folder = root / "data" / dataset.name
    _refuse_link(folder, root)
    if (folder / "params.yaml").exists():
        _keep_to_description(dataset, folder)
        return []
    return _make(folder, tfds_pipeline(dataset.name, root, dataset.builder), "tfds", _described(dataset))


def add_local(description: config.LocalDescription, root: Path) -> list[Path]:
    """Make the folder of a dataset from the user's own files; return the files and folders made.

    Raises:
        UserError: the folder is another dataset's, or files of the user's are in the way.
    """
    if is_there(description, root):
        return []
    described = description.model_dump(mode="json")
    described = {key: described.pop(key) for key in ("kind", "name", "source")} | described
    return _make(root / "data" / description.name, local_pipeline(description, root), description.kind, described)


def is_there(description: config.LocalDescription, root: Path) -> bool:
    """Return whether the folder of a dataset from the user's own files exists.

    Raises:
        UserError: the folder is another dataset's, or cannot be a dataset's.
    """
    folder = root / "data" / description.name
    _refuse_link(folder, root)
    if around := [source for source in description.sources if folder.is_relative_to(root / source)]:
        raise UserError(
            f"dataset.source = '{around[0]}': data/{description.name} lies in it, and what is made there "
            "would become part of the source. Move the source out of it, or give --name NAME"
        )
    if not (folder / "params.yaml").exists():
        return False
    if config.read_description(folder) != description:
        raise UserError(
            f"data/{description.name} is there already, and is another dataset: edit data/{description.name}/"
            "params.yaml and run `stratagem prepare --set dataset.name="
            f"{description.name}`, give --name NAME, or take it away: stratagem data remove {description.name}"
        )
    return True


def _refuse_link(folder: Path, root: Path) -> None:
    if not files.is_inside(folder, root):
        raise UserError(
            f"data/{folder.name} leads to another folder, in which DVC finds nothing: move it away, then run again"
        )


def _make(folder: Path, pipeline: str, kind: str, described: dict[str, Any]) -> list[Path]:
    wanted = {
        "dvc.yaml": pipeline,
        ".gitignore": GITIGNORE,
        READER: _reader(kind),
        "params.yaml": _description(described),  # Last: it says that the folder is whole.
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
        take_away(made)
        raise UserError(
            f"data/{folder.name} cannot be made ({error}): make data/ a folder that you can write to"
        ) from None
    return made


def local_pipeline(description: config.LocalDescription, root: Path) -> str:
    """Return the dvc.yaml of a dataset from the user's own files.

    Raises:
        UserError: DVC would take the source's name for a variable.
    """
    if wrong := [source for source in description.sources if "${" in source]:
        raise UserError(f"dataset.source = '{wrong[0]}': DVC reads ${{ as a variable; give it another name")
    sources = [json.dumps(source, ensure_ascii=False) for source in description.sources]
    return HEAD + _prepare(sources, root)


def _prepare(dependencies: list[str], root: Path) -> str:
    return _stage("prepare", dependencies, {"params.yaml": "dataset", READER: "version"}, "prepared", root)


def _stage(name: str, dependencies: list[str], params: dict[str, str], output: str, root: Path) -> str:
    command = "python -m tasks" if config.has_own_code(root) else INSTALLED_COMMAND
    text = STAGE.replace("STAGE", name).replace("COMMAND", command).replace("OUTPUT", output)
    lines = "".join(f"      - {one}\n" for one in dependencies)
    text = text.replace("DEPENDENCIES", f"    deps:\n{lines}" if lines else "")
    return text.replace("PARAMS", "".join(PARAMETER % one for one in params.items()))


def _reader(kind: str) -> str:
    """Return what ``READER`` is to hold: VERSION in the file of the kind, 1 where it says none."""
    code = (config.code_root() / "tasks" / "data" / "kinds" / f"{kind}.py").read_text(encoding="utf-8")
    found = VERSION.search(code)
    return json.dumps({"version": int(found[1]) if found else 1}) + "\n"


def is_reader_noted(folder: Path) -> bool:
    """Return whether ``READER`` has the version of the present reader, so that DVC sees whether an earlier one prepared
    the data."""
    path = folder / READER
    return path.is_file() and path.read_text(encoding="utf-8") == _reader(config.read_description(folder).kind)


def note_reader(folder: Path) -> None:
    """Write the version of the present reader into ``READER``."""
    if not is_reader_noted(folder):
        with files.replacing(folder / READER) as written:
            written.write_text(_reader(config.read_description(folder).kind), encoding="utf-8")


def _refuse_files_of_the_users(folder: Path, wanted: dict[str, str]) -> None:
    """Refuse a folder with files that would be overwritten, or that DVC would take for its own and delete."""
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
    own = {"builder": dataset.builder} if dataset.builder else {}
    return {"name": dataset.name, **own, "version": dataset.version, "image_size": size}


def _description(described: dict[str, Any]) -> str:
    return "# What this dataset is.\n" + yaml.safe_dump({"dataset": described}, sort_keys=False)


def _keep_to_description(dataset: config.Dataset, folder: Path) -> None:
    """Refuse settings that contradict data/<name>/params.yaml.

    While nothing was prepared and nobody has edited that file, it is rewritten instead: a failed first try must not
    hold the user to values that nobody chose.
    """
    path = folder / "params.yaml"
    described = config.read_description(folder)
    present = described.model_dump(mode="json", exclude={"kind"} if getattr(described, "builder", None) else NO_BUILDER)
    asked = {key: value for key, value in _described(dataset).items() if value is not None}
    different = [key for key, value in asked.items() if present.get(key) != value]
    if not different:
        return
    untouched = not described.is_local and path.read_text(encoding="utf-8") == _description(present)
    if untouched and lineage.data_version(folder.name) is None and not (folder / "prepared").exists():
        path.write_text(_description({**present, **asked}), encoding="utf-8")
        return
    key = different[0]
    described_as = "null" if present.get(key) is None else present[key]
    raise UserError(
        f"dataset.{key} = {asked[key]}: data/{folder.name}/params.yaml says {described_as}. "
        f"Change it there, or leave dataset.{key} null"
    )


def tfds_pipeline(name: str, root: Path, builder: str | None = None) -> str:
    """Return the dvc.yaml of a TFDS dataset. A dataset of the project's tasks/data/builders/ depends on its own file,
    the user's own ``module:Class`` on what it imports from the project's folder."""
    builder_name, _ = config.split_folder_name(name)
    file = f"tasks/data/builders/{builder_name}.py"
    own = [file] if (root / file).is_file() else []
    if builder is not None:
        own = [path.as_posix() for path in own_code.files(builder)]
    download = _stage("download", own, {"params.yaml": "dataset.version"}, "raw", root)
    return HEAD + download + _prepare(["data/${dataset.name}/raw", *own], root)


def remove(folder: Path, root: Path) -> list[str]:
    """Remove what was made in data/<name>, and the folder if it is then empty; return what stays.

    Archives stay in raw/downloads.

    Raises:
        UserError: it is not a dataset's folder, or a link.
    """
    if not files.is_inside(folder, root):
        raise UserError(f"{folder.relative_to(root)} leads to another folder: remove it yourself")
    described = config.read_description(folder)
    files.remove_scratch([*folder.glob(".scratch.*"), *folder.glob(".prepared.*")], root)
    made = prepared_data.made_in(folder) if (folder / "prepared").is_dir() else set()
    own = [*(folder / "prepared" / name for name in made), *quality_report.made_in(folder)]
    if not described.is_local:
        by_tfds = folder / "raw" / config.split_folder_name(folder.name)[0]
        own += [path for path in _below(by_tfds) if path.is_dir() or MADE_BY_TFDS.fullmatch(path.name)]
        own += [by_tfds, folder / "raw" / "manifest.json", folder / "raw"]
    take_away([path for path in (*own, folder / "prepared") if path.exists() and not path.is_symlink()])
    # The description last: as long as it is there, the command can be repeated.
    for name in (".download.lock", ".prepare.lock", ".gitignore", READER, "dvc.lock", "dvc.yaml", "params.yaml"):
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
