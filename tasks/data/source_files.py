"""The user's file or folder that a dataset is read from: which kind reads it, and whether it can be read."""

import errno
import os
import re
import stat
from pathlib import Path

from tasks.system.errors import UserError, cut, listed

SUFFIXES = {".npz": "arrays", ".csv": "table", ".tsv": "table", ".parquet": "table", ".jsonl": "table"}
"""The kind that reads a file, by the end of its name."""
BY_PRODUCTS = {
    *("@eadir", "@__thumb", "@recycle", "#recycle", "__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini"),
    *("$recycle.bin", "system volume information", "lost+found"),
}
"""Names of files and folders that systems put beside a user's, in small letters."""
# Control characters, and halves of characters.
UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
SPECIAL = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def is_by_product(name: str) -> bool:
    """Return whether a system (a NAS, Windows, macOS) created a file or folder, so that it is not data: hidden ones
    such as .DS_Store and ._1.jpg, and ``BY_PRODUCTS``."""
    return name.startswith(".") or name.lower() in BY_PRODUCTS


def kind_of(source: str) -> str:
    """Return the kind that reads an existing file or folder; ``tfds`` for any other name.

    Raises:
        UserError: no kind reads such a file, or it cannot be read.
    """
    path = Path(source)
    try:
        if path.is_dir():
            has_arrays = any(file.suffix == ".npy" and not is_by_product(file.name) for file in path.iterdir())
            return "arrays" if has_arrays else "image_folder"
        path.exists()
    except OSError as error:  # It is another user's, or its name is too long.
        raise UserError(f"SOURCE = '{cut(source)}': cannot be read ({error.strerror})") from None
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return SUFFIXES[path.suffix.lower()]
    if path.exists() or path.suffix.lower() in SUFFIXES or source.startswith((".", "/", "~")):
        what = "no kind of dataset is read from such a file" if path.exists() else "no such file or folder"
        raise UserError(
            f"SOURCE = '{source}': {what}. Allowed: a folder of images (FOLDER/<class>/*), "
            f"{', '.join(f'a file *{suffix}' for suffix in SUFFIXES)}, a folder of *.npy, or a dataset of TFDS (NAME "
            "or NAME/CONFIG)"
        )
    return "tfds"


def tables_hint(folder: Path) -> str:
    """Return the end of a message about a folder without images: which tables it holds; an empty text without any."""
    names = sorted(path.name for path in folder.glob("[!.]*") if SUFFIXES.get(path.suffix.lower()) == "table")
    return f". Of a table, give the file itself as SOURCE: {listed(names)}" if names else ""


def refuse_unreadable(source: str, root: Path) -> None:
    """Check all files and folders in the source of a dataset before DVC opens it, which would wait forever for a pipe.

    Raises:
        UserError: names what is neither a file nor a folder, cannot be read, has a name that DVC cannot write, or is a
            link to a folder (in which DVC would see no change), out of the source, or to nothing.
    """
    whole = root / source
    if not os.path.lexists(whole):  # As in a clone; the kind of dataset says so.
        return
    wrong: dict[str, str] = {}
    real = os.path.realpath(whole)
    if not whole.is_dir():
        if reason := _unreadable(str(whole), os.path.dirname(real)):
            raise UserError(f"dataset.source = '{source}' is {reason}. Give a file or folder that can be read")
        return

    def within(path: Path | str) -> str:
        return UNWRITABLE.sub(lambda found: ascii(found[0])[1:-1], os.path.relpath(path, whole))

    places = [str(whole)]
    while places:
        place = places.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        places.append(entry.path)
                    if reason := _unreadable(entry.path, real):
                        wrong[within(entry.path)] = reason
        except OSError as error:
            wrong[within(place)] = f"cannot be read: {error.strerror}"
    if wrong:
        named = listed([f"{path} ({reason})" for path, reason in sorted(wrong.items())])
        raise UserError(
            f"dataset.source = '{source}': {len(wrong)} of its files and folders cannot be used: {named}. Put "
            "what can be read in their place, or remove them"
        )


def _unreadable(path: str, inside: str) -> str | None:
    """Return why a file or folder cannot be part of a source, of which the real path is ``inside``; None if it can.

    There may be a million of them, so no ``Path`` is made of each.
    """
    if UNWRITABLE.search(os.path.basename(path)):
        return "a name with characters that no text has"
    is_link = False
    try:
        mode = os.lstat(path).st_mode
        if is_link := stat.S_ISLNK(mode):
            mode = os.stat(path).st_mode
    except OSError as error:
        if is_link:
            return "a link round in a circle" if error.errno == errno.ELOOP else "a link to nothing"
        return f"cannot be read: {error.strerror}"
    if is_link and stat.S_ISDIR(mode):
        return "a link to a folder, in which DVC would see no change"
    if is_link and not Path(os.path.realpath(path)).is_relative_to(inside):
        return "a link out of it"
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return SPECIAL.get(stat.S_IFMT(mode), "no file")
    try:
        if stat.S_ISREG(mode):
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None
