import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from tasks import config, records, runs
from tasks.system import files
from tasks.system.errors import UserError

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
        key=runs.key_of(settings),
        host=socket.gethostname(),
        number=runs.next_number(),
        **more,
    )
    path = records.save(run, Path(run.folder, "records", "run.json"))
    # A clock that goes backwards.
    moment = 1_000_000_000 * (1000 - run.number)
    os.utime(path, ns=(moment, moment))
    if status is not None:
        runs.set_status(run, status, "some reason")
    return run


HOLDING = """
import sys, time
from tasks import runs
with runs.lock(sys.argv[1], "a training", sys.argv[2]) as held:
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
    assert runs.is_locked("k")
    said = rf"a training with these settings is being done by process {holder.pid} on .+ since 20.+, run abc: wait for"
    with pytest.raises(UserError, match=said) as error, runs.lock("k", "a training"):
        pytest.fail("two at once")
    assert error.value.exit_code == 2
    with runs.lock("other", "a training"):
        assert runs.is_locked("other")
    assert runs.crashed_holders() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_held_is_free_and_its_note_is_found(holder, number):
    holder.send_signal(number)
    holder.wait()
    assert not runs.is_locked("k")
    ((path, left),) = runs.crashed_holders()
    assert (left.pid, left.run_id, left.flow_run_id, left.key) == (holder.pid, "abc", "f", "k")
    with runs.lock("k", "a training"):
        assert runs.crashed_holders() == [(path, left)], "the one of now is not among them"


@pytest.mark.slow
def test_a_clock_that_was_set_back_does_not_make_the_dead_alive(holder):
    holder.kill()
    holder.wait()
    ((path, left),) = runs.crashed_holders()
    os.utime(path, (time.time() + 1000,) * 2)
    with runs.lock("k", "a training"):
        assert runs.crashed_holders() == [(path, left)]
        with pytest.raises(UserError, match=f"by process {os.getpid()} on "), runs.lock("k", "a training"):
            pytest.fail("two at once")


def test_a_lock_that_cannot_be_taken_is_refused_with_its_place(project):
    Path("mlruns/active/k.lock").mkdir(parents=True)
    with pytest.raises(UserError, match=r"active/k\.lock cannot be written \(Is a directory\)"), runs.lock("k", "it"):
        pytest.fail("held")


def test_a_process_that_is_stopped_still_holds(holder):
    holder.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    assert runs.is_locked("k")
    assert runs.crashed_holders() == []


def test_who_ends_leaves_no_note_however_it_ends(project):
    with pytest.raises(ZeroDivisionError), runs.lock("k", "a training"):
        raise ZeroDivisionError
    with runs.lock("k", "a training"):
        pass
    assert list(Path("mlruns/active").iterdir()) == []


TAKING_TURNS = """
import sys, time
from pathlib import Path
from tasks import runs
from tasks.system.errors import UserError
done = 0
while done < 30:
    try:
        with runs.lock("k", "a training"):
            before = int(Path("count").read_text())
            time.sleep(0.001)
            Path("count").write_text(str(before + 1))
            done += 1
    except UserError:
        pass
"""


@pytest.mark.exhaustive
def test_processes_that_take_turns_are_never_at_work_at_once(project):
    Path("count").write_text("0")
    processes = [subprocess.Popen([sys.executable, "-c", TAKING_TURNS]) for _ in range(3)]
    assert [process.wait(300) for process in processes] == [0, 0, 0]
    assert Path("count").read_text() == "90"


def noted(**others):
    """Change what the one note says, as a process would have written it that is elsewhere."""
    (path,) = Path("mlruns/active").glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | others))


def test_the_notes_of_another_machine_are_left_to_it(holder):
    holder.kill()
    holder.wait()
    noted(host="elsewhere", boot="another")
    assert runs.crashed_holders() == []


# As a container: process ids of its own.
ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
WHO_DIED = "from tasks import runs; print([holder.pid for _, holder in runs.crashed_holders()])"


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
    refused = in_container("from tasks import runs; runs.lock('k', 'a training').__enter__()")
    assert f"is being done by process {holder.pid} on " in refused.stderr
    holder.kill()
    holder.wait()
    assert in_container(WHO_DIED).stdout == f"[{holder.pid}]\n", "the lock is free"


def test_a_container_with_a_new_name_ends_what_the_one_before_left(holder):
    noted(host="elsewhere")
    assert runs.crashed_holders() == []
    holder.kill()
    holder.wait()
    ((_, left),) = runs.crashed_holders()
    assert left.pid == holder.pid


def test_the_lock_of_a_killed_process_is_removed_and_one_that_is_held_stays(holder):
    with runs.lock("other", "a training"):
        holder.kill()
        holder.wait()
        assert Path("mlruns/active/k.lock").exists()
        runs.remove_leftovers()
        assert [path.name for path in Path("mlruns/active").glob("*.lock")] == ["other.lock"]
        assert runs.is_locked("other")


ASKING_ITS_ID = "from tasks import runs; print(runs.project_id())"


def test_a_project_has_one_id_that_it_keeps_where_it_is_moved_and_a_copy_has_another(project, monkeypatch):
    command = [sys.executable, "-c", ASKING_ITS_ID]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = {process.communicate()[0].strip() for process in asking}
    assert found == {runs.project_id()}
    assert [path.name for path in Path("mlruns").glob(".id*")] == [".id"]
    copy, moved = project.with_name("copy"), project.with_name("moved")
    shutil.copytree(project, copy)
    project.rename(moved)
    monkeypatch.chdir(moved)
    assert {runs.project_id()} == found
    monkeypatch.chdir(copy)
    assert runs.project_id() not in found


@pytest.mark.parametrize("damaged", [b"", b"../../x:y", b"\xff" * 40])
def test_a_damaged_id_is_made_anew(project, damaged):
    Path("mlruns/.id").write_bytes(damaged)
    made = runs.project_id()
    assert made == runs.project_id()
    assert ":" not in made


def test_commands_that_do_the_same_have_one_key(project):
    first = config.load(None, {"train.epochs": 3})
    assert runs.key_of(first) == runs.key_of(config.load(None, {"train.epochs": 3, "tracking.system_metrics": False}))
    assert runs.key_of(first) != runs.key_of(config.load(None, {"train.epochs": 4}))


# Each: how the newest run of the same ended, and whether it is resumed.
ENDS = [("KILLED", True), ("FAILED", True), ("RUNNING", True), ("FINISHED", False), (None, False)]


@pytest.mark.parametrize(("status", "taken"), ENDS)
def test_an_unfinished_run_is_resumed(settings, status, taken):
    begin(settings, "older", "KILLED")
    run = begin(settings, "newer", status)
    assert runs.find_unfinished(settings, run.lineage) == (run if taken else None)


def test_a_run_of_other_settings_data_or_code_is_not_resumed(settings):
    run = begin(settings, "one", "KILLED")
    assert runs.find_unfinished(settings, run.lineage) == run
    for change in ({"settings_digest": "x"}, {"data_version": "x"}, {"code_digest": "x"}):
        assert runs.find_unfinished(settings, run.lineage.model_copy(update=change)) is None
    begin(settings, "row", "KILLED", parent_run_id="comparison")
    assert runs.find_unfinished(settings, run.lineage) == run, "a comparison begins its rows itself"
    Path("mlruns/runs/broken/records").mkdir(parents=True)
    Path("mlruns/runs/broken/records/run.json").write_text("{")
    assert runs.find_unfinished(settings, run.lineage) == run


def test_a_run_that_stopped_at_a_bad_loss_is_not_resumed_but_one_that_may_still_roll_back_is(project):
    for kind, most, taken in (("stop", 2, False), ("rollback", 2, True), ("rollback", 1, False)):
        settings = config.load(None, {"train.on_nonfinite": kind, "train.max_rollbacks": most})
        run = begin(settings, f"{kind}{most}", "FAILED")
        runs.mark_nonfinite(run, 7)
        runs.mark_nonfinite(run, 9)
        assert runs.nonfinite_steps(run) == (7, 9)
        assert (runs.find_unfinished(settings, run.lineage) is not None) is taken


def test_what_stages_left_is_found_and_forgotten(settings):
    run = begin(settings, "one", "KILLED")
    registered = records.RegisteredModel(
        run_id="one", model_uri=None, model_name="m", model_version=None, aliases=(), reason="r"
    )
    assert runs.load_result(run, records.RegisteredModel) is None
    records.save(registered, Path(run.folder, "records", "registration.json"))
    Path(run.folder, "summary.json").write_text("{}")
    Path(run.folder, "checkpoints", "7").mkdir(parents=True)
    assert runs.load_result(run, records.RegisteredModel) == registered
    runs.forget_results(run)
    assert runs.load_result(run, records.RegisteredModel) is None
    assert not Path(run.folder, "summary.json").exists()
    assert Path(run.folder, "checkpoints", "7").is_dir()


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
    with runs.lock(alive.key, "a training"), FileLock(cached / files.MARK):
        assert set(runs.remove_leftovers()) == {(Path.cwd() / path) for path in (half[0], export, *scratch)}
    assert half[1].exists()
    assert cached.exists()
    assert all(path.exists() for path in whole)
    assert [path.name for path in outside.iterdir()] == [".9.partial"], "the user's, behind a link"
    assert not any(path.exists() for path in (half[0], export, *scratch))


def test_a_file_that_says_nothing_of_a_flow_run_hides_no_other_one(project):
    end = records.FlowEnd(flow_run_id="7d5f8f0e-2f6c-4f6f-9c0e-0a4f5b0c1d2e", state="COMPLETED", message="")
    runs.keep_unreported(end)
    folder = Path("mlruns/unreported")
    for number, content in enumerate((b"", b'{"flow_run_id": "x', b"\xff", b"[5]")):
        (folder / f"{number}.json").write_bytes(content)
    (folder / "folder.json").mkdir()
    assert [found for _, found in runs.unreported()] == [end]


KNOWN = "0123456789abcdef0123456789abcdef"


def test_what_a_killed_run_of_the_same_left_is_removed_also_where_a_new_one_begins(settings):
    dead = begin(settings, "dead", "RUNNING")
    half = Path(dead.folder, "checkpoints", ".7.partial")
    half.mkdir(parents=True)
    with runs.lock(dead.key, "a training"):
        assert runs.remove_leftovers() == []
        assert runs.remove_leftovers(dead.key) == [Path.cwd() / half]


def test_an_unknown_run_is_refused_with_those_that_there_are(settings):
    near = KNOWN[:-1] + "e"
    with pytest.raises(UserError, match=f"unknown run '{near}': there is none yet"):
        runs.find_run(near)
    begin(settings, KNOWN, "KILLED")
    with pytest.raises(UserError, match=rf"unknown run '{near}': did you mean '{KNOWN}'\? the newest runs: {KNOWN}"):
        runs.find_run(near)
    assert runs.find_run(KNOWN).run_id == KNOWN


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
        runs.lock(runs.key_of_asked(settings), "a training"),
        pytest.raises(UserError, match="is being done by process"),
    ):
        runs.refuse_locked(settings)
    runs.refuse_locked(settings)


def test_only_an_id_names_a_run(settings, tmp_path):
    run = begin(settings, KNOWN, "KILLED")
    elsewhere = tmp_path / "elsewhere"
    records.save(run, elsewhere / "records" / "run.json")
    for path in PATHS:
        named = path.format(known=KNOWN, project=Path.cwd(), elsewhere=elsewhere)
        assert runs.look_up(named) is None, "a tag of a server that others write to"
        for refused in (runs.find_run, lambda name: runs.refuse_locked(settings, name)):
            with pytest.raises(UserError, match=f"^unknown run '{named}': .*the newest runs: {KNOWN}$"):
                refused(named)


# What a record holds that leads out of mlruns/, where it is read from the disk.
EDITS = [
    ("run.json", "folder", "../elsewhere"), ("run.json", "folder", "/elsewhere"), ("run.json", "folder", "data"),
    ("run.json", "folder", "mlruns/runs/../../elsewhere"), ("run.json", "key", "../../x"),
    ("run.json", "run_id", "../x"), ("run.json", "parent_run_id", "../../x"), ("training.json", "run_id", "../x"),
    ("training.json", "final_model", "../secret.keras"), ("training.json", "checkpoints", "/elsewhere"),
]  # fmt: skip


def test_a_record_that_was_edited_leads_nowhere_else(settings):
    run = begin(settings, KNOWN, "KILLED")
    folder = run.folder
    trained = records.TrainingResult(
        run_id=KNOWN, dataset="d", strategy="s", loop="fit", num_replicas=1, devices=("cpu:0",), global_batch_size=8,
        epochs=1, steps=1, num_parameters=1, examples_per_second=None, setup_seconds=1.0, first_call_seconds=None,
        epoch_seconds=(), history={}, stopped_early=False, checkpoints=f"{folder}/checkpoints",
        checkpoint=f"{folder}/checkpoints/1", best_checkpoint=f"{folder}/checkpoints/1",
        final_model=f"{folder}/models/final-1.keras", best_model=f"{folder}/models/best-1.keras", weights_digest="w",
        best_weights_digest="w", optimizer="SGD",
    )  # fmt: skip
    for name, field, value in EDITS:
        records.save(run, Path(folder, "records", "run.json"))
        path = records.save(trained, Path(folder, "records", "training.json")).with_name(name)
        assert runs.load_training(runs.find_run(KNOWN)) == trained
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
        with pytest.raises(UserError, match=rf"{name} is not a readable"):
            runs.load_training(runs.find_run(KNOWN))
        assert (runs.look_up(KNOWN) is None) == (name == "run.json")


def test_a_status_is_json_that_others_can_read(settings):
    run = begin(settings, "one")
    assert runs.status(run) is None
    runs.set_status(run, "KILLED", "it was stopped")
    found = json.loads(Path(run.folder, "status.json").read_text())
    assert (found["status"], found["reason"]) == ("KILLED", "it was stopped")
    assert runs.status(run).status == "KILLED"


def test_what_another_process_changes_is_seen(settings):
    """A process reads the record of a run once, until there is another one."""
    run = begin(settings, "one", "KILLED")
    path = Path(run.folder, "records", "run.json")
    assert runs.newest("digits") == run
    for number in range(2, 50):
        now = run.model_copy(update={"number": number})
        records.save(now, path)
        assert runs.newest("digits") == now
        assert runs.next_number() == number + 1
    path.write_text("{")
    assert runs.find_unfinished(settings, run.lineage) is None
    shutil.rmtree(run.folder)
    assert runs.next_number() == 1


def test_two_runs_that_begin_within_one_tick_of_the_clock_are_both_seen(settings):
    run = begin(settings, "one", "KILLED")
    folder = Path("mlruns/runs")
    before = folder.stat()
    assert runs.next_number() == 2
    other = run.model_copy(update={"run_id": "two", "folder": "mlruns/runs/two", "number": 2})
    records.save(other, Path(other.folder, "records", "run.json"))
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert runs.next_number() == 3
