"""Runs at a remote that is a folder: what lies there when, what is removed, what is brought back, and what is refused.

tests/processes/test_object_store.py is the same with a bucket, and with trainings.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tasks import config, records, runs
from tasks.runs import committed, remote
from tasks.runs.remote import address, copying
from tasks.system import files, machine, network
from tasks.system.errors import UserError
from tests.tasks.written_runs import run_id_of, write_run


@pytest.fixture(autouse=True)
def _no_thread_is_left(project):
    """A copy that is under way goes on after its block, in whatever folder this process is by then."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("remote-"):
            thread.join(60)


@pytest.fixture
def place(tmp_path):
    """The folder of the first run at the remote."""
    return tmp_path / "remote" / "runs" / run_id_of(1)


@pytest.fixture
def run(project, tmp_path):
    """A run that is at work, with whole checkpoints of the steps 41 and 82, and its remote."""
    run = write_run(1, "RUNNING")
    for step in (41, 82):
        write_checkpoint(run, step)
    copying._save_mark(run, records.ToCopy(address=f"file://{tmp_path}/remote"))
    return run


def write_checkpoint(run: records.Run, step: int, value: float = 0.0) -> Path:
    folder = Path(run.folder) / "checkpoints" / str(step)
    folder.mkdir(exist_ok=True)
    np.savez(folder / "arrays.npz", weights=np.full(9, step + value))
    content = {"state": {"step": step}, "metrics": {}, "arrays_sha256": files.digest(folder / "arrays.npz")}
    (folder / "state.json").write_bytes(committed.signed(content))
    return folder


def copy(run: records.Run, tmp_path: Path) -> None:
    copying.copy_run(run, f"file://{tmp_path}/remote")


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def settings_with(tmp_path: Path) -> config.Settings:
    return config.load(None, {"checkpoint.remote": f"file://{tmp_path}/remote"})


def as_another_machine(run: records.Run) -> None:
    """Lose mlruns/ with the run in it, as a fresh clone has none."""
    shutil.rmtree("mlruns")
    Path("mlruns").mkdir()


def test_all_of_a_run_is_copied_and_comes_back_as_it_was(run, tmp_path, place, capsys):
    before = {name: (Path(run.folder) / name).read_bytes() for name in names(Path(run.folder))}
    Path(run.folder, "records", "uncommitted.diff").write_text("planted")  # Which is this user's alone.
    copy(run, tmp_path)
    assert "planted" not in (place / "run.json").read_text()
    assert names(place) == [
        "checkpoints/41/arrays.npz", "checkpoints/41/state.json",
        "checkpoints/82/arrays.npz", "checkpoints/82/state.json",
        "files/models/best.keras", "files/models/final.keras", "files/report/history.csv", "run.json",
    ]  # fmt: skip
    as_another_machine(run)
    remote.bring(settings_with(tmp_path), "latest")
    left_out = ("status.json", "remote.json", ".remote.lock")
    after = {name: (Path(run.folder) / name).read_bytes() for name in names(Path(run.folder))}
    assert {k: v for k, v in after.items() if k not in left_out} == {
        k: v for k, v in before.items() if k not in left_out
    }
    assert runs.status(run).status == "KILLED", "its machine ended it"
    assert "checkpoints of steps 41, 82" in capsys.readouterr().err


def test_what_is_pruned_here_is_pruned_there_and_a_step_that_is_done_again_is_replaced(run, tmp_path, place):
    copy(run, tmp_path)
    shutil.rmtree(Path(run.folder) / "checkpoints" / "41")
    again = write_checkpoint(run, 82, value=0.5)
    write_checkpoint(run, 123)
    (Path(run.folder) / "models" / "best.keras").unlink()
    copy(run, tmp_path)
    assert [name for name in names(place) if name.startswith("checkpoints")] == [
        "checkpoints/123/arrays.npz", "checkpoints/123/state.json",
        "checkpoints/82/arrays.npz", "checkpoints/82/state.json",
    ]  # fmt: skip
    assert (place / "checkpoints" / "82" / "arrays.npz").read_bytes() == (again / "arrays.npz").read_bytes()
    assert "files/models/best.keras" not in names(place)


def test_a_folder_that_lost_its_checkpoints_loses_none_there_and_gets_them_back(run, tmp_path, place):
    copy(run, tmp_path)
    shutil.rmtree(Path(run.folder) / "checkpoints")
    copy(run, tmp_path)
    assert "checkpoints/82/state.json" in names(place)
    remote.check_still_ours(run, f"file://{tmp_path}/remote")
    assert names(Path(run.folder) / "checkpoints") == [
        "41/arrays.npz", "41/state.json", "82/arrays.npz", "82/state.json",
    ]  # fmt: skip


STOPPED = """
import sys
from pathlib import Path
from tasks import runs
from tasks.runs.remote import address, copying

left = int(sys.argv[1])

def counted(original):
    def call(*given, **more):
        global left
        if not left:
            import os
            os._exit(9)
        left -= 1
        return original(*given, **more)
    return call

for name in ("put", "write", "remove"):
    setattr(address.Place, name, counted(getattr(address.Place, name)))
copying.copy_run(runs.find_run(sys.argv[2]), sys.argv[3])
"""


@pytest.mark.slow
def test_a_copy_that_is_ended_anywhere_leaves_what_was_whole_before(run, tmp_path, place):
    """Killed before each of its writes, one after the other: what comes back is a run as it once was."""
    copy(run, tmp_path)
    shutil.rmtree(Path(run.folder) / "checkpoints" / "41")
    write_checkpoint(run, 82, value=0.5)
    write_checkpoint(run, 123)
    (Path(run.folder) / "metrics.jsonl").write_text("[]")
    kept = tmp_path / "kept"
    shutil.copytree(place.parent, kept)
    ended, writes = 9, 0
    while ended == 9:
        shutil.rmtree(place.parent)
        shutil.copytree(kept, place.parent)
        command = [sys.executable, "-c", STOPPED, str(writes), run.run_id, f"file://{tmp_path}/remote"]
        ended = subprocess.run(command, check=False).returncode
        whole = []
        for state in place.glob("checkpoints/*/state.json"):
            committed.verify(state.parent)  # What has a state is whole.
            whole.append(int(state.parent.name))
        assert {41, 82, 123} & set(whole)
        assert copying.read_index(address.open_place(f"file://{place}")).texts["records/run.json"]
        writes += 1
    assert (ended, writes) == (0, 9), "killed before each of 8 writes and removals"


def test_a_damaged_checkpoint_is_neither_copied_nor_brought(run, tmp_path, place, capsys):
    (Path(run.folder) / "checkpoints" / "82" / "arrays.npz").write_bytes(b"no array")
    copy(run, tmp_path)
    assert "checkpoints/82/state.json" not in names(place)
    write_checkpoint(run, 82)
    copy(run, tmp_path)
    (place / "checkpoints" / "82" / "arrays.npz").write_bytes(b"no array")
    as_another_machine(run)
    remote.bring(settings_with(tmp_path), run.run_id[:6])
    assert copying.steps_in(Path(run.folder)) == [41]
    assert "the checkpoint of step 82 at the remote is damaged" in capsys.readouterr().err


def test_a_model_that_was_being_replaced_lets_its_stages_be_done_again(run, tmp_path, place):
    result = Path(run.folder) / "records" / "training.json"
    result.write_text("{}")
    copy(run, tmp_path)
    (place / "files" / "models" / "final.keras").write_bytes(b"newer than the index")
    as_another_machine(run)
    remote.bring(settings_with(tmp_path), run.run_id)
    assert not result.exists()
    assert not (Path(run.folder) / "models" / "final.keras").exists()
    assert (Path(run.folder) / "models" / "best.keras").exists()


def test_of_two_machines_only_the_one_that_took_the_run_up_last_copies_it(run, tmp_path, place, capsys):
    where = f"file://{tmp_path}/remote"
    copy(run, tmp_path)
    shutil.copytree(run.folder, tmp_path / "lost")
    as_another_machine(run)  # With another id of the project.
    remote.bring(settings_with(tmp_path), "latest")
    copy(run, tmp_path)
    taken = copying.read_index(address.open_place(f"file://{place}"))
    as_another_machine(run)  # The first one again, which was not lost.
    shutil.copytree(tmp_path / "lost", run.folder)
    with pytest.raises(copying.TakenOver, match="is gone on with by another copy of the project"):
        copy(run, tmp_path)
    with pytest.raises(UserError, match="Resume it there, or start a new one with --fresh"):
        remote.check_still_ours(run, where)
    assert copying.read_index(address.open_place(f"file://{place}")) == taken


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(copying, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(copying, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(copying, "PATIENCE_SECONDS", 0.5)


@pytest.mark.usefixtures("quick")
def test_what_the_remote_does_not_take_is_told_once_kept_and_delivered_later(run, tmp_path, place, capsys):
    _said.clear()
    (tmp_path / "remote").write_text("a file where the folder should be")
    with remote.copied_meanwhile(run, f"file://{tmp_path}/remote"):
        await_that(lambda: "cannot be copied" in capsys_so_far(capsys))
    runs.set_status(run, "FINISHED")
    remote.finish(run)
    assert capsys_so_far(capsys).count("cannot be copied") == 1
    assert len(remote.deliver_kept()[1]) == 1
    (tmp_path / "remote").unlink()
    assert remote.deliver_kept("file:///another") == ([], []), "that is not its remote"
    (ended,), kept = remote.deliver_kept()
    assert (ended.what, kept) == (f"the copy of run {run.run_id}", [])
    assert "checkpoints/82/state.json" in names(place)
    assert remote.deliver_kept() == ([], []), "it is whole"


_said: list[str] = []


def capsys_so_far(capsys) -> str:
    _said.append(capsys.readouterr().err)
    return "".join(_said)


def await_that(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.usefixtures("quick")
def test_what_comes_while_a_training_goes_on_is_copied_meanwhile(run, tmp_path, place, capsys):
    _said.clear()
    copied = remote.copied_meanwhile(run, f"file://{tmp_path}/remote")
    with runs.lock(run.key, "a run"), copied:  # As a training holds it.
        await_that((place / "run.json").exists)
        (tmp_path / "remote").rename(tmp_path / "away")
        (tmp_path / "remote").write_text("the remote is away")
        write_checkpoint(run, 123)
        await_that(lambda: "cannot be copied" in capsys_so_far(capsys))
        (tmp_path / "remote").unlink()
        (tmp_path / "away").rename(tmp_path / "remote")
        await_that(lambda: "is copied to" in capsys_so_far(capsys))
    assert "checkpoints/123/state.json" in names(place)


@pytest.mark.usefixtures("quick")
def test_the_end_of_a_run_waits_for_no_remote_that_hangs(run, tmp_path, capsys, monkeypatch):
    _said.clear()
    hangs, over = threading.Event(), threading.Event()
    monkeypatch.setattr(address.Place, "put", lambda *given: (hangs.set(), over.wait(60)))
    with remote.copied_meanwhile(run, f"file://{tmp_path}/remote"):
        assert hangs.wait(60)
    runs.set_status(run, "FINISHED")
    ending = threading.Thread(target=remote.finish, args=(run,), daemon=True)
    ending.start()
    ending.join(30)
    assert not ending.is_alive(), "it waits for the lock of the one that hangs"
    assert "nothing arrived in 0.5 seconds" in capsys_so_far(capsys)
    assert (Path(run.folder) / "remote.json").exists(), "it is kept"
    over.set()


def test_a_run_that_was_pruned_here_stays_there(run, tmp_path, place):
    copy(run, tmp_path)
    runs.set_status(run, "FINISHED")
    shutil.rmtree(Path(run.folder) / "checkpoints")
    records.save(records.Pruned(at="now", num_bytes=1), Path(run.folder) / "records" / "pruned.json")
    remote.finish(run)
    assert "checkpoints/82/state.json" in names(place)


@pytest.mark.parametrize("name", ["../../../evil.json", "/evil.json", "records/../../evil.json", ".hidden", ""])
def test_a_name_at_the_remote_that_leads_out_of_the_run_is_refused(run, tmp_path, place, name):
    copy(run, tmp_path)
    there = address.open_place(f"file://{place}")
    index = copying.read_index(there)
    copying.write_index(there, index.model_copy(update={"texts": {**index.texts, name: "evil"}}))
    as_another_machine(run)
    with pytest.raises(UserError, match=rf"run {run.run_id} at .* is damaged"):
        remote.bring(settings_with(tmp_path), "latest")
    assert names(Path("mlruns")) in ([".id"], [".fetch.lock", ".id"], [".fetch.lock"])
    assert not list(tmp_path.rglob("evil.json"))


def test_an_index_of_which_a_byte_is_another_one_brings_nothing(run, tmp_path, place):
    copy(run, tmp_path)
    content = (place / "run.json").read_text()
    (place / "run.json").write_text(content.replace('"seed": 0', '"seed": 1').replace("seed", "sead", 1))
    as_another_machine(run)
    with pytest.raises(UserError, match="is damaged"):
        remote.bring(settings_with(tmp_path), run.run_id)
    assert not Path(run.folder).exists()


def test_the_latest_is_of_the_dataset_and_what_is_not_there_is_refused_with_what_is(run, tmp_path):
    copy(run, tmp_path)
    copy(write_run(2, overrides={"dataset.name": "mnist"}), tmp_path)
    as_another_machine(run)
    other = config.load(None, {"checkpoint.remote": f"file://{tmp_path}/remote", "dataset.name": "fashion_mnist"})
    with pytest.raises(UserError, match=r"no such run on fashion_mnist .* nor at .*remote, which has 0001eee"):
        remote.bring(other, "latest")
    with pytest.raises(UserError, match="there is no such run in mlruns/, nor at"):
        remote.bring(settings_with(tmp_path), "ffff")
    with pytest.raises(UserError, match="2 runs at the remote begin so"):
        remote.bring(settings_with(tmp_path), "000")
    remote.bring(settings_with(tmp_path), "latest")
    assert runs.newest("digits").run_id == run.run_id


def test_bring_does_nothing_for_a_run_that_is_here(run, tmp_path):
    remote.bring(settings_with(tmp_path), run.run_id)
    assert not (tmp_path / "remote").exists()


@pytest.mark.parametrize(
    ("scheme", "says"),
    [
        ("gs", r"gcsfs, .*pip install 'stratagem\[gs\]'"),
        ("abfs", r"adlfs, .*pip install 'stratagem\[abfs\]'"),
        ("s3", r"s3fs, .*pip install 'stratagem\[s3\]'"),
    ],
)
def test_a_missing_package_is_named(scheme, says, monkeypatch):
    for package in ("gcsfs", "adlfs", "s3fs"):
        monkeypatch.setitem(sys.modules, package, None)  # Python then finds no such module.
    with pytest.raises(UserError, match=rf"checkpoint.remote = {scheme}://b/f needs the package .*{says}"):
        remote.check(f"{scheme}://b/f")


@pytest.mark.parametrize(
    ("scheme", "error", "says"),
    [
        ("gs", PermissionError("denied"), "GOOGLE_APPLICATION_CREDENTIALS"),
        ("abfs", OSError("Server failed to authenticate the request"), "AZURE_STORAGE_ACCOUNT_NAME and"),
        ("azure", PermissionError("denied"), "AZURE_STORAGE_ACCOUNT_NAME and"),
        ("s3", PermissionError("denied"), "AWS_ACCESS_KEY_ID and"),
        ("gs", FileNotFoundError("b"), "STORAGE_EMULATOR_HOST"),
        ("abfs", OSError("The specified container does not exist"), "AZURE_STORAGE_CONNECTION_STRING"),
        ("s3", FileNotFoundError("b"), "AWS_ENDPOINT_URL"),
    ],
)
def test_what_is_refused_names_the_variables_of_its_provider(scheme, error, says):
    refused = address.refusal(error, f"{scheme}://b/f", "checkpoint.remote")
    assert f"such as {says}" in str(refused)


def test_azure_without_an_account_is_one_message(monkeypatch):
    pytest.importorskip("adlfs", reason="make setup")
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match=r"= abfs://b/f: .*such as AZURE_STORAGE_ACCOUNT_NAME and"):
        remote.check("abfs://b/f")


@pytest.fixture
def google(monkeypatch):
    """A bucket `runs` of an emulator of Google Cloud Storage."""
    pytest.importorskip("gcsfs", reason="make setup")
    pytest.importorskip("gcp_storage_emulator", reason="make setup")
    (port,) = machine.free_ports(1)
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen([*command, "--in-memory", "--default-bucket", "runs"], stderr=subprocess.DEVNULL)
    try:
        while network.unreachable_reason(f"http://127.0.0.1:{port}") is not None:
            assert process.poll() is None
            time.sleep(0.05)
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        yield
    finally:
        process.kill()
        process.wait()


def test_a_bucket_of_google_cloud_storage_has_a_run_and_brings_it_back(run, google, caplog):
    target = "gs://runs/ours"
    with pytest.raises(UserError, match=r"there is no bucket 'absent' .* such as STORAGE_EMULATOR_HOST"):
        remote.check("gs://absent/ours")
    remote.check(target)
    copying._save_mark(run, records.ToCopy(address=target))
    kept = {
        name: (Path(run.folder) / "checkpoints" / name).read_bytes() for name in names(Path(run.folder) / "checkpoints")
    }
    copying.copy_run(run, target)
    assert len(kept) == 4
    as_another_machine(run)
    remote.bring(config.load(None, {"checkpoint.remote": target}), run.run_id)
    assert {name: (Path(run.folder) / "checkpoints" / name).read_bytes() for name in kept} == kept
    assert "bucket type" not in caplog.text, "gcsfs says it at each request"


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path, mount_small):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"cannot be written .*Give a folder that user"):
        remote.check(f"file://{tmp_path}/file/runs")
    (tmp_path / "small").mkdir()
    mount_small(tmp_path / "small", "size=16k")
    (tmp_path / "small" / "full").write_bytes(bytes(16384 - 4096))
    (tmp_path / "small" / "more").write_bytes(bytes(4096))
    with pytest.raises(UserError, match=r"there is no room: .*Make room there"):
        remote.check(f"file://{tmp_path}/small/runs")
    address.check.cache_clear()
    remote.check(f"file://{tmp_path}/good")
    assert names(tmp_path / "good") == []


def test_a_run_that_does_not_fit_here_is_refused(run, tmp_path, place):
    copy(run, tmp_path)
    as_another_machine(run)
    free = shutil.disk_usage(tmp_path).free
    os.truncate(place / "checkpoints" / "82" / "arrays.npz", free + 10**9)  # A hole, which takes no room there.
    with pytest.raises(UserError, match=r"cannot be brought here: it has [\d,.]+ MB, and .* has [\d,.]+ MB free"):
        remote.bring(settings_with(tmp_path), "latest")
    assert not Path(run.folder).exists()


def test_what_lies_there_can_be_read_without_this_project(run, tmp_path, place):
    copy(run, tmp_path)
    index = json.loads((place / "run.json").read_text())
    assert json.loads(index["texts"]["records/run.json"])["run_id"] == run.run_id
    assert index["files"]["models/final.keras"] == files.digest(place / "files" / "models" / "final.keras")
