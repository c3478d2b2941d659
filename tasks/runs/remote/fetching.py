"""A run brought back from its remote: all of it into a project that has it not, or the checkpoints that were lost."""

import contextlib
import json
import re
import shutil
import socket
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from filelock import FileLock

from tasks import config, records, runs
from tasks.records import Copy, Run
from tasks.runs import committed, outcome
from tasks.runs.remote.address import Place, check, open_place, reason
from tasks.runs.remote.copying import read_index, step_of, steps_in, taken_over, write_index
from tasks.system import clock, files
from tasks.system.errors import StratagemError, UserError, listed

FETCHED = re.compile("[0-9a-f]{1,32}")
# The records of stages: without a file that they name, the stages are done again.
RESULTS = ("summary.json", *outcome.RESULTS.values())


def bring(settings: config.Settings, resume: str | None) -> None:
    """Bring the run that is to be resumed into mlruns/runs, where it is not there and ``checkpoint.remote`` has it.

    Args:
        settings: name the remote and the dataset.
        resume: the id of a run, the first letters of it, or ``latest`` on the dataset; None brings nothing.

    Raises:
        UserError: the remote has no such run either, or it is damaged there; or see ``check``.
        StratagemError: the remote does not answer.
    """
    address = settings.checkpoint.remote
    if (
        address is None
        or resume is None
        or not (resume == "latest" or FETCHED.fullmatch(resume))
        or _is_here(settings, resume)
    ):
        return
    check(address)
    try:
        place = open_place(address).below("runs")
        known = place.folders()
        run_id = _latest(place, known, settings.dataset.name) if resume == "latest" else _named(known, resume)
    except StratagemError:
        raise
    except Exception as error:  # Each file system has errors of its own.
        raise StratagemError(
            f"--resume {resume}: it is not here, and checkpoint.remote = {address} does not answer: {reason(error)}"
        ) from None
    if run_id is None:
        on = f" on {settings.dataset.name}" if resume == "latest" else ""
        raise UserError(
            f"--resume {resume}: there is no such run{on} in mlruns/, nor at checkpoint.remote = {address}, which has "
            f"{listed(known, 5) or 'none'}"
        )
    _bring(place.below(run_id), run_id, address)


def _is_here(settings: config.Settings, resume: str) -> bool:
    try:
        return runs.find_named(settings, resume) is not None
    except UserError:
        return False


def _named(known: Iterable[str], resume: str) -> str | None:
    found = [name for name in known if runs.is_id(name) and name.startswith(resume)]
    if len(found) > 1:
        raise UserError(
            f"--resume {resume}: {len(found)} runs at the remote begin so: {listed(found, 5)}. Give more of it"
        )
    return found[0] if found else None


def _latest(place: Place, known: Iterable[str], dataset: str) -> str | None:
    """Return the run on a dataset that was at work last."""
    found = []
    for run_id in filter(runs.is_id, known):
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, UserError):
            texts = read_index(place.below(run_id)).texts
            if json.loads(texts["records/run.json"])["settings"]["dataset"]["name"] == dataset:
                found.append((json.loads(texts["status.json"])["at"], run_id))
    return max(found)[1] if found else None


def _bring(place: Place, run_id: str, address: str) -> None:
    """Bring a run beside its folder, look at each file, rename it, and say there that its place is here now."""
    all_runs = config.project_root() / "mlruns" / "runs"
    all_runs.mkdir(parents=True, exist_ok=True)
    with FileLock(all_runs.parent / ".fetch.lock"):
        for left in all_runs.glob(".*.partial"):
            shutil.rmtree(left)
        partial = all_runs / f".{run_id}.partial"
        try:
            index = read_index(place)
            there = place.find()
            _refuse_no_room(sum(there.values()), all_runs, run_id)
            partial.mkdir()
            _bring_texts(index, partial)
            _bring_files(place, index, partial)
            brought = _bring_checkpoints(place, there, partial)
            _accept(partial, run_id, index)
            partial.rename(all_runs / run_id)
            ours = {"project": runs.project_id(), "host": socket.gethostname(), "at": clock.now()}
            write_index(place, index.model_copy(update=ours))
        except StratagemError:
            raise
        except (FileNotFoundError, ValueError) as error:
            raise UserError(f"run {run_id} at {address} is damaged ({reason(error)}): resume another one") from None
        except Exception as error:
            if full := files.find_full_disk(error, all_runs):
                raise full from None
            raise StratagemError(f"run {run_id} cannot be brought from {address}: {reason(error)}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    at = f"checkpoints of steps {listed([str(step) for step in brought], 9)}" if brought else "no checkpoint yet"
    print(f"run {run_id} was brought from {address}: {at}; it was at work on {index.host}", file=sys.stderr)


def _refuse_no_room(needed: int, folder: Path, run_id: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"run {run_id} cannot be brought here: it has {needed / 1e6:,.1f} MB, and {folder} has "
            f"{free / 1e6:,.1f} MB free. Make room"
        )


def _bring_texts(index: Copy, folder: Path) -> None:
    for name, text in index.texts.items():
        path = _inside(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _bring_files(place: Place, index: Copy, folder: Path) -> None:
    """Bring the other files; where one was just being replaced, the stages are done again."""
    for name, digest in index.files.items():
        path = _inside(folder, name)
        with contextlib.suppress(FileNotFoundError):
            place.get(f"files/{name}", path)
            if files.digest(path) == digest:
                continue
        path.unlink(missing_ok=True)
        for result in RESULTS:
            (folder / result).unlink(missing_ok=True)


def _bring_checkpoints(place: Place, there: Iterable[str], folder: Path) -> list[int]:
    """Bring all checkpoints that are whole; return their steps. Damaged ones are named, and stay there."""
    found = []
    names = [PurePosixPath(name) for name in there]
    states = [step_of(name.as_posix()) for name in names if name.name == committed.STATE]
    for step in sorted(step for step in states if step is not None):
        partial = folder / "checkpoints" / f".{step}.partial"
        try:
            for name in names:
                if name.parts[:-1] == ("checkpoints", str(step)):
                    place.get(name.as_posix(), _inside(partial, name.name))
            committed.verify(partial)
            partial.rename(partial.with_name(str(step)))
            found.append(step)
        except (FileNotFoundError, ValueError, KeyError) as error:
            print(
                f"the checkpoint of step {step} at the remote is damaged ({error}): it is left there", file=sys.stderr
            )
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return found


def _accept(folder: Path, run_id: str, index: Copy) -> None:
    """Refuse a run that is not the one that its folder's name says; end what its machine did."""
    run = records.load(Run, folder / "records" / "run.json")
    if run.run_id != run_id or run.folder != f"mlruns/runs/{run_id}":
        raise ValueError(f"its record is of {run.folder}")
    status = records.load(records.RunStatus, folder / "status.json")
    if status.status == "RUNNING":
        reason = f"it was at work on {index.host}, and was brought here"
        records.save(status.model_copy(update={"status": "KILLED", "reason": reason}), folder / "status.json")


def _inside(folder: Path, name: str) -> Path:
    """Return where a file of a name goes, which somebody else may have chosen.

    Raises:
        ValueError: it leads out of the folder, or would be hidden.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or any(part.startswith(".") or "\\" in part for part in parts):
        raise ValueError(f"it has a file called {name!r}")
    return folder.joinpath(*parts)


def check_still_ours(run: Run, address: str | None) -> None:
    """Check, before a run that is here is resumed, that no other copy of the project has gone on with it; and bring its
    checkpoints where none is here any more. A remote that does not answer is no reason to refuse.

    Raises:
        UserError: another copy of the project has gone on with it.
    """
    if address is None:
        return
    folder = config.project_root() / run.folder
    try:
        place = open_place(address).below("runs", run.run_id)
        index = read_index(place)
        lost = index.project == runs.project_id() and not steps_in(folder)
        if lost and (brought := _bring_checkpoints(place, place.find(), folder)):
            steps = listed([str(step) for step in brought], 9)
            print(f"checkpoints of steps {steps} were brought from {address}", file=sys.stderr)
    except UserError:
        raise
    except Exception:
        return
    if index.project != runs.project_id():
        raise UserError(taken_over(run.run_id, address, index))
