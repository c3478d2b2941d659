"""The folder data/<name> of a dataset: what says which dataset it is, and its own little pipeline for DVC."""

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from tasks import config
from tasks.data import installed_code, prepared_data, quality_report
from tasks.modeling import own_code
from tasks.runs import lineage
from tasks.system import files
from tasks.system.errors import UserError, shown

MADE_BY_TFDS = re.compile(r"(dataset_info|features|metadata)\.json|.+\.labels\.txt|.+\.tfrecord-\d+-of-\d+")
"""The names of the files in raw/."""
# The two stages that a dataset can have; one whose source is the user's own has nothing to download.
HEAD = """\
# data/<name>/params.yaml says which dataset this is.
# persist: DVC would remove a folder that is to be made again, with what else lies in it; the stages keep that.
stages:
"""
STAGE = """\
  STAGE:
    wdir: ../..
    cmd: python -m tasks STAGE ${dataset.name}
    deps:
DEPENDENCIES
      - tasks/STAGE.py
    params:
      - data/${dataset.name}/params.yaml:
          - KEY
    outs:
      - data/${dataset.name}/OUTPUT:
          persist: true
"""
SHARED = "tasks/data/builders/_images.py"
"""What the datasets of tasks/data/builders/ are made of, beside their own files."""
IMAGE_SIZE = "          - dataset.image_size\n"
FOLLOWED = {key: f"          - dataset.{key}\n" for key in ("checks", "columns")}
"""The lines of the keys that the pipeline of a dataset of TFDS follows where params.yaml has them."""
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
CODE = installed_code.PINS


def names(root: Path) -> list[str]:
    """Return the names of the datasets that have a folder in data/, sorted."""
    return sorted(path.parent.name for path in (root / "data").glob("*/params.yaml"))


def is_local(name: str, root: Path) -> bool:
    """Return whether data/<name> is a dataset whose source is a file or folder of the user's.

    Raises:
        UserError: data/<name>/params.yaml does not say what dataset it is.
    """
    return bool(sources_of(name, root))


def missing_source(name: str, root: Path) -> str | None:
    """Return a source of a dataset of the user's own that is not here, as in a clone; else None."""
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
    """Return the name of a dataset of the user's own: what was asked for, or what his file is called, as a word.

    Raises:
        UserError: it cannot be a folder's name.
    """
    word = name if asked else re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_")
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,99}", word):
        given = f"--name {shown(name)}" if asked else f"SOURCE = '{name}'"
        raise UserError(
            f"{given}: the dataset becomes the folder data/NAME, of small letters, digits and _, and begins with a "
            "letter. Give --name NAME"
        )
    return word


def add(dataset: config.Dataset, root: Path) -> list[Path]:
    """Make the folder of a dataset of TFDS, if it is not there; return the files and folders made.

    Raises:
        UserError: settings that contradict data/<name>/params.yaml, or files of the user's in the place of its own.
    """
    folder = root / "data" / dataset.name
    _refuse_link(folder, root)
    if (folder / "params.yaml").exists():
        _keep_to_description(dataset, folder)
        if not is_local(dataset.name, root):
            _follow_params(folder)
        return []
    return _make(folder, tfds_pipeline(dataset.name, dataset.builder), _described(dataset))


def add_local(description: config.LocalDescription, root: Path) -> list[Path]:
    """Make the folder of a dataset whose source is the user's own; return the files and folders made.

    Raises:
        UserError: it is there already and is another dataset, or files of the user's are in the place of its own.
    """
    if is_there(description, root):
        return []
    described = description.model_dump(mode="json")
    described = {key: described.pop(key) for key in ("kind", "name", "source")} | described
    return _make(root / "data" / description.name, local_pipeline(description), described)


def is_there(description: config.LocalDescription, root: Path) -> bool:
    """Return whether the folder of a dataset of the user's own is there.

    Raises:
        UserError: it is another dataset's, or cannot be one's.
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


def _make(folder: Path, pipeline: str, described: dict[str, Any]) -> list[Path]:
    code = {}
    if not config.has_own_code(folder.parents[1]):
        pipeline, code = installed_code.pipeline(pipeline), {CODE: installed_code.pins(pipeline)}
    wanted = {
        "dvc.yaml": pipeline,
        ".gitignore": GITIGNORE,
        **code,
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


def local_pipeline(description: config.LocalDescription) -> str:
    """Return the dvc.yaml of a dataset whose source is the user's own.

    Raises:
        UserError: DVC would read the source's name as something else.
    """
    if wrong := [source for source in description.sources if "${" in source]:
        raise UserError(f"dataset.source = '{wrong[0]}': DVC reads ${{ as a variable; give it another name")
    sources = [json.dumps(source, ensure_ascii=False) for source in description.sources]
    code = ["tasks/data/kinds/__init__.py", f"tasks/data/kinds/{description.kind}.py", *description.modules]
    return HEAD + _stage("prepare", [*sources, *code], "dataset", "prepared")


def _stage(name: str, dependencies: list[str], key: str, output: str) -> str:
    text = STAGE.replace("STAGE", name).replace("KEY", key).replace("OUTPUT", output)
    return text.replace("DEPENDENCIES", "\n".join(f"      - {one}" for one in dependencies))


def _pins_of_today(folder: Path) -> str | None:
    """Return what CODE has to hold; None for a dataset that is not there, and in a project with code of its own."""
    if config.has_own_code(folder.parents[1]) or not (folder / "params.yaml").exists():
        return None
    described = config.read_description(folder)
    return installed_code.pins(
        local_pipeline(described)
        if described.is_local
        else tfds_pipeline(folder.name, getattr(described, "builder", None))
    )


def pin_code(name: str, root: Path) -> None:
    """Let DVC know which code of the package makes a dataset, where the project has none of its own."""
    folder = root / "data" / name
    wanted = _pins_of_today(folder)
    if wanted is not None and not has_pinned_code(name, root):
        with files.replacing(folder / CODE) as written:
            written.write_text(wanted, encoding="utf-8")


def has_pinned_code(name: str, root: Path) -> bool:
    """Return whether DVC knows the code that makes a dataset as it is now."""
    wanted, path = _pins_of_today(root / "data" / name), root / "data" / name / CODE
    return wanted is None or (path.is_file() and path.read_text(encoding="utf-8") == wanted)


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
    own = {"builder": dataset.builder} if dataset.builder else {}
    return {"name": dataset.name, **own, "version": dataset.version, "image_size": size}


def _description(described: dict[str, Any]) -> str:
    return "# What this dataset is.\n" + yaml.safe_dump({"dataset": described}, sort_keys=False)


def _keep_to_description(dataset: config.Dataset, folder: Path) -> None:
    """Refuse settings that contradict data/<name>/params.yaml.

    As long as nothing was prepared and nobody has edited that file, it is written anew instead: a first try that
    failed must not hold its user to what nobody said.
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
    raise UserError(
        f"dataset.{key} = {asked[key]}: data/{folder.name}/params.yaml says {present.get(key)}. "
        f"Change it there, or leave dataset.{key} null"
    )


def _follow_params(folder: Path) -> None:
    """Make the pipeline of a dataset of TFDS depend on the checks and columns that its params.yaml has. DVC refuses a
    parameter that params.yaml does not have."""
    path = folder / "dvc.yaml"
    described = config.read_description(folder)
    with contextlib.suppress(OSError):  # DVC says what is wrong with it.
        text = before = path.read_text(encoding="utf-8")
        for key, line in FOLLOWED.items():
            has_key = bool(getattr(described, key))
            if has_key != (line in text):
                text = text.replace(IMAGE_SIZE, IMAGE_SIZE + line) if has_key else text.replace(line, "")
                print(f"data/{folder.name}/dvc.yaml follows the {key} of params.yaml from now on", file=sys.stderr)
        if text != before:
            with files.replacing(path) as written:
                written.write_text(text, encoding="utf-8")


def follows_params(name: str, root: Path) -> bool:
    """Return whether the pipeline of a dataset depends on the checks and columns that its params.yaml has: else DVC
    finds it up to date whatever they are."""
    folder = root / "data" / name
    if not (folder / "params.yaml").exists() or is_local(name, root):
        return True  # It depends on all of params.yaml.
    try:
        text, described = (folder / "dvc.yaml").read_text(encoding="utf-8"), config.read_description(folder)
        return all((line in text) == bool(getattr(described, key)) for key, line in FOLLOWED.items())
    except OSError:
        return True  # DVC says what is wrong with it.


def tfds_pipeline(name: str, builder: str | None = None) -> str:
    """Return the dvc.yaml of a dataset. One of tasks/data/builders/ depends on its own file, and on no other one's;
    one of the user's own ``module:Class`` on what that imports from the project's folder."""
    file = name.partition("-")[0]
    own = [SHARED, f"tasks/data/builders/{file}.py"] if file in config.names_of("data/builders") else []
    if builder is not None:
        own = [path.as_posix() for path in own_code.files(builder)]
    code = ["tasks/data/builders/__init__.py", *own]
    raw = "data/${dataset.name}/raw"
    readers = ["tasks/data/kinds/tfds.py", *config.Tfds.modules]
    prepare = _stage("prepare", [raw, *code, *readers], "dataset.image_size", "prepared")
    return HEAD + _stage("download", code, "dataset.version", "raw") + prepare


def remove(folder: Path, root: Path) -> list[str]:
    """Remove what was made in data/<name>, and the folder where nothing else lies in it; return what stays.

    Archives that were fetched or brought stay in raw/downloads.

    Raises:
        UserError: it is not the folder of a dataset, or a link.
    """
    if not files.is_inside(folder, root):
        raise UserError(f"{folder.relative_to(root)} leads to another folder: remove it yourself")
    described = config.read_description(folder)
    files.remove_scratch([*folder.glob(".scratch.*"), *folder.glob(".prepared.*")], root)
    made = prepared_data.made_in(folder) if (folder / "prepared").is_dir() else set()
    own = [*(folder / "prepared" / name for name in made), *quality_report.made_in(folder)]
    if not described.is_local:
        by_tfds = folder / "raw" / folder.name.partition("-")[0]
        own += [path for path in _below(by_tfds) if path.is_dir() or MADE_BY_TFDS.fullmatch(path.name)]
        own += [by_tfds, folder / "raw" / "manifest.json", folder / "raw"]
    take_away([path for path in (*own, folder / "prepared") if path.exists() and not path.is_symlink()])
    # The description last: without it this is no dataset, and with it the command can be given again.
    for name in (".download.lock", ".prepare.lock", ".gitignore", CODE, "dvc.lock", "dvc.yaml", "params.yaml"):
        (folder / name).unlink(missing_ok=True)
    take_away([folder])
    return [path.relative_to(root).as_posix() for path in _below(folder) if not path.is_dir()]


def _below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*")) if folder.is_dir() and not folder.is_symlink() else []


def take_away(made: list[Path]) -> None:
    """Remove these files, and these folders where nothing else lies in them."""
    for path in sorted(made, reverse=True):
        with contextlib.suppress(OSError):  # Not empty, or never made.
            path.rmdir() if path.is_dir() else path.unlink()
