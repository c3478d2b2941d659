"""Room on the disks that a run writes to, in bytes and in files."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tasks.operations.doctor import GIB, Here, Remark, prefect_home, size

LEAST_BYTES, USUAL_BYTES = GIB // 4, 2 * GIB
LEAST_FILES, USUAL_FILES = 1_000, 10_000


def look(here: Here) -> Iterator[Remark]:
    """Yield how much room each file system has, once."""
    seen = set()
    places = {
        "the project": here.root,
        "temporary files": Path(tempfile.gettempdir()),
        "Prefect": prefect_home(here.root),
    }
    for name in ("mlruns", "data"):  # They may be elsewhere, as by a link.
        places[f"{name}/"] = here.root / name
    for what, place in places.items():
        there = next(folder for folder in (place, *place.absolute().parents) if os.path.exists(folder))
        if (device := there.stat().st_dev) in seen:
            continue
        seen.add(device)
        disk = os.statvfs(there)
        free, files = disk.f_bavail * disk.f_frsize, disk.f_favail
        few = disk.f_files > 0 and files < USUAL_FILES  # Some file systems have no number of files.
        text = f"{size(free)} free for {what} ({there})" + (f", room for {files:,} files" if disk.f_files else "")
        if free >= USUAL_BYTES and not few:
            yield Remark("ok", text)
            continue
        full = free < LEAST_BYTES or (disk.f_files > 0 and files < LEAST_FILES)
        yield Remark("error" if full else "warning", text, "stratagem runs prune --keep-last 10; df -h; df -i")
