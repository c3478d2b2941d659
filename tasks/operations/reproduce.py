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

from tasks import config, records, runs
from tasks.operations import checkout, pipeline, preconditions
from tasks.process.child import run_command, run_stage
from tasks.records import Change, EvaluationResult, Reproduction, Run, TrainingResult
from tasks.runs import lineage, uncommitted
from tasks.system import errors, machine, temporary
from tasks.system.errors import StratagemError, UserError

RECORD = "records/reproduction.json"


def reproduce(name: str, allow_changes: bool = False, dry_run: bool = False) -> Reproduction:
    """Train a run again, as a new run, and return whether it gave the same result.

    Args:
        name: the run, as ``runs.resolve`` takes it.
        allow_changes: even with other packages or on another machine.
        dry_run: only return what differs today.

    Raises:
        UserError: there is no such run, it was not trained to its end, or its code or data cannot be restored.
        StratagemError: the training failed.
    """
    run = runs.resolve(name)
    if runs.load_result(run, TrainingResult) is None:
        raise UserError(
            f"run {run.run_id} was not trained to its end, so there is nothing to compare with: stratagem run --resume "
            f"{run.run_id}"
        )
    settings = config.parse(run.settings)
    _refuse(run, settings)
    with _checkout(run, settings) as (folder, changes):
        refusal = _refusal(run, changes, allow_changes)
        if dry_run:
            reason = refusal or "it can be trained once more"
            return Reproduction(run_id=run.run_id, changes=tuple(changes), reason=reason)
        if refusal is not None:
            raise UserError(refusal)
        preconditions.check_writable()
        preconditions.check_devices(settings)
        runs.refuse_locked(settings)
        new = _train(run, folder)
    done = judge(run, new, settings, changes)
    records.save(done, config.project_root() / new.folder / RECORD)
    run_stage("reproduced", new.run_id)
    return done


def _refuse(run: Run, settings: config.Settings) -> None:
    """Refuse a run that obviously cannot be trained again."""
    if pipeline.in_foreign_cluster(settings):
        raise UserError(
            f"run {run.run_id} was trained by a cluster that someone else starts (strategy.launcher = "
            f"'{run.settings['strategy'].get('launcher')}'): start its members with the run's settings at its commit"
        )
    if "@" in (settings.model.initial or "") and str(settings.model.initial).startswith("models:"):
        raise UserError(
            f"run {run.run_id} began with model.initial = {settings.model.initial}, and the alias may be another "
            "version's by now: train with models:/NAME/VERSION"
        )
    if run.lineage.git_commit is None:
        raise UserError(f"run {run.run_id} is of no git commit, so its code cannot be brought back")
    if run.lineage.data_version is None:
        raise UserError(f"run {run.run_id} has no data version, so its data cannot be brought back")


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
        changes = [
            *_of_resumes(run),
            *_of_code(run, settings, folder, missing),
            *_of_settings(run),
            *_of_data(run, name, found),
            *_of_machine(run),
        ]
        yield folder, changes


def _bring_initial(settings: config.Settings, folder: Path) -> None:
    """Link the file that the model starts with; the digest of the code shows whether it is the same."""
    initial = settings.model.initial
    if initial is None or initial.startswith("models:") or runs.is_id(initial) or Path(initial).is_absolute():
        return
    source, place = config.project_root() / initial, folder / initial
    if source.is_file() and not place.exists() and place.parent.resolve().is_relative_to(folder.resolve()):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source.resolve())


def _of_resumes(run: Run) -> Iterator[Change]:
    """Yield the settings that changed when the run was resumed: only their last values are trained with."""
    for one in run.changed:
        now = str(one.now) if one.kind in ("code", "data") else json.dumps(one.now)
        effect: Any = "matters" if one.affects == "speed" else "cannot be brought back"
        yield Change(kind=one.kind, what=one.what, then=one.values, now=now, effect=effect)


def _of_code(run: Run, settings: config.Settings, folder: Path, missing: list[str]) -> Iterator[Change]:
    commit, _ = lineage.git_state(config.project_root())
    then, now = run.lineage.code_digest, lineage.code_of(settings)
    if commit != run.lineage.git_commit:
        yield _brought_back("code", "git commit", run.lineage.git_commit, commit)
    if (brought := lineage.code_of(settings, folder)) != then:
        where = f"in {run.lineage.git_commit}" + (" with its uncommitted changes" if run.lineage.git_dirty else "")
        lost = f"{brought} {where}" + (f"; {errors.listed(missing, 3)}" if missing else "")
        yield Change(kind="code", what="code", then=then, now=lost, effect="cannot be brought back")
    elif now != then:
        yield _brought_back("code", "code", then, now)


def _of_settings(run: Run) -> Iterator[Change]:
    marks = config.marks_of(config.Settings)
    try:
        today = config.load().to_json()
    except UserError:  # params.yaml is being edited; the run has its own settings.
        return
    before, now = (dict(config.leaves(values, whole=marks)) for values in (run.settings, today))
    for key, value in before.items():
        if now.get(key) != value:
            yield _brought_back("settings", key, json.dumps(value), json.dumps(now[key]) if key in now else None)


def _of_data(run: Run, name: str, found: str | None) -> Iterator[Change]:
    then, now = run.lineage.data_version, None
    with suppress(UserError):  # A lock that cannot be read.
        now = lineage.data_version(name)
    if found is None:
        yield Change(kind="data", what="data version", then=then, now=now, effect="cannot be brought back")
    elif now != then or found != f"data/{name}":
        yield _brought_back("data", "data version", then, now)


def _of_machine(run: Run) -> Iterator[Change]:
    now = machine.surroundings()
    for what in dict.fromkeys([*run.environment, *now]):
        if run.environment.get(what) != now.get(what):
            yield Change(
                kind="machine" if what in machine.MACHINE else "environment",
                what=what,
                then=run.environment.get(what),
                now=now.get(what),
                effect="matters",
            )


def _brought_back(kind: Any, what: str, then: str | None, now: str | None) -> Change:
    return Change(kind=kind, what=what, then=then, now=now, effect="brought back")


def _refusal(run: Run, changes: list[Change], allow_changes: bool) -> str | None:
    """Return why the run cannot be trained again, and what to do; None if it can."""
    if resumed := [f"{one.what} was {one.values}" for one in run.changed if one.affects == "result"]:
        return (
            f"run {run.run_id} was resumed as another training: {errors.listed(resumed, 4)}. Trained from its "
            "beginning with what it ended with, it need not come out again. A run that is trained with the same "
            "settings from its beginning to its end can be reproduced"
        )
    lost = {change.what: change for change in changes if change.effect == "cannot be brought back"}
    name, commit = run.settings["dataset"]["name"], run.lineage.git_commit
    if (code := lost.get("code")) is not None:
        package = run.lineage.package_version
        if package is not None and package != (here := lineage.package_version()):
            return (
                f"run {run.run_id}: its code is that of stratagem {package}, and {here} is installed: install "
                f"stratagem=={package} in an environment of its own, and give the command there"
            )
        return (
            f"run {run.run_id}: its code cannot be brought back. Its digest is {code.then}, and that of what is here "
            f"is {code.now}. A run of code that is committed, or that git can show the changes of, can be reproduced"
        )
    if (data := lost.get("data version")) is not None:
        return (
            f"run {run.run_id}: its data cannot be brought back. It was trained on data version {data.then}, and "
            f"data/{name} is {data.now or 'not prepared'}; DVC's cache does not hold the other one: fetch it (dvc "
            f"fetch --all-commits data/{name}/dvc.yaml), or make it again at the commit {commit}"
        )
    others = [f"{one.what} was {one.then} and is {one.now}" for one in changes if one.effect == "matters"]
    if others and not allow_changes:
        return (
            f"run {run.run_id} was trained elsewhere, or with other packages: {errors.listed(others, 4)}. Other "
            "numbers would prove nothing. Give the command where the run was trained, or --allow-changes: then other "
            "weights are no failure where the test metrics lie within their intervals"
        )
    return None


def _train(run: Run, folder: Path) -> Run:
    """Train and evaluate in a checkout; return the new run."""
    said = run_command(["train", "--fresh", "--json"], folder)
    new = runs.find_run(str(json.loads(said.splitlines()[-1])["run_id"]))
    _put_down_commit(run, new)
    ours = ("code_digest", "settings_digest", "data_version")
    if other := [what for what in ours if getattr(new.lineage, what) != getattr(run.lineage, what)]:
        raise StratagemError(
            f"run {new.run_id} is another training than {run.run_id}: its {' and '.join(other)} differ. Report it"
        )
    evaluation = runs.load_result(run, EvaluationResult)
    if evaluation is not None:
        training = runs.load_training(run)
        which = {training.best_checkpoint: "best", training.checkpoint: "latest"}
        checkpoint = which.get(evaluation.checkpoint, str(evaluation.step))
        wanted = ["evaluate", "--run", new.run_id, "--set", f"evaluate.checkpoint={checkpoint}", "--json"]
        run_command(wanted, folder)
    return runs.find_run(new.run_id)


def _put_down_commit(run: Run, new: Run) -> None:
    """Let a run's record say of which commit it is: the folder that it was trained in has no repository."""
    root, known = config.project_root(), run.lineage.model_dump(include={"git_commit", "git_dirty"})
    if (kept := root / run.folder / uncommitted.FILE).exists():
        shutil.copy(kept, root / new.folder / uncommitted.FILE)  # Its mode, too.
    records.save(
        new.model_copy(update={"lineage": new.lineage.model_copy(update=known)}),
        root / new.folder / "records" / "run.json",
    )


def judge(run: Run, new: Run, settings: config.Settings, changes: list[Change]) -> Reproduction:
    """Return whether the new run gave the same."""
    from tasks.reports import side_by_side  # NumPy, which nothing before needs.

    digests = runs.load_training(run).weights_digest, runs.load_training(new).weights_digest
    metrics, _ = side_by_side.compare(run, new)
    others = any(change.effect == "matters" for change in changes)
    judged = {name: one for name, one in metrics.items() if one.first_interval is not None}
    outside = [
        f"{name} {one.second if one.second is not None else float('nan'):.4f} is outside of {low:.4f} to {high:.4f}"
        for name, one in judged.items()
        for low, high in [one.first_interval or (0.0, 0.0)]
        if one.second is None or not low <= one.second <= high
    ]
    if digests[0] == digests[1]:
        same, reason = True, "the same weights, bit by bit"
    elif settings.train.deterministic and not others:
        same, reason = False, "other weights, though train.deterministic = true and nothing that matters differs"
    elif not judged:
        same, reason = False, "other weights, and no test metric with an interval to compare"
    elif outside:
        same, reason = False, f"other weights, and {errors.listed(outside, 4)}"
    else:
        why = "what it ran on is another" if settings.train.deterministic else "train.deterministic = false"
        left = [name for name in metrics if name not in judged]
        more = f"; without an interval, and not compared: {errors.listed(left, 4)}" if left else ""
        same, reason = True, f"other weights ({why}), and each test metric within its interval{more}"
    return Reproduction(
        run_id=run.run_id,
        changes=tuple(changes),
        reproduced_by=new.run_id,
        same=same,
        reason=reason,
        weights_digests=digests,
        metrics=metrics,
    )
