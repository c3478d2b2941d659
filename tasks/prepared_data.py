"""data/<name>/prepared: what lies there, and whether it is what its data version says. No framework is imported."""

import re
import sys
from pathlib import Path

from tasks import config, files, records
from tasks.errors import UserError
from tasks.records import PreparedDataset

MADE = re.compile(r"manifest\.json|[\w.-]+_(images|labels)\.npy")


def set_foreign_aside(name: str) -> list[Path]:
    """Move what `prepare` did not make out of data/<name>/prepared, and say so; return where it now lies.

    The next `prepare`, and DVC before it, remove that folder.
    """
    root = config.project_root()
    folder = root / "data" / name
    prepared = folder / "prepared"
    if not prepared.is_dir() or not files.is_inside(prepared, root):
        return []
    made = _made(folder)
    foreign = [path for path in sorted(prepared.iterdir()) if path.name not in made]
    moved = [files.set_aside(path, folder / "set_aside") for path in foreign]
    for path in moved:
        print(
            f"data/{name}/prepared held what `prepare` did not make: it now lies at {path.relative_to(root)}",
            file=sys.stderr,
        )
    return moved


def _made(folder: Path) -> set[str]:
    """Return the names of the files that `prepare` made in a dataset's folder."""
    try:
        prepared = records.load(PreparedDataset, folder / "prepared" / "manifest.json")
    except UserError:
        # Missing or damaged: then a name must do, and only where DVC knows the folder.
        known = (folder / "dvc.lock").is_file()
        return {path.name for path in (folder / "prepared").iterdir() if known and MADE.fullmatch(path.name)}
    arrays = {Path(path).name for split in prepared.splits.values() for path in (split.images, split.labels)}
    return arrays | {"manifest.json"}
