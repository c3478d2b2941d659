import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from tasks import config, records
from tasks.runs import entries, lineage, locks, outcome
from tasks.system import files
from tasks.system.errors import UserError
from tests.tasks.written_runs import write_run, write_summary

DATA, CODE = "0123abcd", "c0de"


@pytest.fixture
def settings(project):
    return config.load()


def begin(settings, run_id, status=None, data_version=DATA, code=CODE, **more):
    """Leave a run behind that ended as ``status`` says."""
    traced = records.Lineage(
        git_commit=None, git_dirty=None, code_digest=code, settings_digest=settings.digest(), data_version=data_version
    )
    run = records.Run(
        run_id=run_id,
        experiment="e",
        name="n",
        folder=f"mlruns/runs/{run_id}",
        lineage=traced,
        settings=settings.to_json(),
        key=locks.key_of(settings),
        host=socket.gethostname(),
        number=entries.next_number(),
        **more,
    )
    path = records.save(run, Path(run.folder, "records", "run.json"))
    # A clock that goes backwards.
    moment = 1_000_000_000 * (1000 - run.number)
    os.utime(path, ns=(moment, moment))
    if status is not None:
        outcome.set_status(run, status, "some reason")
    return run


HOLDING = """
import sys, time
from tasks.runs import locks
with locks.lock(sys.argv[1], "a training", sys.argv[2]) as held:
    held.note(run_id="abc")
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(project):
    """Another process that holds the key "k", at work on run abc of the flow run f."""
    process = subprocess.Popen([sys.executable, "-c", HOLDING, "k", "f"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_and_told_who_holds(holder):
    assert locks.is_locked("k")
    said = rf"a training with these settings is already running in process {holder.pid} on .+ since 20.+, run abc: wait"
    with pytest.raises(UserError, match=said) as error, locks.lock("k", "a training"):
        pytest.fail("two at once")
    assert error.value.exit_code == 2
    with locks.lock("other", "a training"):
        assert locks.is_locked("other")
    assert locks.crashed_holders() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_held_is_free_and_its_note_is_found(holder, number):
    holder.send_signal(number)
    holder.wait()
    assert not locks.is_locked("k")
    ((path, left),) = locks.crashed_holders()
    assert (left.pid, left.run_id, left.flow_run_id, left.key) == (holder.pid, "abc", "f", "k")
    with locks.lock("k", "a training"):
        assert locks.crashed_holders() == [(path, left)], "the one of now is not among them"


def test_who_ends_leaves_no_note_however_it_ends(project):
    with pytest.raises(ZeroDivisionError), locks.lock("k", "a training"):
        raise ZeroDivisionError
    with locks.lock("k", "a training"):
        pass
    assert list(Path("mlruns/active").iterdir()) == []


def noted(**others):
    """Change what the one note says, as a process would have written it that is elsewhere."""
    (path,) = Path("mlruns/active").glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | others))


def test_the_notes_of_another_machine_are_left_to_it(holder):
    holder.kill()
    holder.wait()
    noted(host="elsewhere", boot="another")
    assert locks.crashed_holders() == []


# As a container: process ids of its own.
ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
WHO_DIED = "from tasks.runs import locks; print([holder.pid for _, holder in locks.crashed_holders()])"


@pytest.fixture
def in_container(run):
    if shutil.which("unshare") is None or run([*ALONE, "true"]).returncode != 0:
        pytest.skip("this user may not make a process namespace")
    return lambda code: run([*ALONE, sys.executable, "-c", code])


@pytest.mark.slow
def test_who_is_at_work_in_another_container_is_not_taken_for_dead(holder, in_container):
    """They have the host's name and the folder in common, and number their processes each for itself."""
    found = in_container(WHO_DIED)
    assert found.stdout == "[]\n", found.stderr
    refused = in_container("from tasks.runs import locks; locks.lock('k', 'a training').__enter__()")
    assert f"is already running in process {holder.pid} on " in refused.stderr
    holder.kill()
    holder.wait()
    assert in_container(WHO_DIED).stdout == f"[{holder.pid}]\n", "the lock is free"


def test_a_container_with_a_new_name_ends_what_the_one_before_left(holder):
    noted(host="elsewhere")
    assert locks.crashed_holders() == []
    holder.kill()
    holder.wait()
    ((_, left),) = locks.crashed_holders()
    assert left.pid == holder.pid


ASKING_ITS_ID = "from tasks.runs import locks; print(locks.project_id())"


def test_a_project_has_one_id_that_it_keeps_where_it_is_moved_and_a_copy_has_another(project, monkeypatch):
    command = [sys.executable, "-c", ASKING_ITS_ID]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = {process.communicate()[0].strip() for process in asking}
    assert found == {locks.project_id()}
    assert [path.name for path in Path("mlruns").glob(".id*")] == [".id"]
    copy, moved = project.with_name("copy"), project.with_name("moved")
    shutil.copytree(project, copy)
    project.rename(moved)
    monkeypatch.chdir(moved)
    assert {locks.project_id()} == found
    monkeypatch.chdir(copy)
    assert locks.project_id() not in found


def test_commands_that_do_the_same_have_one_key(project):
    first = config.load(None, {"train.epochs": 3})
    assert locks.key_of(first) == locks.key_of(config.load(None, {"train.epochs": 3, "tracking.system_metrics": False}))
    assert locks.key_of(first) != locks.key_of(config.load(None, {"train.epochs": 4}))


# Each: how the newest run of the same ended, and whether it is resumed.
ENDS = [("KILLED", True), ("FAILED", True), ("RUNNING", True), ("FINISHED", False), (None, True)]


@pytest.mark.parametrize(("status", "taken"), ENDS)
def test_an_unfinished_run_is_resumed(settings, status, taken):
    begin(settings, "older", "KILLED")
    run = begin(settings, "newer", status)
    assert entries.find_unfinished(settings, run.lineage) == (run if taken else None)


def test_a_run_of_other_settings_data_or_code_is_not_resumed(settings):
    run = begin(settings, "one", "KILLED")
    assert entries.find_unfinished(settings, run.lineage) == run
    for change in ({"settings_digest": "x"}, {"data_version": "x"}, {"code_digest": "x"}):
        assert entries.find_unfinished(settings, run.lineage.model_copy(update=change)) is None
    begin(settings, "row", "KILLED", parent_run_id="comparison")
    assert entries.find_unfinished(settings, run.lineage) == run, "a comparison begins its rows itself"
    Path("mlruns/runs/broken/records").mkdir(parents=True)
    Path("mlruns/runs/broken/records/run.json").write_text("{")
    assert entries.find_unfinished(settings, run.lineage) == run


def test_a_run_that_stopped_at_a_bad_loss_is_not_resumed_but_one_that_may_still_roll_back_is(project):
    for kind, most, taken in (("stop", 2, False), ("rollback", 2, True), ("rollback", 1, False)):
        settings = config.load(None, {"train.on_nonfinite": kind, "train.max_rollbacks": most})
        run = begin(settings, f"{kind}{most}", "FAILED")
        outcome.save(run, records.NonFinite(steps=(7, 9)))
        assert (entries.find_unfinished(settings, run.lineage) is not None) is taken


def test_leftovers_of_killed_processes_are_removed_and_those_at_work_left_alone(settings):
    dead = begin(settings, "dead", "RUNNING")
    alive = begin(config.load(None, {"train.seed": 1}), "alive", "RUNNING")
    half = [Path(run.folder, "checkpoints", ".7.partial") for run in (dead, alive)]
    export = Path(dead.folder, "models", ".final.partial.keras")
    scratch = [Path("data/digits", name) for name in (".scratch.x", ".prepared.y")]
    scratch.append(Path("mlruns/.cache.z"))
    whole = [Path(dead.folder, "checkpoints", "5"), Path("data/digits/raw")]
    for folder in (*half, *scratch, *whole, export.parent):
        folder.mkdir(parents=True)
    export.touch()
    outside = Path.cwd().parent / "outside"
    (outside / ".9.partial").mkdir(parents=True)
    linked = begin(config.load(None, {"train.seed": 2}), "linked", "RUNNING")
    Path(linked.folder, "checkpoints").symlink_to(outside)
    for folder in scratch:
        (folder / files.MARK).touch()
    cached = Path("mlruns/.cache.w")
    cached.mkdir()
    with locks.lock(alive.key, "a training"), FileLock(cached / files.MARK):
        assert set(locks.remove_leftovers()) == {(Path.cwd() / path) for path in (half[0], export, *scratch)}
    assert half[1].exists()
    assert cached.exists()
    assert all(path.exists() for path in whole)
    assert [path.name for path in outside.iterdir()] == [".9.partial"], "the user's, behind a link"
    assert not any(path.exists() for path in (half[0], export, *scratch))


KNOWN = "0123456789abcdef0123456789abcdef"


def test_what_a_killed_run_of_the_same_left_is_removed_also_where_a_new_one_begins(settings):
    dead = begin(settings, "dead", "RUNNING")
    half = Path(dead.folder, "checkpoints", ".7.partial")
    half.mkdir(parents=True)
    with locks.lock(dead.key, "a training"):
        assert locks.remove_leftovers() == []
        assert locks.remove_leftovers(dead.key) == [Path.cwd() / half]


def test_an_unknown_run_is_refused_with_those_that_there_are(settings):
    near = KNOWN[:-1] + "e"
    with pytest.raises(UserError, match=f"unknown run '{near}': none exists yet"):
        entries.find_run(near)
    begin(settings, KNOWN, "KILLED")
    with pytest.raises(UserError, match=rf"unknown run '{near}': did you mean '{KNOWN}'\? the newest runs: {KNOWN}"):
        entries.find_run(near)
    assert entries.find_run(KNOWN).run_id == KNOWN


# What leads to the very same folder, or to a run of somebody's elsewhere.
PATHS = (
    "{known}/",
    "./{known}",
    "../runs/{known}",
    "{project}/mlruns/runs/{known}",
    "{elsewhere}",
    "../../{elsewhere}",
    "",
)


def test_who_waits_for_data_is_at_work_on_what_was_asked_for(settings):
    with (
        locks.lock(locks.key_of_asked(settings), "a training"),
        pytest.raises(UserError, match="is already running in process"),
    ):
        locks.refuse_locked(settings)
    locks.refuse_locked(settings)


def test_only_an_id_names_a_run(settings, tmp_path):
    run = begin(settings, KNOWN, "KILLED")
    elsewhere = tmp_path / "elsewhere"
    records.save(run, elsewhere / "records" / "run.json")
    for path in PATHS:
        named = path.format(known=KNOWN, project=Path.cwd(), elsewhere=elsewhere)
        assert entries.look_up(named) is None, "a tag of a server that others write to"
        for refused in (entries.find_run, lambda name: locks.refuse_locked(settings, name)):
            with pytest.raises(UserError, match=f"^unknown run '{named}': .*the newest runs: {KNOWN}$"):
                refused(named)


def test_the_newest_finished_run_that_is_the_same_is_found(settings):
    traced = lineage.collect(settings, "abc")
    assert entries.find_finished("digits", traced) is None
    for number in (1, 2):
        run = write_run(number, **traced.model_dump())
        summary = write_summary(run)
    write_run(3, "KILLED", **traced.model_dump())
    assert entries.find_finished("mnist", traced) is None
    # Another commit with the same code is the same code.
    again = traced.model_copy(update={"git_commit": "other", "git_dirty": True})
    assert entries.find_finished("digits", again) == (run, summary)
    for key in ("data_version", "settings_digest", "code_digest"):
        assert entries.find_finished("digits", traced.model_copy(update={key: "other"})) is None
    # An experiment with other settings changes nothing: a nightly run need not repeat its own.
    write_summary(write_run(4, **{**traced.model_dump(), "settings_digest": "other"}))
    assert entries.find_finished("digits", traced) == (run, summary)
