"""The user's source file or folder of a dataset: which kind reads it, and whether it is readable."""

import os
import re
from pathlib import Path

from tasks.system.errors import UserError, cut, listed

SUFFIXES = {".npz": "arrays", **dict.fromkeys((".csv", ".tsv", ".parquet", ".jsonl", ".ndjson"), "table")}
"""The kind that reads a file, by its suffix."""
ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")
OF_TFDS = re.compile(r"\w+([/:][\w.-]+)*|[\w.]+:\w+")
"""What can be NAME, NAME/CONFIG, NAME:VERSION or MODULE:CLASS, if no file has this name; any other text is a path."""
# Control characters and surrogates.
UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def kind_of(source: str) -> str:
    """Return the kind that reads an existing file or folder; ``tfds`` for any other name.

    Raises:
        UserError: no kind reads such a file, or it is unreadable.
    """
    path = Path(source)
    try:
        if path.is_dir():
            from tasks.data.encoding.inputs import is_by_product  # It imports NumPy, and most sources are names.

            has_arrays = any(file.suffix == ".npy" and not is_by_product(file.name) for file in path.iterdir())
            return "arrays" if has_arrays else "image_folder"
        path.exists()
    except OSError as error:  # Another user owns it, or its name is too long.
        raise UserError(f"SOURCE = '{cut(source)}': cannot be read ({error.strerror})") from None
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return SUFFIXES[path.suffix.lower()]
    if path.exists() or path.suffix.lower() in (*SUFFIXES, *ARCHIVES) or not OF_TFDS.fullmatch(source):
        what = "no such file or folder"
        if path.exists():
            is_archive = path.suffix.lower() in ARCHIVES
            todo = "Unpack it, and use what is inside" if is_archive else "Save a table as .csv, arrays as .npz"
            what = f"no kind of dataset reads such a file. {todo}"
        raise UserError(
            f"SOURCE = '{source}': {what}. Allowed: a folder of images (FOLDER/<class>/*), "
            f"{', '.join(f'a file *{suffix}' for suffix in SUFFIXES)}, a folder of *.npy, or a dataset of TFDS (NAME "
            "or NAME/CONFIG)"
        )
    return "tfds"


def tables_hint(folder: Path) -> str:
    """Return the end of a message about a folder without images: the tables in it, or an empty text."""
    names = sorted(path.name for path in folder.glob("[!.]*") if SUFFIXES.get(path.suffix.lower()) == "table")
    return f". For a table, give the file itself as SOURCE: {listed(names)}" if names else ""


def refuse_unreadable(source: str, root: Path) -> None:
    """Check all files and folders in the source of a dataset before DVC opens it.

    Raises:
        UserError: a path is neither a file nor a folder, is unreadable, has a name that DVC cannot write, or is a link
            to a folder, whose changes DVC would not detect.
    """
    if "${" in source:
        raise UserError(
            f"dataset.source = '{source}': DVC reads ${{ as the start of a variable. Rename the file or folder"
        )
    whole = str(root / source)
    places = [os.path.join(place, name) for place, *names in os.walk(whole) for own in names for name in own]
    wrong = {os.path.relpath(path, whole): reason for path in places or [whole] if (reason := _unreadable(path))}
    if wrong and os.path.lexists(whole):  # In a clone it may be missing, which the kind of dataset reports.
        named = listed([f"{path} ({reason})" for path, reason in sorted(wrong.items())])
        raise UserError(
            f"dataset.source = '{source}': {len(wrong)} of its files and folders cannot be used: {named}. Replace "
            "or remove them"
        )


def _unreadable(path: str) -> str | None:
    """Return why a file or folder cannot be part of a source; None if it can."""
    if UNWRITABLE.search(os.path.basename(path)):
        return "its name has invalid characters"
    if not (os.path.isfile(path) or os.path.isdir(path)):
        return "neither a file nor a folder"
    if os.path.islink(path) and os.path.isdir(path):
        return "a link to a folder, whose changes DVC would not see"
    return None if os.access(path, os.R_OK, effective_ids=True) else "cannot be read"
