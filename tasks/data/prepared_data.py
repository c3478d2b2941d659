"""data/<name>/prepared and raw: which files they have, and whether these match the data version.

No framework is imported.
"""

import hashlib
import json
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks import config
from tasks.data import data_state
from tasks.records import Column, PreparedDataset
from tasks.records.record import load_or_none
from tasks.runs import lineage
from tasks.system import files
from tasks.system.errors import UserError

LISTINGS = ".dvc/cache/files/md5"
MADE = re.compile(r"manifest\.json|[\w.-]+_\w+s\.npy|\w+_vocabulary\.json|test_metadata\.json")


def remedy(name: str) -> str:
    """Return the end of a message: the command that prepares a dataset again."""
    return f"Rebuild it: stratagem prepare --set dataset.name={name} --force"


def verify(prepared: PreparedDataset) -> None:
    """Compare the files of a prepared dataset with its record, and the record with its data version.

    A file is read again only if it was replaced or written to.

    Raises:
        UserError: names the file that is missing, damaged or changed, and the command that makes it again.
    """
    root = config.project_root()
    manifest = f"{prepared.folder}/manifest.json"
    version = prepared.data_version
    md5s = md5_by_file(version, root) if version is not None else None
    changed = UserError(
        f"{manifest}: changed since it was made, it is not that of the data version {version} in "
        f"data/{prepared.name}/dvc.lock. {remedy(prepared.name)}"
    )
    if md5s is not None and md5s.get("manifest.json") != _digest(manifest, "md5", prepared.name):
        raise changed
    if (found := load_or_none(PreparedDataset, root / manifest)) is None:
        raise UserError(f"{manifest}: missing or damaged. {remedy(prepared.name)}")
    if found != prepared.model_copy(update={"data_version": None}):
        raise UserError(f"{manifest}: is another one than this run began with. {remedy(prepared.name)}")
    for path, expected in _files(prepared).items():
        got = _digest(path, "sha256", prepared.name)
        if got != expected:
            raise UserError(
                f"{path}: damaged, its sha256 is {got} and its manifest says {expected}. {remedy(prepared.name)}"
            )
    if version is not None and md5s is None:  # Without DVC's listing the digest over all files decides.
        paths = [*_files(prepared), manifest]
        if listing_md5({Path(path).name: _digest(path, "md5", prepared.name) for path in paths}) != version:
            raise changed


def verify_raw(prepared: PreparedDataset) -> None:
    """Compare the shards in data/<name>/raw, which a stream reads, with the md5 in dvc.lock; without one do nothing.

    Shards may be larger than memory, so they are read only if a file has changed since DVC found it up to date.

    Raises:
        UserError: names the file that is missing, damaged or changed, and the command that makes it again.
    """
    root = config.project_root()
    version = lineage.data_version(prepared.name, "raw")
    if version is None or data_state.is_known(root, prepared.name):
        return
    place = f"data/{prepared.name}/raw"
    folder = root / place
    again = f"Move {place} away, then make it again: stratagem prepare --set dataset.name={prepared.name}"
    listed = md5_by_file(version, root)
    names = listed or [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    found = {}
    for name in sorted(names):
        try:
            found[name] = files.digest(folder / name, "md5")
        except OSError as error:
            raise UserError(f"{place}/{name}: cannot be read ({error.strerror}). {again}") from None
        if listed and found[name] != listed[name]:
            raise UserError(
                f"{place}/{name}: damaged or changed, its md5 is {found[name]} and DVC's listing says {listed[name]}. "
                f"{again}"
            )
    if listed is None and listing_md5(found) != version:
        raise UserError(
            f"{place}: changed since data/{prepared.name}/prepared was made of it, it is not that of its dvc.lock. "
            f"{again}"
        )


def encoder_config(prepared: PreparedDataset) -> dict[str, Any] | None:
    """Return the arguments of ``encoding.Encoder`` with which it encodes raw values as `prepare` did: rows of a table,
    or images as its only column. None for data that were arrays from the start.

    Raises:
        UserError: a vocabulary is missing or cannot be read.
    """
    features = {name: feature for name, feature in prepared.features.items() if feature.columns}
    if not features and len(prepared.features) == 1:
        ((name, only),) = prepared.features.items()
        if only.kind == "image" and only.shape[-1] in (1, 3):
            features = {name: only.model_copy(update={"columns": (Column(name=name, kind="image"),)})}
    if not features:
        return None
    vocabularies = {}
    for name, feature in features.items():
        if feature.vocabulary is not None:
            try:
                text = (config.project_root() / feature.vocabulary).read_text(encoding="utf-8")
                vocabularies[name] = json.loads(text)
            except (OSError, ValueError) as error:
                raise UserError(f"{feature.vocabulary}: cannot be read ({error}). {remedy(prepared.name)}") from None
    return {
        "features": {name: feature.model_dump(mode="json") for name, feature in features.items()},
        "vocabularies": vocabularies,
    }


def md5_by_file(data_version: str, root: Path) -> dict[str, str] | None:
    """Return the md5 of each file of a data version from DVC's listing in the cache; None where there is none."""
    try:
        listing = (root / LISTINGS / data_version[:2] / f"{data_version[2:]}.dir").read_bytes()
    except OSError:  # The cache lies elsewhere, or a clone has none.
        return None
    if hashlib.md5(listing, usedforsecurity=False).hexdigest() != data_version:
        return None
    return {entry["relpath"]: entry["md5"] for entry in json.loads(listing)}


def _files(prepared: PreparedDataset) -> dict[str, str]:
    """Return the sha256 of each file other than the manifest."""
    found = dict(prepared.sha256)
    for split in prepared.splits.values():
        found |= split.sha256
    return found


def listing_md5(md5s: dict[str, str]) -> str:
    """Return the md5 that DVC gives a folder of these files: path in it -> md5."""
    entries = [{"md5": md5, "relpath": path} for path, md5 in sorted(md5s.items())]
    return hashlib.md5(json.dumps(entries, sort_keys=True).encode(), usedforsecurity=False).hexdigest()


def _digest(path: str, algorithm: str, name: str) -> str:
    """Return the digest of a file of a dataset, computed again only if it was replaced or written to."""
    place = config.project_root() / path
    try:
        state = place.stat()
        # Nobody can set the time of a file's last change.
        signature = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        return _digest_once(place, algorithm, signature)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). {remedy(name)}") from None


@lru_cache(maxsize=1024)  # The stages of one run look at the same files, one after the other.
def _digest_once(path: Path, algorithm: str, signature: tuple[int, ...]) -> str:
    return files.digest(path, algorithm)


def set_foreign_aside(name: str) -> list[Path]:
    """Move files that `prepare` did not make out of data/<name>/prepared, and say so; return their new paths.

    The next `prepare` replaces that folder, and DVC would take them for the dataset's.
    """
    root = config.project_root()
    folder = root / "data" / name
    prepared = folder / "prepared"
    if not prepared.exists() or not files.is_inside(prepared, root):
        return []
    if prepared.is_dir():
        made = made_in(folder)
        foreign = [path for path in sorted(prepared.iterdir()) if path.name not in made]
    else:
        foreign = [prepared]
    moved = [files.set_aside(path, folder / "set_aside") for path in foreign]
    for path in moved:
        print(
            f"data/{name}/prepared held what `prepare` did not make: it now lies at {path.relative_to(root)}",
            file=sys.stderr,
        )
    return moved


def made_in(folder: Path) -> set[str]:
    """Return the names of the files that `prepare` made in ``prepared`` of a dataset's folder."""
    prepared = load_or_none(PreparedDataset, folder / "prepared" / "manifest.json")
    if prepared is None:  # Then files are known by their names, and only if DVC knows the folder.
        known = (folder / "dvc.lock").is_file()
        return {path.name for path in (folder / "prepared").iterdir() if known and MADE.fullmatch(path.name)}
    return {Path(path).name for path in _files(prepared)} | {"manifest.json"}
