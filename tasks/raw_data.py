"""data/<name>/raw: whether the shards that a stream reads are those that the data version was made of.

They may be larger than memory, so what was read once is not read again: .dvc/tmp keeps the md5 of each file with its
inode, size and times, of which nobody can set that of the last change. No framework is imported.
"""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from tasks import config, data_state, lineage, prepared_data
from tasks.errors import UserError
from tasks.records import PreparedDataset


def verify(prepared: PreparedDataset) -> None:
    """Compare the shards in a dataset's raw folder with the md5 that its dvc.lock has; nothing without a lock.

    Raises:
        UserError: names the file that is missing, damaged or changed, and what makes it again.
    """
    root = config.project_root()
    version = lineage.data_version(prepared.name, "raw")
    if version is None:
        return
    folder = root / "data" / prepared.name / "raw"
    place = folder.relative_to(root).as_posix()
    again = f"Move {place} away, then make it again: stratagem prepare --set dataset.name={prepared.name}"
    listed = prepared_data.listed(version, root)
    try:
        files = [folder / path for path in listed] if listed else [path for path in folder.rglob("*") if path.is_file()]
        found = _digests(sorted(files), folder, root / ".dvc" / "tmp" / f"stratagem-{prepared.name}-raw")
    except OSError as error:
        shard = Path(error.filename or folder)
        raise UserError(f"{shard.relative_to(root)}: cannot be read ({error.strerror}). {again}") from None
    for path, expected in (listed or {}).items():
        if found[path] != expected:
            raise UserError(
                f"{place}/{path}: damaged or changed, its md5 is {found[path]} and DVC's listing says {expected}. "
                f"{again}"
            )
    if listed is None and prepared_data.listing_md5(found) != version:
        raise UserError(
            f"{place}: changed since data/{prepared.name}/prepared was made of it, it is not that of its dvc.lock. "
            f"{again}"
        )


def _digests(files: list[Path], folder: Path, record: Path) -> dict[str, str]:
    """Return the md5 of each file by its path in a folder; read only those that are not as they were when last read."""
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    found, kept = {}, {}
    for path in files:
        state = path.stat()
        signature = [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
        name = path.relative_to(folder).as_posix()
        before = known.get(name)
        if before and before[0] == signature:
            found[name] = before[1]
        else:
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, _md5).hexdigest()
        if time.time() - state.st_ctime_ns / 1e9 > data_state.SETTLED_SECONDS:
            kept[name] = [signature, found[name]]
    if kept != known:
        with contextlib.suppress(OSError):  # Then they are read again the next time.
            written = record.with_name(f"{record.name}.{os.getpid()}")
            written.write_text(json.dumps(kept), encoding="utf-8")
            written.replace(record)
    return found


def _md5() -> "hashlib._Hash":
    return hashlib.md5(usedforsecurity=False)
