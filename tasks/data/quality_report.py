"""data/<name>/report: the statistics of a dataset, what the checks say of it, and pictures.

It lies beside `prepared`, so that it is no part of the data version. No framework and no NumPy is imported.
"""

import hashlib
from pathlib import Path

from tasks.records import DataQuality, DataStatistics, PreparedDataset
from tasks.records.record import load_or_none
from tasks.system import files

QUALITY, STATISTICS, BEFORE = "quality.json", "statistics.json", "statistics_before.json"
SIZES = "test_sizes.npy"
"""The height and width that the images of the test split had before they were prepared, int32 (n, 2); where a kind of
dataset knows them."""


def place(folder: Path) -> Path:
    """Return where the report of a dataset's folder lies."""
    return folder / "report"


def arrays_of(prepared: PreparedDataset) -> str:
    """Return one sha256 of all arrays of a dataset, whatever its name: the same for the same data."""
    digests = [
        f"{Path(path).name} {digest}" for split in prepared.splits.values() for path, digest in split.sha256.items()
    ]
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


def load(prepared: PreparedDataset, folder: Path) -> DataQuality | None:
    """Return what the checks said of these data; None where the report is of other data, or is not there."""
    found = load_or_none(DataQuality, place(folder) / QUALITY)
    return found if found is not None and found.arrays == arrays_of(prepared) else None


def load_statistics(folder: Path, name: str) -> DataStatistics | None:
    """Return the statistics in a file of the report; None where there are none that can be read."""
    return load_or_none(DataStatistics, place(folder) / name)


def made_in(folder: Path) -> list[Path]:
    """Return the files of the report, and its folder last; what else lies there is the user's."""
    own = place(folder)
    if not own.is_dir() or own.is_symlink():
        return []
    found = load_or_none(DataQuality, own / QUALITY)
    pictures = found.pictures if found is not None else ()
    names = (*(name for name in pictures if Path(name).name == name), STATISTICS, BEFORE, SIZES, ".gitignore", QUALITY)
    return [*(own / name for name in names if (own / name).is_file()), own]


def replace(new: Path, folder: Path) -> None:
    """Put a folder that holds a new report in the place of the one of before; files of the user's stay in it."""
    if not new.exists():
        return
    own = place(folder)
    if own.is_symlink() or own.is_file():
        files.set_aside(own, folder / "set_aside")
    own.mkdir(exist_ok=True)
    for path in made_in(folder)[:-1]:
        path.unlink()
    # Its record last: what the others are goes by it.
    for path in sorted(new.iterdir(), key=lambda path: path.name == QUALITY):
        if (own / path.name).exists():
            files.set_aside(own / path.name, folder / "set_aside")
        path.replace(own / path.name)
