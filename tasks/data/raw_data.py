"""data/<name>/raw: whether the shards that a stream reads are those that the data version was made of.

They may be larger than memory, so what was read once is not read again: .dvc/tmp keeps the md5 of each file with its
inode, size and times, of which nobody can set that of the last change. No framework is imported.
"""

import contextlib
import json
import time
from pathlib import Path

from tasks import config
from tasks.data import data_state, prepared_data
from tasks.records import PreparedDataset
from tasks.runs import lineage
from tasks.system import files
from tasks.system.errors import UserError


def verify(prepared: PreparedDataset, trusted_after_seconds: float = data_state.TRUSTED_AFTER_SECONDS) -> None:
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
    listed = prepared_data.md5_by_file(version, root)
    try:
        paths = [folder / path for path in listed] if listed else [path for path in folder.rglob("*") if path.is_file()]
        found = _digests(
            sorted(paths), folder, root / ".dvc" / "tmp" / f"stratagem-{prepared.name}-raw", trusted_after_seconds
        )
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


def _digests(paths: list[Path], folder: Path, record: Path, trusted_after_seconds: float) -> dict[str, str]:
    """Return the md5 of each file by its path in a folder; read only those that are not as they were when last read."""
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    found, kept = {}, {}
    for path in paths:
        state = path.stat()
        signature = [state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns]
        name = path.relative_to(folder).as_posix()
        before = known.get(name)
        if before and before[0] == signature:
            found[name] = before[1]
        else:
            found[name] = files.digest(path, "md5")
        if time.time() - state.st_ctime_ns / 1e9 > trusted_after_seconds:
            kept[name] = [signature, found[name]]
    if kept != known:
        # Unwritten, they are read again the next time.
        with contextlib.suppress(OSError), files.replacing(record) as written:
            written.write_text(json.dumps(kept), encoding="utf-8")
    return found
