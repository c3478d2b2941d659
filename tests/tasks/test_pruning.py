"""Room on the disk: what is removed of runs, what never is, and what a kill in the middle leaves."""

import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks import config, records
from tasks.operations import pipeline, preconditions
from tasks.runs import entries, listing, locks, outcome, pruning, resume
from tasks.system.errors import UserError
from tests.tasks.written_runs import files_below, run_id_of, version_of, write_results, write_run

EACH = 2 * 1002 + 2 * 1000
"""Bytes of the checkpoints and models of a run that was written here."""


def pruned(versions=(), dry_run=False, **selection):
    """Return the numbers of the runs that are pruned."""
    done = pruning.prune(pruning.Selection(**selection), lambda: list(versions), dry_run)
    assert done.bytes == EACH * len(done.pruned)
    return [int(one.run_id[:4], 16) for one in done.pruned]


def ended(run, when):
    """Let a run have ended at a time."""
    record = records.RunStatus(status="FINISHED", reason=None, at=when.isoformat())
    records.save(record, Path(run.folder, "status.json"))


def day(number):
    return datetime(2026, 1, number, tzinfo=UTC)


# Each: what chooses, and which of the runs 1 to 4 are pruned. 3 is on noise, 4 was killed; a version was made of 2.
SELECTIONS = [
    ({"keep_last": 0}, [3, 1]),
    ({"keep_last": 0, "unfinished": True}, [4, 3, 1]),
    ({"keep_last": 1}, [3, 1]),
    ({"keep_last": 2}, [1]),
    ({"keep_last": 9}, []),
    ({"keep_last": 1, "dataset": "noise"}, []),
    ({"keep_last": 1, "dataset": "digits"}, [1]),
    ({"before": day(1)}, []),
    ({"before": day(2)}, [1]),
    ({"before": day(9)}, [3, 1]),
    ({"before": day(9), "keep_last": 2}, [1]),
    ({"not_registered": True}, [3, 1]),
    ({"not_registered": True, "unfinished": True, "dataset": "digits"}, [4, 1]),
]


@pytest.fixture
def four(project):
    """Four runs, and the versions that there are."""
    made = [write_run(number, overrides={"dataset.name": "noise"} if number == 3 else {}) for number in (1, 2, 3, 4)]
    for number, run in enumerate(made, start=1):
        ended(run, day(number))
    outcome.set_status(made[3], "KILLED")
    return [version_of(made[1], 1, "champion")]


def test_what_could_be_resumed_is_left_and_said_and_what_a_sweep_gave_up_is_not(project):
    write_run(1, "KILLED")
    sweeps = [
        write_run(number, how, folder=f"mlruns/sweeps/{run_id_of(number)}").run_id
        for number, how in ((2, "FINISHED"), (3, "RUNNING"))
    ]
    for number, (parent, status) in enumerate(
        ((sweeps[0], "KILLED"), (sweeps[0], "FAILED"), (sweeps[1], "KILLED"), (None, "FINISHED")), start=4
    ):
        write_run(number, status, parent_run_id=parent)
    done = pruning.prune(pruning.Selection(keep_last=0), list, False)
    assert [int(one.run_id[:4], 16) for one in done.pruned] == [7, 4]
    assert done.unfinished == 3


def test_runs_are_chosen_by_all_options_together(four):
    before = files_below("mlruns/runs")
    for selection, numbers in SELECTIONS:
        assert pruned(four, dry_run=True, **selection) == numbers, selection
    assert files_below("mlruns/runs") == before, "a dry run removes nothing"
    for selection in ({}, {"dataset": "digits"}, {"unfinished": True}):
        with pytest.raises(UserError, match="choose the runs to prune: --keep-last N, --older-than 30d or"):
            pruning.prune(pruning.Selection(**selection), list, True)
    with pytest.raises(UserError, match="unknown --dataset 'nosie': did you mean 'noise'"):
        pruned(four, keep_last=0, dataset="nosie")


def test_checkpoints_and_models_go_and_all_else_stays(four):
    run = entries.find_run(run_id_of(1))
    write_results(run, accuracy=0.9)
    before = set(files_below(run.folder))
    planned = pruning.prune(pruning.Selection(keep_last=0), lambda: four, dry_run=True)
    done = pruning.prune(pruning.Selection(keep_last=0), lambda: four, dry_run=False)
    assert done.model_copy(update={"dry_run": True, "bytes_left": planned.bytes_left}) == planned
    on_disk = sum(path.stat().st_size for path in Path("mlruns/runs").rglob("*") if path.is_file())
    assert done.bytes_left == on_disk
    kept = {name for name in before if not name.startswith(("checkpoints/", "models/"))}
    assert set(files_below(run.folder)) == kept | {"records/pruned.json"}
    assert done.left == {run_id_of(2): "it is the source of digits-convnet2/1 @champion"}
    assert len(files_below(Path("mlruns/runs", run_id_of(2)))) == len(files_below(Path("mlruns/runs", run_id_of(4))))
    lines = {int(line.run_id[:4], 16): line for line in listing.list_runs(listing.RunFilter()).runs}
    assert {number: line.pruned for number, line in lines.items()} == {1: True, 2: False, 3: True, 4: False}
    assert lines[1].metrics == {"test/accuracy": 0.9}
    assert list(Path("mlruns/active").iterdir()) == [], "no lock is left"
    assert pruned(four, keep_last=0) == [], "once"


def test_a_run_whose_model_was_a_version_before_is_needed_by_that(four):
    """The version is another run's, and this one's record names it."""
    write_results(entries.find_run(run_id_of(1)), version="1")
    assert pruned(four, dry_run=True, keep_last=0) == [3]
    assert pruned([], dry_run=True, keep_last=0) == [3, 2, 1], "no version is there any more"
    assert pruned([version_of(None, 5)], dry_run=True, keep_last=0) == [3, 2, 1], "somebody else's"


def outside(run, project):
    """Put the checkpoints of a run elsewhere, with a link in their place."""
    shutil.move(Path(run.folder, "checkpoints"), project.parent / "elsewhere")
    Path(run.folder, "checkpoints").symlink_to(project.parent / "elsewhere")


def folder_outside(run, project):
    shutil.move(run.folder, project.parent / "elsewhere")
    Path(run.folder).symlink_to(project.parent / "elsewhere")


def changed(**fields):
    """Return what gives a run's record other values."""

    def change(run, project):
        records.save(run.model_copy(update=fields), Path(run.folder, "records", "run.json"))

    return change


def untold(run, project):
    Path(run.folder, "uncopied").touch()


# Each: what is done to a run, and why it is left alone then.
LEFT = {
    "link": (outside, "is or contains a link to another folder"),
    "linked folder": (folder_outside, "is or contains a link to another folder"),
    "project": (changed(project=f"{'0' * 32}.7"), "it belongs to another project, with another registry"),
    "uncopied": (untold, "the MLflow server may lack a part of it"),
    "store": (changed(store="http://elsewhere:5000"), "its MLflow store is http://elsewhere:5000"),
}


@pytest.mark.parametrize(("change", "why"), LEFT.values(), ids=LEFT)
def test_what_is_not_this_projects_is_left_alone(project, change, why):
    run = write_run(1)
    change(run, project)
    places = [place for place in (project / "mlruns/runs", project.parent / "elsewhere") if place.exists()]
    before = [files_below(place) for place in places]
    for dry_run in (True, False):
        done = pruning.prune(pruning.Selection(keep_last=0), list, dry_run)
        assert (done.pruned, list(done.left)) == ((), [run.run_id])
        assert why in done.left[run.run_id]
    assert [files_below(place) for place in places] == before


def test_a_run_at_work_is_never_pruned(project):
    run = write_run(1)
    away = write_run(2, "RUNNING", host="elsewhere")
    crashed = write_run(3, "RUNNING")
    for dry_run in (True, False):
        with locks.lock(run.key, "a registration"), locks.lock(crashed.key, "a training"):
            done = pruning.prune(pruning.Selection(keep_last=0, unfinished=True), list, dry_run)
        assert (done.pruned, done.left) == ((), {run.run_id: "a process is using it"})
    assert pruned(keep_last=0, unfinished=True) == [3, 1]
    assert Path(away.folder, "models", "best.keras").exists()


def test_a_run_that_was_registered_just_now_is_left_alone(project):
    run = write_run(1)
    write_results(run)

    def ask():
        write_results(run, version="3")
        return []

    done = pruning.prune(pruning.Selection(keep_last=0), ask, dry_run=False)
    assert (done.pruned, done.left) == ((), {run.run_id: "it was just resumed or registered"})


# Killed after it has removed one file.
KILLED = """
import os, signal
from tasks.runs import pruning

work, calls = os.unlink, []
def work_or_die(*args, **kwargs):
    calls.append(args)
    if len(calls) > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return work(*args, **kwargs)
os.unlink = work_or_die
pruning.prune(pruning.Selection(keep_last=0), list, False)
"""


def test_a_pruning_that_is_killed_leaves_nothing_half_and_the_next_one_goes_on(project):
    run = write_run(1)
    before = set(files_below(run.folder))
    assert subprocess.run([sys.executable, "-c", KILLED], check=False).returncode == -9
    assert (set(files_below(run.folder)) - before) >= {"records/pruned.json"}
    with pytest.raises(UserError, match=f"run {run.run_id} was pruned on 20"):
        outcome.refuse_pruned(run)
    (line,) = listing.list_runs(listing.RunFilter()).runs
    assert line.pruned
    done = pruning.prune(pruning.Selection(keep_last=100), list, dry_run=False)
    assert [one.run_id for one in done.pruned] == [run.run_id], "whatever was asked for"
    assert set(files_below(run.folder)) == {
        name for name in before | {"records/pruned.json"} if not name.startswith(("checkpoints/", "models/"))
    }
    assert pruned(keep_last=100) == []


def test_a_pruned_run_is_refused_where_its_weights_are_needed(project):
    finished, killed = write_run(1), write_run(2, "KILLED")
    write_results(finished)
    assert entries.find_unfinished(config.parse(killed.settings), killed.lineage) == killed
    assert pruned(keep_last=0, unfinished=True) == [2, 1]
    settings = config.load()
    assert entries.find_unfinished(settings, killed.lineage) is None, "a new one begins"
    assert resume.why_not_resumed(settings, killed.lineage) is None
    named = config.load(None, {"model.initial": finished.run_id})
    for needs in (
        lambda: pipeline.load_training(None, [], finished.run_id),
        lambda: pipeline.find_model(finished.run_id, None),
        lambda: resume.refuse_other_training(settings, killed),
        lambda: resume.refuse_other_training(settings, killed, allow_changes=True),
        lambda: preconditions.check_devices(named),
    ):
        with pytest.raises(UserError, match=r"run \w+ was pruned on 20.*`stratagem runs prune`.*are gone, its records"):
            needs()
    assert outcome.load_training(finished).steps == 82, "its records are kept"
