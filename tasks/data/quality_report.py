"""data/<name>/report: statistics of a dataset, results of its checks, and pictures.

The report lies beside `prepared`, so it is not part of the data version. Neither a framework nor NumPy is imported.
"""

import hashlib
from pathlib import Path

from tasks.records import DataQuality, DataStatistics, PreparedDataset
from tasks.records.record import load_or_none
from tasks.system import files

QUALITY, STATISTICS, BEFORE = "quality.json", "statistics.json", "statistics_before.json"
SIZES = "test_sizes.npy"
"""Height and width of the test images before they were prepared, int32 (n, 2), if the kind of dataset knows them."""


def place(folder: Path) -> Path:
    """Return the folder of the report."""
    return folder / "report"


def arrays_of(prepared: PreparedDataset) -> str:
    """Return one sha256 over all arrays of a dataset, independent of its name."""
    digests = [
        f"{Path(path).name} {digest}" for split in prepared.splits.values() for path, digest in split.sha256.items()
    ]
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


def load(prepared: PreparedDataset, folder: Path) -> DataQuality | None:
    """Return the results of the checks; None if there is no report of these data."""
    found = load_or_none(DataQuality, place(folder) / QUALITY)
    return found if found is not None and found.arrays == arrays_of(prepared) else None


def load_statistics(folder: Path, name: str) -> DataStatistics | None:
    """Return the statistics in a file of the report; None if it is missing or damaged."""
    return load_or_none(DataStatistics, place(folder) / name)


def made_in(folder: Path) -> list[Path]:
    """Return the files of the report, and last its folder; other files in it are the user's."""
    own = place(folder)
    if not own.is_dir() or own.is_symlink():
        return []
    found = load_or_none(DataQuality, own / QUALITY)
    pictures = found.pictures if found is not None else ()
    names = (*(name for name in pictures if Path(name).name == name), STATISTICS, BEFORE, SIZES, ".gitignore", QUALITY)
    return [*(own / name for name in names if (own / name).is_file()), own]


def replace(new: Path, folder: Path) -> None:
    """Replace the report by that in the folder ``new``; files of the user's stay."""
    if not new.exists():
        return
    own = place(folder)
    if own.is_symlink() or own.is_file():
        files.set_aside(own, folder / "set_aside")
    own.mkdir(exist_ok=True)
    for path in made_in(folder)[:-1]:
        path.unlink()
    # The record last, because it names the other files.
    for path in sorted(new.iterdir(), key=lambda path: path.name == QUALITY):
        if (own / path.name).exists():
            files.set_aside(own / path.name, folder / "set_aside")
        path.replace(own / path.name)
