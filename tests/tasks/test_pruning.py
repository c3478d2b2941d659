"""Room on the disk: what is removed of runs, what never is, and what a kill in the middle leaves."""

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks import config, records, runs
from tasks.operations import pipeline, preconditions
from tasks.system.errors import UserError
from tests.tasks.written_runs import files_below, run_id_of, version_of, write_results, write_run

EACH = 2 * 1002 + 2 * 1000
"""Bytes of the checkpoints and models of a run that was written here."""


def pruned(versions=(), dry_run=False, **selection):
    """Return the numbers of the runs that are pruned."""
    done = runs.prune(runs.Selection(**selection), lambda: list(versions), dry_run)
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
    runs.set_status(made[3], "KILLED")
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
    done = runs.prune(runs.Selection(keep_last=0), list, False)
    assert [int(one.run_id[:4], 16) for one in done.pruned] == [7, 4]
    assert done.unfinished == 3


def test_runs_are_chosen_by_all_options_together(four):
    before = files_below("mlruns/runs")
    for selection, numbers in SELECTIONS:
        assert pruned(four, dry_run=True, **selection) == numbers, selection
    assert files_below("mlruns/runs") == before, "a dry run removes nothing"
    for selection in ({}, {"dataset": "digits"}, {"unfinished": True}):
        with pytest.raises(UserError, match="say which runs are to be pruned: --keep-last N, --older-than 30d or"):
            runs.prune(runs.Selection(**selection), list, True)
    with pytest.raises(UserError, match="unknown --dataset 'nosie': did you mean 'noise'"):
        pruned(four, keep_last=0, dataset="nosie")


def test_checkpoints_and_models_go_and_all_else_stays(four):
    run = runs.find_run(run_id_of(1))
    write_results(run, accuracy=0.9)
    before = set(files_below(run.folder))
    planned = runs.prune(runs.Selection(keep_last=0), lambda: four, dry_run=True)
    done = runs.prune(runs.Selection(keep_last=0), lambda: four, dry_run=False)
    assert done.model_copy(update={"dry_run": True, "bytes_left": planned.bytes_left}) == planned
    on_disk = sum(path.stat().st_size for path in Path("mlruns/runs").rglob("*") if path.is_file())
    assert done.bytes_left == on_disk
    kept = {name for name in before if not name.startswith(("checkpoints/", "models/"))}
    assert set(files_below(run.folder)) == kept | {"records/pruned.json"}
    assert done.left == {run_id_of(2): "digits-convnet2/1 @champion was made of it"}
    assert len(files_below(Path("mlruns/runs", run_id_of(2)))) == len(files_below(Path("mlruns/runs", run_id_of(4))))
    lines = {int(line.run_id[:4], 16): line for line in runs.list_runs(runs.RunFilter()).runs}
    assert {number: line.pruned for number, line in lines.items()} == {1: True, 2: False, 3: True, 4: False}
    assert lines[1].metrics == {"test/accuracy": 0.9}
    assert list(Path("mlruns/active").iterdir()) == [], "no lock is left"
    assert pruned(four, keep_last=0) == [], "once"


def test_a_run_whose_model_was_a_version_before_is_needed_by_that(four):
    """The version is another run's, and this one's record names it."""
    write_results(runs.find_run(run_id_of(1)), version="1")
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
    Path(run.folder, "unsent.jsonl").write_text("{}\n")


# Each: what is done to a run, and why it is left alone then.
LEFT = {
    "link": (outside, "is, or has, a link to another folder"),
    "linked folder": (folder_outside, "is, or has, a link to another folder"),
    "project": (changed(project=f"{'0' * 32}.7"), "it is of another project, whose registry is not asked here"),
    "unsent": (untold, "it has more to tell its MLflow store"),
    "store": (changed(store="http://elsewhere:5000"), "its MLflow is http://elsewhere:5000, which is not asked"),
}


@pytest.mark.parametrize(("change", "why"), LEFT.values(), ids=LEFT)
def test_what_is_not_this_projects_is_left_alone(project, change, why):
    run = write_run(1)
    change(run, project)
    places = [place for place in (project / "mlruns/runs", project.parent / "elsewhere") if place.exists()]
    before = [files_below(place) for place in places]
    for dry_run in (True, False):
        done = runs.prune(runs.Selection(keep_last=0), list, dry_run)
        assert (done.pruned, list(done.left)) == ((), [run.run_id])
        assert why in done.left[run.run_id]
    assert [files_below(place) for place in places] == before


def test_a_copy_of_the_whole_project_may_prune_its_own(project, monkeypatch):
    write_run(1)
    copy = project.with_name("copy")
    shutil.copytree(project, copy, symlinks=True)
    monkeypatch.chdir(copy)
    assert pruned(keep_last=0) == [1]
    assert Path(project, "mlruns", "runs", run_id_of(1), "models", "best.keras").exists()


def test_another_users_run_is_left_alone(project, monkeypatch):
    run = write_run(1)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 12345)
    done = runs.prune(runs.Selection(keep_last=0), list, dry_run=False)
    assert done.pruned == ()
    assert done.left[run.run_id].startswith("it is ")
    assert Path(run.folder, "models", "best.keras").exists()


def test_a_run_at_work_is_never_pruned(project):
    run = write_run(1)
    away = write_run(2, "RUNNING", host="elsewhere")
    crashed = write_run(3, "RUNNING")
    for dry_run in (True, False):
        with runs.lock(run.key, "a registration"), runs.lock(crashed.key, "a training"):
            done = runs.prune(runs.Selection(keep_last=0, unfinished=True), list, dry_run)
        assert (done.pruned, done.left) == ((), {run.run_id: "a process is at work on it"})
    assert pruned(keep_last=0, unfinished=True) == [3, 1]
    assert Path(away.folder, "models", "best.keras").exists()


def test_a_run_that_was_resumed_just_now_is_left_alone(project, monkeypatch):
    run = write_run(1)
    hold = runs.pruning.lock

    def resumed(*args):
        changed(number=2)(run, project)
        return hold(*args)

    monkeypatch.setattr(runs.pruning, "lock", resumed)
    done = runs.prune(runs.Selection(keep_last=0), list, dry_run=False)
    assert done.left == {run.run_id: "it was resumed just now"}
    assert not Path(run.folder, "records", "pruned.json").exists()


def test_a_run_that_was_registered_just_now_is_left_alone(project):
    run = write_run(1)
    write_results(run)

    def ask():
        write_results(run, version="3")
        return []

    done = runs.prune(runs.Selection(keep_last=0), ask, dry_run=False)
    assert (done.pruned, done.left) == ((), {run.run_id: "it was registered just now"})


# A kill at each step of a pruning.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from tasks import runs
from tasks.records import record

owner, name, call = {"remove": (shutil, "rmtree", 0), "in the middle": (os, "unlink", 1),
                     "second remove": (shutil, "rmtree", 1)}[sys.argv[1]]
work = getattr(owner, name)
def work_or_die(*args, **kwargs):
    global call
    call -= 1
    if call < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return work(*args, **kwargs)
setattr(owner, name, work_or_die)
runs.prune(runs.Selection(keep_last=0), list, False)
"""


@pytest.mark.in_ci(0)
@pytest.mark.parametrize("moment", ["remove", "in the middle", "second remove"])
def test_a_pruning_that_is_killed_leaves_nothing_half_and_the_next_one_goes_on(project, moment):
    run = write_run(1)
    before = set(files_below(run.folder))
    assert subprocess.run([sys.executable, "-c", KILLED, moment], check=False).returncode == -9
    assert (set(files_below(run.folder)) - before) >= {"records/pruned.json"}
    with pytest.raises(UserError, match=f"run {run.run_id} was pruned on 20"):
        runs.refuse_pruned(run)
    (line,) = runs.list_runs(runs.RunFilter()).runs
    assert line.pruned
    done = runs.prune(runs.Selection(keep_last=100), list, dry_run=False)
    assert [one.run_id for one in done.pruned] == [run.run_id], "whatever was asked for"
    assert set(files_below(run.folder)) == {
        name for name in before | {"records/pruned.json"} if not name.startswith(("checkpoints/", "models/"))
    }
    assert pruned(keep_last=100) == []


def test_what_cannot_be_written_is_left_as_it_was(project, monkeypatch):
    run = write_run(1)

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse)
        done = runs.prune(runs.Selection(keep_last=0), list, dry_run=False)
    assert (done.pruned, list(done.left)) == ((), [run.run_id])
    assert "Permission denied" in done.left[run.run_id]
    runs.refuse_pruned(run)
    assert pruned(keep_last=0) == [1]


def test_a_pruned_run_is_refused_where_its_weights_are_needed(project):
    finished, killed = write_run(1), write_run(2, "KILLED")
    write_results(finished)
    assert runs.find_unfinished(config.parse(killed.settings), killed.lineage) == killed
    assert pruned(keep_last=0, unfinished=True) == [2, 1]
    settings = config.load()
    assert runs.find_unfinished(settings, killed.lineage) is None, "a new one begins"
    assert runs.why_not_resumed(settings, killed.lineage) is None
    named = config.load(None, {"model.initial": finished.run_id})
    for needs in (
        lambda: pipeline.load_training(None, [], finished.run_id),
        lambda: pipeline.find_model(finished.run_id, None),
        lambda: runs.refuse_resume(settings, killed.run_id),
        lambda: runs.refuse_resume(settings, killed.run_id, allow_changes=True),
        lambda: preconditions.check_devices(named),
    ):
        with pytest.raises(UserError, match=r"run \w+ was pruned on 20.*`stratagem runs prune`.*are gone, its records"):
            needs()
    assert runs.load_training(finished).steps == 82, "its records are kept"
