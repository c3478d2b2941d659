"""Trains a run again and tells whether the result is the same.

The code comes from git, with the run's uncommitted changes, the settings from the run's record, the data from data/ or
DVC's cache; they are put into a folder of their own (`checkout`). The machine and the installed packages stay as they
are.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from tasks import config
from tasks.operations import checkout, preconditions
from tasks.process import stages
from tasks.process.child import run_command
from tasks.records import Change, EvaluationResult, Reproduction, Run, TrainingResult
from tasks.runs import entries, lineage, listing, locks, outcome, uncommitted
from tasks.strategies import engines
from tasks.system import errors, machine, temporary
from tasks.system.errors import StratagemError, UserError

BACK, MATTERS, LOST = "restored", "matters", "cannot be restored"
"""The effects of ``Change``."""


def reproduce(name: str, allow_changes: bool = False, dry_run: bool = False) -> Reproduction:
    """Train a run again, as a new run, and return whether it gave the same result.

    Args:
        name: the run, as ``entries.resolve`` takes it.
        allow_changes: even with other packages or on another machine.
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
    """Yield a folder with the run's code, settings and data, and what differs from today.

    It is removed with the block, or after a kill by the next command that makes temporary files.
    """
    root, name = config.project_root(), settings.dataset.name
    with tempfile.TemporaryDirectory(dir=temporary.folder()) as made:
        folder = Path(made) / "checkout"
        checkout.write(str(run.lineage.git_commit), folder)
        kept = root / run.folder / uncommitted.FILE
        missing = checkout.apply(kept, folder) if kept.exists() else []
        (folder / "params.yaml").unlink(missing_ok=True)  # A link of the commit would lead to a file of the user's.
        (folder / "params.yaml").write_text(yaml.safe_dump(run.settings, sort_keys=False), encoding="utf-8")
        _bring_initial(settings, folder)
        found = checkout.bring_data(name, str(run.lineage.data_version), folder)
        yield folder, list(_changes(run, settings, folder, missing, found))


def _bring_initial(settings: config.Settings, folder: Path) -> None:
    """Link the file that the model starts with; the digest of the code shows whether it is the same."""
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
    """Yield what differs today from when a run was trained, and whether its own value is restored.

    Args:
        run: the run.
        settings: its settings.
        folder: a checkout of its commit.
        missing: what its uncommitted changes do not contain.
        data: where its data are read from; None if they are not here.
    """
    for one in run.changed:  # Only the last values are trained with.
        last = str(one.now) if one.kind in ("code", "data") else json.dumps(one.now)
        moved: Any = MATTERS if one.affects == "speed" else LOST
        yield Change(kind=one.kind, what=one.what, then=one.values, now=last, effect=moved)
    of = run.lineage
    commit, _ = lineage.git_state(config.project_root())
    found: list[tuple[Any, str, str | None, str | None, Any]] = [("code", "git commit", of.git_commit, commit, BACK)]
    if (brought := lineage.code_of(settings, folder)) == of.code_digest:
        found.append(("code", "code", of.code_digest, lineage.code_of(settings), BACK))
    else:
        where = f"in {of.git_commit}" + (" with its uncommitted changes" if of.git_dirty else "")
        lost = f"{brought} {where}" + (f"; {errors.listed(missing, 3)}" if missing else "")
        found.append(("code", "code", of.code_digest, lost, LOST))
    with suppress(UserError):  # params.yaml is being edited; the run has its own settings.
        others = listing.different(run.settings, config.load().to_json()).items()
        for key, values in others:
            then, now = (None if value is None else json.dumps(value) for value in values)
            found.append(("settings", key, then, now, BACK))
    today = None
    with suppress(UserError):  # A lock that cannot be read.
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
    others = [f"{one.what} was {one.then} and is {one.now}" for one in changes if one.effect == MATTERS]
    if others and not allow_changes:
        return (
            f"run {run.run_id} was trained on another machine or with other packages: {errors.listed(others, 4)}. "
            "Different numbers would prove nothing. Run the command where the run was trained, or pass "
            "--allow-changes: then different weights are accepted if the test metrics are within their intervals"
        )
    return None


def _train(run: Run, folder: Path) -> Run:
    """Train and evaluate in a checkout; return the new run."""
    said = run_command(["train", "--fresh", "--json"], folder)
    new = entries.find_run(str(json.loads(said.splitlines()[-1])["run_id"]))
    _put_down_commit(run, new)
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
        run_command(wanted, folder)
    return entries.find_run(new.run_id)


def _put_down_commit(run: Run, new: Run) -> None:
    """Let a run's record say of which commit it is: the folder that it was trained in has no repository."""
    root, known = config.project_root(), run.lineage.model_dump(include={"git_commit", "git_dirty"})
    if (kept := root / run.folder / uncommitted.FILE).exists():
        shutil.copy(kept, root / new.folder / uncommitted.FILE)  # Its mode, too.
    outcome.save(new, new.model_copy(update={"lineage": new.lineage.model_copy(update=known)}))


def judge(run: Run, new: Run, settings: config.Settings, changes: list[Change]) -> Reproduction:
    """Return whether the new run gave the same."""
    from tasks.reports import intervals  # NumPy, which nothing before needs.

    digests = outcome.load_training(run).weights_digest, outcome.load_training(new).weights_digest
    metrics, _ = intervals.compare(run, new)
    others = any(change.effect == MATTERS for change in changes)
    judged = {name: one for name, one in metrics.items() if one.first_interval is not None}
    outside = [
        f"{name} {one.second if one.second is not None else float('nan'):.4f} is outside {low:.4f} to {high:.4f}"
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
