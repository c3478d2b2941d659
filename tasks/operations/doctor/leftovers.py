"""What killed commands have left: runs that seem to be at work, messages that nobody got, files, processes."""

import contextlib
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil

from tasks import records, runs
from tasks.operations.doctor import Here, Remark
from tasks.system.errors import UserError, listed

RECONCILE = "stratagem reconcile"
# What our commands start, and what ends with them: one whose parent is gone was left.
OURS = ("tasks", "flows.operate.server", "tasks.process.dvc_program", "tasks.tracking.pages")


def look(here: Here) -> Iterator[Remark]:
    """Yield each kind of them with its number; the lists of runs are not asked, because they write what they know."""
    at_work, crashed, unsent, partial = _look_at_runs(here.root)
    if crashed:
        yield Remark("warning", f"runs whose process died: {listed(crashed, 3)}", RECONCILE)
    if unsent:
        yield Remark(
            "warning", f"runs with more to tell MLflow: {listed(unsent, 3)}", f"{RECONCILE}, or stratagem sync"
        )
    if partial:
        yield Remark("warning", f"half-written checkpoints or models: {listed(partial, 3)}", RECONCILE)
    dead = [holder.what for _, holder in runs.crashed_holders()]
    if dead:
        yield Remark("warning", f"commands that were killed at work: {listed(dead, 3)}", RECONCILE)
    if untold := len(list(runs.unreported())):
        yield Remark("warning", f"flow runs whose end Prefect was not told of: {untold}", RECONCILE)
    patterns = ("data/*/.scratch.*", "data/*/.prepared.*", "mlruns/.cache.*")
    scratch = [path for pattern in patterns for path in here.root.glob(pattern)]
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    if scratch and not any(
        _is_ours(process, here.root) for process in others
    ):  # Of one at work it may be half-written.
        names = [str(path.relative_to(here.root)) for path in scratch]
        yield Remark("warning", f"half-prepared or cached data: {listed(names, 3)}", RECONCILE)
    orphans = list(_orphans(here.root))
    if orphans:
        text = f"processes whose command is gone: {listed([f'{pid} ({what})' for pid, what in orphans], 3)}"
        yield Remark("warning", text, f"kill {' '.join(str(pid) for pid, _ in orphans)}")
    if not (crashed or unsent or partial or dead or untold or scratch or orphans):
        yield Remark("ok", f"nothing; {len(at_work)} run{'s are' if len(at_work) != 1 else ' is'} at work")


def _look_at_runs(root: Path) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return the runs at work, those that died, those with more to tell, those with half-written files."""
    at_work: list[str] = []
    crashed: list[str] = []
    unsent: list[str] = []
    partial: list[str] = []
    places = ("runs", "comparisons", "sweeps")
    for folder in [one for place in places for one in sorted(root.glob(f"mlruns/{place}/*"))]:
        name = folder.name[:8]
        try:
            if records.load(records.RunStatus, folder / "status.json").status == "RUNNING":
                run = records.load(records.Run, folder / "records" / "run.json")
                (crashed if runs.is_abandoned(run) else at_work).append(name)
        except UserError:  # It has just begun, or another check of it tells.
            continue
        if (folder / "unsent.jsonl").exists():
            unsent.append(name)
        if name not in at_work and (
            any(folder.glob("checkpoints/.*.partial")) or any(folder.glob("models/.*.partial*"))
        ):
            partial.append(name)
    return at_work, crashed, unsent, partial


def _orphans(root: Path) -> Iterator[tuple[int, str]]:
    """Yield the processes of this user in this project that a killed command has left."""
    with contextlib.suppress(psutil.Error):  # Not every system lets a user look at its first process.
        if any("stratagem" in Path(word).name for word in psutil.Process(1).cmdline()):
            return  # In a container whose first process is a command of ours, its processes are not orphans.
    for process in psutil.process_iter():
        try:
            if process.ppid() == 1 and _is_ours(process, root):
                yield process.pid, " ".join(process.cmdline()[1:])[:60]
        except psutil.Error:
            continue


def _is_ours(process: psutil.Process, root: Path) -> bool:
    try:
        with process.oneshot():
            if process.uids().effective != os.geteuid():
                return False
            command = process.cmdline()
            named = any(flag == "-m" and module in OURS for flag, module in pairwise(command))
            return named and Path(process.cwd()) == root.resolve()
    except (psutil.Error, OSError):
        return False
