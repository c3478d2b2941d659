"""Trains a run again and compares the results.

The code comes from git, with the run's uncommitted changes, the settings from the run's record, the data from data/ or
DVC's cache. They go into a separate folder, which has no repository, shares mlruns/ with the project, and links to the
prepared data. The user's files, index and branches stay unchanged, as do the machine and the installed packages.
"""

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from tasks import config
from tasks.data import prepared_data
from tasks.operations import preconditions
from tasks.process import stages
from tasks.records import Change, EvaluationResult, Reproduction, Run, TrainingResult
from tasks.runs import entries, lineage, listing, locks, outcome, repository
from tasks.strategies import engines
from tasks.system import errors, machine, temporary, units
from tasks.system.child import Child, guarded
from tasks.system.errors import StratagemError, UserError

COMMAND = "from flows.cli.main import main; main()"

BACK, MATTERS, LOST = "restored", "matters", "cannot be restored"
"""The effects of ``Change``."""
PART = re.compile(r"^(?=diff --git )", re.MULTILINE)


def reproduce(name: str, allow_changes: bool = False, dry_run: bool = False) -> Reproduction:
    """Train a run again, as a new run, and return whether the results are the same.

    Args:
        name: see ``entries.resolve``.
        allow_changes: train even with other packages or on another machine.
        dry_run: only return what differs today.

    Raises:
        UserError: there is no such run, it did not finish its training, or its code or data cannot be restored.
        StratagemError: the training failed.
    """
    run = entries.resolve(name)
    if outcome.load(run, TrainingResult) is None:
        raise UserError(
            f"run {run.run_id} did not finish its training, so there is nothing to compare with: stratagem run "
            f"--resume {run.run_id}"
        )
    settings = config.parse(run.settings)
    _refuse(run, settings)
    with _checkout(run, settings) as (folder, changes):
        refusal = _refusal(run, changes, allow_changes)
        if dry_run:
            reason = refusal or "it can be trained again"
            return Reproduction(run_id=run.run_id, changes=tuple(changes), reason=reason)
        if refusal is not None:
            raise UserError(refusal)
        preconditions.check_writable()
        preconditions.check_devices(settings)
        locks.refuse_locked(settings)
        new = _train(run, folder)
    done = judge(run, new, settings, changes)
    outcome.save(new, done)
    stages.record_reproduction(run_id=new.run_id)
    return done


def _refuse(run: Run, settings: config.Settings) -> None:
    """Refuse a run that obviously cannot be trained again."""
    if engines.is_foreign(settings.strategy.cluster):
        raise UserError(
            f"run {run.run_id} was trained by a cluster that someone else starts (strategy.launcher = "
            f"'{run.settings['strategy'].get('launcher')}'): start its members with the run's settings at its commit"
        )
    if "@" in (settings.model.initial or "") and str(settings.model.initial).startswith("models:"):
        raise UserError(
            f"run {run.run_id} began with model.initial = {settings.model.initial}, and the alias may now be another "
            "version's: train with models:/NAME/VERSION"
        )
    if run.lineage.git_commit is None:
        raise UserError(f"run {run.run_id} has no git commit, so its code cannot be restored")
    if run.lineage.data_version is None:
        raise UserError(f"run {run.run_id} has no data version, so its data cannot be restored")


@contextmanager
def _checkout(run: Run, settings: config.Settings) -> Iterator[tuple[Path, list[Change]]]:
    """Yield a folder with the run's code, settings and data, and the differences from today.

    The folder is removed at the end of the block; after a kill, by the next command that makes temporary files.
    """
    root, name = config.project_root(), settings.dataset.name
    with tempfile.TemporaryDirectory(dir=temporary.folder()) as made:
        folder = Path(made) / "checkout"
        write_commit(str(run.lineage.git_commit), folder)
        kept = root / run.folder / repository.FILE
        missing = _apply(kept, folder) if kept.exists() else []
        (folder / "params.yaml").unlink(missing_ok=True)  # A link in the commit could lead to a user's file.
        (folder / "params.yaml").write_text(yaml.safe_dump(run.settings, sort_keys=False), encoding="utf-8")
        _bring_initial(settings, folder)
        found = bring_data(name, str(run.lineage.data_version), folder)
        yield folder, list(_changes(run, settings, folder, missing, found))


def write_commit(commit: str, folder: Path) -> None:
    """Write the project's files of a commit into a new folder.

    Raises:
        UserError: the repository has no such commit, or the commit has no project in this folder.
    """
    repository.export(commit, config.project_root(), folder)
    (folder / ".dvc").mkdir(exist_ok=True)
    mlruns = folder / "mlruns"
    if mlruns.is_symlink():
        mlruns.unlink()
    shutil.rmtree(mlruns, ignore_errors=True)
    mlruns.symlink_to((config.project_root() / "mlruns").resolve(), target_is_directory=True)


def _apply(diff: Path, folder: Path) -> list[str]:
    """Apply a run's uncommitted changes to a checkout; return a line for each that is missing or cannot be applied."""
    import pygit2

    text, *parts = PART.split(diff.read_bytes().decode())  # Keeps the line endings.
    left_out = [line for line in text.splitlines() if line]
    pygit2.init_repository(str(folder))
    try:
        made = pygit2.Repository(str(folder))
        for part in parts:
            part, missing = repository.told_apart(part)
            left_out += missing
            try:
                made.apply(pygit2.Diff.parse_diff(part), pygit2.enums.ApplyLocation.WORKDIR)
            except (pygit2.GitError, KeyError, ValueError, OSError):
                left_out.append(f"cannot be applied: {part.splitlines()[0].rpartition(' b/')[2]}")
    finally:
        shutil.rmtree(folder / ".git")
    return left_out


def bring_data(name: str, version: str, folder: Path) -> str | None:
    """Link a data version of a dataset into the checkout of a commit.

    Return where the data are, such as ``DVC's cache``; None if this machine does not have that version.
    """
    root = config.project_root()
    place, today = folder / "data" / name, root / "data" / name
    if _version(place, "prepared") != version:
        if _version(today, "prepared") != version:
            return None
        _refuse_outside(place, folder)
        place.mkdir(parents=True, exist_ok=True)
        for file in ("params.yaml", "dvc.yaml", "dvc.lock"):
            (place / file).unlink(missing_ok=True)  # A link in the commit could lead to a user's file.
            shutil.copyfile(today / file, place / file)
    _refuse_outside(place, folder)
    found = _bring(place, "prepared", version)
    if found is not None and (raw := _version(place, "raw")) is not None:
        _bring(place, "raw", raw)  # Only streaming needs it; without it, streaming fails with its own message.
    return found


def _refuse_outside(place: Path, folder: Path) -> None:
    """Refuse to write through a link of the commit that points outside the folder."""
    if not place.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"data/{place.name} of that commit is a link that points outside the project: nothing was done")


def _bring(place: Path, part: str, version: str) -> str | None:
    """Link raw/ or prepared/ of a data version to its files in the project or in DVC's cache."""
    root = config.project_root()
    today = root / "data" / place.name
    if _version(today, part) == version and (today / part).is_dir():
        (place / part).symlink_to((today / part).resolve(), target_is_directory=True)
        return f"data/{place.name}"
    md5s = prepared_data.md5_by_file(version, root) or {}
    cached = {path: root / prepared_data.LISTINGS / md5[:2] / md5[2:] for path, md5 in md5s.items()}
    if not cached or not all(file.is_file() for file in cached.values()):
        return None
    for path, file in cached.items():
        link = place / part / path
        _refuse_outside(link, place)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())
    return "DVC's cache"


def _version(place: Path, part: Any) -> str | None:
    with suppress(OSError, UnicodeDecodeError, UserError):
        return lineage.version_in((place / "dvc.lock").read_text(encoding="utf-8"), place.name, part)
    return None


def _bring_initial(settings: config.Settings, folder: Path) -> None:
    """Link the file with the initial weights; the digest of the code covers its content."""
    initial = settings.model.initial
    if initial is None or initial.startswith("models:") or entries.is_id(initial) or Path(initial).is_absolute():
        return
    source, place = config.project_root() / initial, folder / initial
    if source.is_file() and not place.exists() and place.parent.resolve().is_relative_to(folder.resolve()):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source.resolve())


def _changes(
    run: Run, settings: config.Settings, folder: Path, missing: list[str], data: str | None
) -> Iterator[Change]:
    """Yield the differences between today and the run's training, and whether the run's own value is restored.

    ``missing`` are uncommitted changes that are not in the checkout, and ``data`` is where its data are, if they are
    here.
    """
    for one in run.changed:  # The new training uses only the last values.
        last = str(one.now) if one.kind in ("code", "data") else json.dumps(one.now)
        moved: Any = MATTERS if one.affects == "speed" else LOST
        yield Change(kind=one.kind, what=one.what, then=one.values, now=last, effect=moved)
    of = run.lineage
    commit, _ = repository.state(config.project_root())
    found: list[tuple[Any, str, str | None, str | None, Any]] = [("code", "git commit", of.git_commit, commit, BACK)]
    if (brought := lineage.code_of(settings, folder)) == of.code_digest:
        found.append(("code", "code", of.code_digest, lineage.code_of(settings), BACK))
    else:
        where = f"in {of.git_commit}" + (" with its uncommitted changes" if of.git_dirty else "")
        lost = f"{brought} {where}" + (f"; {errors.listed(missing, 3)}" if missing else "")
        found.append(("code", "code", of.code_digest, lost, LOST))
    with suppress(UserError):  # params.yaml is invalid; the run has its own settings.
        others = listing.different(run.settings, config.load().to_json()).items()
        for key, values in others:
            then, now = (None if value is None else json.dumps(value) for value in values)
            found.append(("settings", key, then, now, BACK))
    today = None
    with suppress(UserError):  # dvc.lock is damaged.
        today = lineage.data_version(settings.dataset.name)
    found.append(("data", "data version", of.data_version, today, BACK if data is not None else LOST))
    environment = machine.surroundings()
    for what in dict.fromkeys([*run.environment, *environment]):
        kind = "machine" if what in machine.MACHINE else "environment"
        found.append((kind, what, run.environment.get(what), environment.get(what), MATTERS))
    for kind, what, then, now, effect in found:
        if then != now or effect == LOST:
            yield Change(kind=kind, what=what, then=then, now=now, effect=effect)


def _refusal(run: Run, changes: list[Change], allow_changes: bool) -> str | None:
    """Return why the run cannot be trained again, and what to do; None if it can."""
    if resumed := [f"{one.what} was {one.values}" for one in run.changed if one.affects == "result"]:
        return (
            f"run {run.run_id} was resumed with other values: {errors.listed(resumed, 4)}. Training from the "
            "beginning with its last values may give another result. Only a run that is trained with the same "
            "settings from beginning to end can be reproduced"
        )
    lost = {change.what: change for change in changes if change.effect == LOST}
    name, commit = run.dataset, run.lineage.git_commit
    if (code := lost.get("code")) is not None:
        package = run.lineage.package_version
        if package is not None and package != (here := lineage.package_version()):
            return (
                f"run {run.run_id}: its code is that of stratagem {package}, and {here} is installed: install "
                f"stratagem=={package} in a separate environment, and run the command there"
            )
        return (
            f"run {run.run_id}: its code cannot be restored. Its digest was {code.then}, and that of the restored code "
            f"is {code.now}. Only a run of committed code, or of changes that git can show, can be reproduced"
        )
    if (data := lost.get("data version")) is not None:
        return (
            f"run {run.run_id}: its data cannot be restored. It was trained on data version {data.then}, and "
            f"data/{name} is {data.now or 'not prepared'}; DVC's cache lacks the former: fetch it (dvc "
            f"fetch --all-commits data/{name}/dvc.yaml), or prepare it again at commit {commit}"
        )
    others = [f"{one.what} was {one.then} and is now {one.now}" for one in changes if one.effect == MATTERS]
    if others and not allow_changes:
        return (
            f"run {run.run_id} was trained on another machine or with other packages: {errors.listed(others, 4)}. "
            "Different numbers would prove nothing. Run the command where the run was trained, or pass "
            "--allow-changes: then different weights are accepted if the test metrics are within their intervals"
        )
    return None


def _train(run: Run, folder: Path) -> Run:
    """Train and evaluate in a checkout; return the new run."""
    said = _run_command(["train", "--fresh", "--json"], folder)
    new = entries.find_run(str(json.loads(said.splitlines()[-1])["run_id"]))
    # The folder of the training has no repository, so record the commit here.
    root, known = config.project_root(), run.lineage.model_dump(include={"git_commit", "git_dirty"})
    if (kept := root / run.folder / repository.FILE).exists():
        shutil.copy(kept, root / new.folder / repository.FILE)  # Copies its mode, too.
    outcome.save(new, new.model_copy(update={"lineage": new.lineage.model_copy(update=known)}))
    ours = ("code_digest", "settings_digest", "data_version")
    if other := [what for what in ours if getattr(new.lineage, what) != getattr(run.lineage, what)]:
        raise StratagemError(
            f"run {new.run_id} differs from {run.run_id} in its {' and '.join(other)}. Report this as a bug"
        )
    evaluation = outcome.load(run, EvaluationResult)
    if evaluation is not None:
        training = outcome.load_training(run)
        which = {training.best_checkpoint: "best", training.checkpoint: "latest"}
        checkpoint = which.get(evaluation.checkpoint, str(evaluation.step))
        wanted = ["evaluate", new.run_id, "--set", f"evaluate.checkpoint={checkpoint}", "--json"]
        _run_command(wanted, folder)
    return entries.find_run(new.run_id)


def _run_command(arguments: Sequence[str], folder: Path) -> str:
    """Run `stratagem` in a folder, with the code there, and return its standard output.

    If this process is interrupted or dies, the command ends as after Ctrl-C.

    Raises:
        UserError: the command refused its arguments.
        StratagemError: the command failed. Its message went to standard error.
    """
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = guarded([sys.executable, "-c", COMMAND, *arguments])
    child = Child(command, {**os.environ, "PYTHONPATH": path}, cwd=folder)
    try:
        with child.output as output:
            out = output.read()
    finally:
        child.close_input()
        code = child.wait()
    if code:
        said = f"`stratagem {arguments[0]}` with the code of that commit ended with exit code {code}"
        raise (UserError if code == UserError.exit_code else StratagemError)(f"{said}, see above")
    return out


def judge(run: Run, new: Run, settings: config.Settings, changes: list[Change]) -> Reproduction:
    """Return whether the new run has the same result."""
    from tasks.reports import intervals  # NumPy, which nothing before needs.

    digests = outcome.load_training(run).weights_digest, outcome.load_training(new).weights_digest
    metrics, _ = intervals.compare(run, new)
    others = any(change.effect == MATTERS for change in changes)
    judged = {name: one for name, one in metrics.items() if one.first_interval is not None}
    outside = [
        f"{name} {units.metric(one.second)} is outside {units.interval(low, high)}"
        for name, one in judged.items()
        for low, high in [one.first_interval or (0.0, 0.0)]
        if one.second is None or not low <= one.second <= high
    ]
    if digests[0] == digests[1]:
        same, reason = True, "the same weights, bit for bit"
    elif settings.train.deterministic and not others:
        same, reason = False, "different weights, although train.deterministic = true and nothing that matters differs"
    elif not judged:
        same, reason = False, "different weights, and no test metric with an interval to compare"
    elif outside:
        same, reason = False, f"different weights, and {errors.listed(outside, 4)}"
    else:
        why = "another machine or other packages" if settings.train.deterministic else "train.deterministic = false"
        left = [name for name in metrics if name not in judged]
        more = f"; without an interval, and not compared: {errors.listed(left, 4)}" if left else ""
        same, reason = True, f"different weights ({why}), but each test metric is within its interval{more}"
    return Reproduction(
        run_id=run.run_id,
        changes=tuple(changes),
        reproduced_by=new.run_id,
        same=same,
        reason=reason,
        weights_digests=digests,
        metrics=metrics,
    )
