"""Runs at a remote that is a folder: what lies there when, what is removed, what is brought back, and what is refused.

tests/processes/test_object_store.py is the same with a bucket, and with trainings.
"""

import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tasks import config, records
from tasks.runs import committed, entries, outcome, remote
from tasks.system import files, machine, network
from tasks.system.errors import UserError
from tests.tasks.written_runs import run_id_of, write_run
from tests.waiting import wait


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
    (Path(run.folder) / remote.MARK).write_text(f"file://{tmp_path}/remote")
    return run


def write_checkpoint(run: records.Run, step: int, value: float = 0.0) -> Path:
    folder = Path(run.folder) / "checkpoints" / str(step)
    folder.mkdir(exist_ok=True)
    np.savez(folder / "arrays.npz", weights=np.full(9, step + value))
    content = {"state": {"step": step}, "metrics": {}, "arrays_sha256": files.digest(folder / "arrays.npz")}
    (folder / "state.json").write_bytes(committed.signed(content))
    return folder


def copy(run: records.Run, tmp_path: Path) -> None:
    remote.copy_run(run, f"file://{tmp_path}/remote")


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
        "models/best.keras", "models/final.keras", "report/history.csv", "run.json",
    ]  # fmt: skip
    as_another_machine(run)
    remote.bring(settings_with(tmp_path), "latest")
    left_out = ("status.json", remote.MARK)
    after = {name: (Path(run.folder) / name).read_bytes() for name in names(Path(run.folder))}
    assert {k: v for k, v in after.items() if k not in left_out} == {
        k: v for k, v in before.items() if k not in left_out
    }
    assert outcome.status(run).status == "KILLED", "its machine ended it"
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
    assert "models/best.keras" not in names(place)


STOPPED = """
import os
import sys
from fsspec.implementations.dirfs import DirFileSystem
from tasks.runs import entries
from tasks.runs import remote

left = int(sys.argv[1])

def counted(original):
    def call(*given, **more):
        global left
        if not left:
            os._exit(9)
        left -= 1
        return original(*given, **more)
    return call

for name in ("put_file", "pipe_file", "mv", "rm_file"):
    setattr(DirFileSystem, name, counted(getattr(DirFileSystem, name)))
remote.copy_run(entries.find_run(sys.argv[2]), sys.argv[3])
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
        Path("mlruns").rename(tmp_path / "here")
        remote.bring(settings_with(tmp_path), "latest")
        whole = {int(committed.verify(path)["state"]["step"]) for path in Path(run.folder).glob("checkpoints/*")}
        assert {41, 82, 123} & whole
        shutil.rmtree("mlruns")
        (tmp_path / "here").rename("mlruns")
        writes += 1
    assert (ended, writes) == (0, 9), "killed before each of 8 writes and removals"


def test_a_checkpoint_that_is_damaged_at_the_remote_is_not_brought(run, tmp_path, place, capsys):
    copy(run, tmp_path)
    (place / "checkpoints" / "82" / "arrays.npz").write_bytes(b"no array")
    as_another_machine(run)
    remote.bring(settings_with(tmp_path), run.run_id[:6])
    assert committed.steps(Path(run.folder, "checkpoints")) == [41]
    assert "the checkpoint of step 82 at the remote is damaged" in capsys.readouterr().err


def test_a_model_that_was_being_replaced_lets_its_stages_be_done_again(run, tmp_path, place):
    result = Path(run.folder) / "records" / "training.json"
    result.write_text("{}")
    copy(run, tmp_path)
    (place / "models" / "final.keras").write_bytes(b"newer than the index")
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
    taken = remote.read_index(remote.open_place(f"file://{place}"))
    as_another_machine(run)  # The first one again, which was not lost.
    shutil.copytree(tmp_path / "lost", run.folder)
    with pytest.raises(UserError, match="another copy of the project has resumed run"):
        copy(run, tmp_path)
    with pytest.raises(UserError, match="Resume it there, or start a new one with --fresh"):
        remote.check_still_ours(run, where)
    assert remote.read_index(remote.open_place(f"file://{place}")) == taken


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(remote, "_told", set())
    monkeypatch.setattr(remote, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.01)


@pytest.mark.usefixtures("quick")
def test_what_the_remote_does_not_take_is_told_once_kept_and_delivered_later(run, tmp_path, place, capsys):
    _said.clear()
    (tmp_path / "remote").write_text("a file where the folder should be")
    with remote.copied_meanwhile(run, f"file://{tmp_path}/remote"):
        wait("a warning", lambda: "cannot be copied" in capsys_so_far(capsys), 60)
    outcome.set_status(run, "FINISHED")
    remote.finish(run)
    assert capsys_so_far(capsys).count("cannot be copied") == 1
    assert remote.deliver_kept() == []
    (tmp_path / "remote").unlink()
    assert [ended.what for ended in remote.deliver_kept()] == [f"the copy of run {run.run_id}"]
    assert "checkpoints/82/state.json" in names(place)
    assert remote.deliver_kept() == [], "it is whole"


_said: list[str] = []


def capsys_so_far(capsys) -> str:
    _said.append(capsys.readouterr().err)
    return "".join(_said)


def test_a_run_that_was_pruned_here_stays_there(run, tmp_path, place):
    copy(run, tmp_path)
    outcome.set_status(run, "FINISHED")
    shutil.rmtree(Path(run.folder) / "checkpoints")
    records.save(records.Pruned(at="now", num_bytes=1), Path(run.folder) / "records" / "pruned.json")
    remote.finish(run)
    assert "checkpoints/82/state.json" in names(place)


@pytest.mark.parametrize("name", ["../../../evil.json", "/evil.json", "records/../../evil.json", ".hidden", ""])
def test_a_name_at_the_remote_that_leads_out_of_the_run_is_refused(run, tmp_path, place, name):
    copy(run, tmp_path)
    there = remote.open_place(f"file://{place}")
    index = remote.read_index(there)
    remote.write_index(there, index.model_copy(update={"texts": {**index.texts, name: "evil"}}))
    as_another_machine(run)
    with pytest.raises(UserError, match=rf"run {run.run_id} at .* is damaged"):
        remote.bring(settings_with(tmp_path), run.run_id)
    assert names(Path("mlruns")) in ([".id"], [])
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
    with pytest.raises(UserError, match=r"no such run on fashion_mnist exists .* or at .*remote, which has 0001eee"):
        remote.bring(other, "latest")
    with pytest.raises(UserError, match="no such run exists in mlruns/ or at"):
        remote.bring(settings_with(tmp_path), "ffff")
    with pytest.raises(UserError, match="2 runs at the remote begin with it"):
        remote.bring(settings_with(tmp_path), "000")
    remote.bring(settings_with(tmp_path), "latest")
    assert entries.newest("digits").run_id == run.run_id


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
    ("scheme", "says"),
    [
        ("gs", "GOOGLE_APPLICATION_CREDENTIALS, .* STORAGE_EMULATOR_HOST"),
        ("azure", "AZURE_STORAGE_ACCOUNT_NAME and .* AZURE_STORAGE_CONNECTION_STRING"),
        ("s3", "AWS_ACCESS_KEY_ID and .* AWS_ENDPOINT_URL"),
    ],
)
def test_what_is_refused_names_the_variables_of_its_provider(scheme, says):
    refused = remote.refusal(PermissionError("denied"), f"{scheme}://b/f")
    assert re.search(f"PermissionError: denied.* such as {says}", refused)


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
    with pytest.raises(UserError, match=r"gs://absent/ours cannot be written to: .* STORAGE_EMULATOR_HOST"):
        remote.check("gs://absent/ours")
    remote.check(target)
    (Path(run.folder) / remote.MARK).write_text(target)
    kept = {
        name: (Path(run.folder) / "checkpoints" / name).read_bytes() for name in names(Path(run.folder) / "checkpoints")
    }
    remote.copy_run(run, target)
    assert len(kept) == 4
    as_another_machine(run)
    remote.bring(config.load(None, {"checkpoint.remote": target}), run.run_id)
    assert {name: (Path(run.folder) / "checkpoints" / name).read_bytes() for name in kept} == kept
    assert "bucket type" not in caplog.text, "gcsfs says it at each request"


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path, mount_small):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"cannot be written to: .*Choose a folder that user"):
        remote.check(f"file://{tmp_path}/file/runs")
    (tmp_path / "small").mkdir()
    mount_small(tmp_path / "small", "size=16k")
    (tmp_path / "small" / "full").write_bytes(bytes(16384 - 4096))
    (tmp_path / "small" / "more").write_bytes(bytes(4096))
    with pytest.raises(UserError, match=r"cannot be written to: .*No space left.*free space"):
        remote.check(f"file://{tmp_path}/small/runs")
    remote.check.cache_clear()
    remote.check(f"file://{tmp_path}/good")
    assert names(tmp_path / "good") == []
