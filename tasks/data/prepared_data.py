"""data/<name>/prepared: its files, and whether they match the data version; and data/<name>/report: statistics, results
of the checks, and pictures, which are not part of the data version.

This module imports neither a framework nor NumPy.
"""

import hashlib
import json
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks import config
from tasks.records import Column, DataQuality, PreparedDataset, load_or_none
from tasks.system import files
from tasks.system.errors import UserError

LISTINGS = ".dvc/cache/files/md5"
MADE = re.compile(r"manifest\.json|[\w.-]+_\w+s\.npy|\w+_vocabulary\.json|test_metadata\.json")

QUALITY, STATISTICS = "quality.json", "statistics.json"
SIZES = "test_sizes.npy"
"""Height and width of the original test images, int32 (n, 2), if the kind of dataset provides them."""


def remedy(name: str) -> str:
    """Return the end of a message: the command that prepares a dataset again."""
    return f"Rebuild it: stratagem data prepare --set dataset.name={name} --force"


def verify(prepared: PreparedDataset) -> None:
    """Compare the files of a prepared dataset with its record, and the record with its data version.

    It reads a file again only if the file was replaced or written to.

    Raises:
        UserError: names the file that is missing, damaged or changed, and the command that rebuilds it.
    """
    root = config.project_root()
    manifest = f"{prepared.folder}/manifest.json"
    version = prepared.data_version
    md5s = md5_by_file(version, root) if version is not None else None
    if md5s is not None and md5s.get("manifest.json") != _digest(manifest, "md5", prepared.name):
        raise UserError(
            f"{manifest} has changed: it does not belong to the data version {version} in "
            f"data/{prepared.name}/dvc.lock. {remedy(prepared.name)}"
        )
    if (found := load_or_none(PreparedDataset, root / manifest)) is None:
        raise UserError(f"{manifest} is missing or damaged. {remedy(prepared.name)}")
    if found != prepared.model_copy(update={"data_version": None}):
        raise UserError(f"{manifest} differs from the one that this run started with. {remedy(prepared.name)}")
    for path, expected in _files(prepared).items():
        got = _digest(path, "sha256", prepared.name)
        if got != expected:
            raise UserError(
                f"{path} is damaged: its sha256 is {got}, but its manifest says {expected}. {remedy(prepared.name)}"
            )


def encoder_config(prepared: PreparedDataset) -> dict[str, Any] | None:
    """Return what makes ``encoding`` read and encode raw values as `prepare` did: rows of a table, or images as its
    only column. None for data from arrays.

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
    } | ({"csv": prepared.csv} if prepared.csv else {})


def md5_by_file(data_version: str, root: Path) -> dict[str, str] | None:
    """Return the md5 of each file of a data version from DVC's listing in the cache; None without a listing."""
    try:
        listing = (root / LISTINGS / data_version[:2] / f"{data_version[2:]}.dir").read_bytes()
    except OSError:  # The cache is elsewhere, or a clone has none.
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


def _digest(path: str, algorithm: str, name: str) -> str:
    """Return the digest of a dataset's file, computed again only if the file was replaced or written to."""
    place = config.project_root() / path
    try:
        state = place.stat()
        # No program can set ctime.
        signature = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        return _digest_once(place, algorithm, signature)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). {remedy(name)}") from None


@lru_cache(maxsize=1024)  # Each stage of a run verifies the same files.
def _digest_once(path: Path, algorithm: str, signature: tuple[int, ...]) -> str:
    return files.digest(path, algorithm)


def set_foreign_aside(name: str) -> None:
    """Move files that `prepare` did not create out of data/<name>/prepared and report, and print where they are.

    The next `prepare` replaces these folders, and DVC would track the files as part of the dataset.
    """
    root = config.project_root()
    folder = root / "data" / name
    for part, made in (("prepared", made_in(folder)), ("report", made_in_report(folder))):
        for path in sorted(folder.glob(f"{part}/*")):
            if path.name not in made:
                moved = files.set_aside(path, folder / "set_aside")
                print(
                    f"data/{name}/{part} contained a file that `prepare` did not create. It is now "
                    f"{moved.relative_to(root)}",
                    file=sys.stderr,
                )


def made_in(folder: Path) -> set[str]:
    """Return the names of the files that `prepare` created in a dataset's folder ``prepared``."""
    prepared = load_or_none(PreparedDataset, folder / "prepared" / "manifest.json")
    if prepared is None:  # Then they are known by their names.
        return {path.name for path in folder.glob("prepared/*") if MADE.fullmatch(path.name)}
    return {Path(path).name for path in _files(prepared)} | {"manifest.json"}


def made_in_report(folder: Path) -> set[str]:
    """Return the names of the report's own files in a dataset's folder."""
    found = load_or_none(DataQuality, folder / "report" / QUALITY)
    return {*(found.pictures if found is not None else ()), STATISTICS, SIZES, QUALITY, ".gitignore"}


def arrays_of(prepared: PreparedDataset) -> str:
    """Return one sha256 over all arrays of a dataset, independent of its name."""
    digests = [
        f"{Path(path).name} {digest}" for split in prepared.splits.values() for path, digest in split.sha256.items()
    ]
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


def load_quality(prepared: PreparedDataset) -> DataQuality | None:
    """Return the results of the checks; None without a report of these data."""
    found = load_or_none(DataQuality, config.project_root() / "data" / prepared.name / "report" / QUALITY)
    return found if found is not None and found.arrays == arrays_of(prepared) else None
