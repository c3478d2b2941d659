"""data/<name>/report: statistics of a dataset, results of its checks, and pictures.

The report is not in `prepared`, so it is not part of the data version. This module imports no framework and no NumPy.
"""

import hashlib
from pathlib import Path

from tasks.records import DataQuality, PreparedDataset, load_or_none

QUALITY, STATISTICS = "quality.json", "statistics.json"
SIZES = "test_sizes.npy"
"""Height and width of the original test images, int32 (n, 2), if the kind of dataset provides them."""


def arrays_of(prepared: PreparedDataset) -> str:
    """Return one sha256 over all arrays of a dataset, independent of its name."""
    digests = [
        f"{Path(path).name} {digest}" for split in prepared.splits.values() for path, digest in split.sha256.items()
    ]
    return hashlib.sha256("\n".join(sorted(digests)).encode()).hexdigest()


def load(prepared: PreparedDataset, folder: Path) -> DataQuality | None:
    """Return the results of the checks; None without a report of these data."""
    found = load_or_none(DataQuality, folder / "report" / QUALITY)
    return found if found is not None and found.arrays == arrays_of(prepared) else None


def made_in(folder: Path) -> set[str]:
    """Return the names of the report's own files in a dataset's folder; other files in it belong to the user."""
    found = load_or_none(DataQuality, folder / "report" / QUALITY)
    return {*(found.pictures if found is not None else ()), STATISTICS, SIZES, QUALITY, ".gitignore"}
