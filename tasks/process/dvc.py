"""DVC in processes of its own, one at a time, and its settings on this machine.

`dvc_program` makes data and moves them to the remote or from there; `dvc status` says whether they are up to date.
"""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from tasks import config
from tasks.process.child import Child, started
from tasks.process.environment import stage_environment
from tasks.runs import lineage
from tasks.system import files
from tasks.system.errors import StratagemError, UserError

BUSY_SECONDS = 600.0


def lock(root: Path, timeout: float) -> FileLock:
    """Return the lock that each command which lets DVC work in a project holds meanwhile.

    Raises:
        UserError: .dvc/tmp cannot be written.
    """
    state = root / ".dvc" / "tmp"
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{state} cannot be written ({error}): make the project's folder writable") from None
    return FileLock(state / "stratagem.lock", timeout=timeout)


def let(
    action: str, targets: Sequence[str], root: Path, options: Iterable[str] = (), more: Mapping[str, str] | None = None
) -> None:
    """Let DVC do something in a process of its own, see ``dvc_program``.

    Args:
        action: ``repro``, ``push`` or ``pull``.
        targets: files of stages, or stages in them, from the project's folder.
        root: the project's folder.
        options: before the action.
        more: what the stages' environment has in addition.

    Raises:
        UserError: what a stage refused, or .dvc/tmp cannot be written.
        StratagemError: a stage failed, DVC died, or another command was preparing data for too long.
    """
    configure()
    command = [sys.executable, "-m", "tasks.process.dvc_program", *options, action, *targets]
    try:
        # DVC refuses at once when another of its commands runs; a second flow waits here instead.
        with lock(root, BUSY_SECONDS), started(command, more or {}, stdout=sys.stderr) as child:
            try:
                code = child.wait()
            except BaseException:
                child.terminate_group()
                child.wait()
                raise
    except Timeout:
        raise StratagemError(
            "another run has been preparing data for ten minutes: wait for it, then run again"
        ) from None
    if code != 0:
        raise StratagemError(f"{', '.join(targets)}: the process in which DVC works died (exit code {code}): run again")


def is_up_to_date(target: str, root: Path) -> bool:
    """Return whether DVC finds a stage, and all that it depends on, to be done; nothing is made."""
    configure()
    command = [sys.executable, "-m", "dvc", "status", "--quiet", "--with-deps", target]
    nowhere, environment = Path(os.devnull), stage_environment(None)
    looked = Child(command, environment, folder=root, stdout=subprocess.DEVNULL, log=nowhere, own_group=False)
    try:
        return looked.wait() == 0
    finally:
        looked.kill()


def configure() -> None:
    """Make .dvc/site, which only this user may enter, and let DVC keep its hashes of files there; where there is no
    git, let DVC know that, too.

    By default DVC keeps them in /var/tmp/dvc, where everybody may write, and its diskcache unpickles what lies there
    (CVE-2025-69872). DVC does not resolve a relative path, so the place goes into .dvc/config.local, which is not
    shared. A folder that others could write to is made anew. DVC_SITE_CACHE_DIR takes precedence.

    Raises:
        UserError: .dvc cannot be written, or .dvc/site is another user's.
    """
    root = config.project_root()
    site = root / ".dvc" / "site"
    try:
        site.parent.mkdir(exist_ok=True)
        if not os.environ.get("DVC_SITE_CACHE_DIR"):
            _make_private(site)
        wanted = {"site_cache_dir": str(site)}
        if lineage.git_state(root) == (None, None):
            wanted["no_scm"] = "true"
        _set_core(site.with_name("config.local"), wanted)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written ({error}): make the project's folder writable") from None


def _make_private(site: Path) -> None:
    site.mkdir(mode=0o700, exist_ok=True)
    found = site.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UserError(
            f"{site} is not a folder of yours: let its owner remove it, or set DVC_SITE_CACHE_DIR to a folder that you "
            "alone may enter"
        )
    # As DVC itself makes it, where it is missing.
    if stat.S_IMODE(found.st_mode) & 0o077:
        shutil.rmtree(site)
        site.mkdir(mode=0o700)


def _set_core(path: Path, wanted: dict[str, str]) -> None:
    """Set in DVC's file of this machine what is missing there, or names the place where the project was before."""
    from configobj import ConfigObj  # What DVC uses; half of all commands need no data, so it is not imported above.

    known = ConfigObj(str(path), encoding="utf-8")
    before = dict(known.get("core", {}))
    moved = before.get("site_cache_dir", "").endswith("/.dvc/site")
    core = {**wanted, **before, **({"site_cache_dir": wanted["site_cache_dir"]} if moved else {})}
    if core != before:
        known["core"] = core
        with files.replacing(path) as written:
            known.filename = str(written)
            known.write()
