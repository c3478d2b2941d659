"""Which project this is, and which machine: by these a process knows whether what another one left is its to end.

A host's name and a path are no identity: two containers may have both in common.
"""

import contextlib
import os
import uuid
from pathlib import Path

from tasks import config
from tasks.system import network
from tasks.system.files import unwritable


def project_id() -> str:
    """Return what this project's folder is called by others that share an MLflow server; made when first asked for.

    It lies in mlruns/.id and ends with that file's number in the file system: it stays when the folder is moved there,
    is seen by all containers that share the folder, and is another one in a copy, whose original may be at work.

    Raises:
        StratagemError: mlruns/.id cannot be read or written.
    """
    path = config.project_root() / "mlruns" / ".id"
    try:
        return _read(path) or _make(path)
    except OSError as error:
        raise unwritable(path, error) from None


def _read(path: Path) -> str | None:
    """Return the id; None where there is no file, or a damaged one."""
    with contextlib.suppress(FileNotFoundError, ValueError), path.open(encoding="ascii") as file:
        return f"{uuid.UUID(file.read(64)).hex}.{os.fstat(file.fileno()).st_ino}"
    return None


def _make(path: Path) -> str:
    """Make the file in one step, whole, unless another process has just done it; return the id."""
    path.parent.mkdir(exist_ok=True)
    if path.exists():  # Damaged. What the old id names is then ended by nobody: better than to end what is at work.
        path.unlink(missing_ok=True)
    new = uuid.uuid4().hex
    aside = path.with_name(f".id.{new}")
    aside.write_text(new, encoding="ascii")
    try:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    except OSError:  # A file system without links.
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    return _read(path) or _make(path)


def store_name() -> str:
    """Return the name by which a run remembers its MLflow store: empty for the project's own, which may be moved
    with it."""
    return network.without_userinfo(os.environ.get("MLFLOW_TRACKING_URI", ""))


def boot_id() -> str:
    """Return what names this machine from its start to its end, in all containers; empty where nothing does."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def process_space() -> str:
    """Return what names the processes among which a process id means one; empty where nothing does."""
    with contextlib.suppress(OSError):
        return f"{boot_id()}:{os.stat('/proc/self/ns/pid').st_ino}"
    return ""
