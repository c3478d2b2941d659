import hashlib
import importlib.util
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from tasks import config
from tasks.data import dataset_folder
from tasks.operations import dvc_data
from tasks.process import stages
from tasks.runs import dvc
from tasks.system.errors import StratagemError, UserError


def _load(*overrides: str) -> config.Settings:
    return config.load(None, overrides)


# Each: what data/digits/params.yaml says, what the settings ask for, what is refused.
CONTRADICTIONS = [
    ({}, "dataset.version=9.9.9", "dataset.version = 9.9.9: data/digits/params.yaml says null"),
    ({"version": "1.0.0"}, "dataset.version=2.0.0", "dataset.version = 2.0.0: data/digits/params.yaml says 1.0.0"),
    ({}, "dataset.image_size=[16,16]", r"dataset.image_size = \[16, 16\]: data/digits/params.yaml says null"),
    ({"image_size": [8, 8]}, "dataset.image_size=[16,16]", r"params.yaml says \[8, 8\]"),
]


@pytest.mark.parametrize(("present", "override", "message"), CONTRADICTIONS)
def test_settings_that_contradict_the_datasets_own_are_refused(project, present, override, message):
    path = project / "data" / "digits" / "params.yaml"
    values = yaml.safe_load(path.read_text())
    values["dataset"] |= present
    path.write_text(yaml.safe_dump(values))
    before = path.read_text()
    with pytest.raises(UserError, match=message) as caught:
        dvc_data.prepare_data(_load(override))
    assert "Change it there, or leave dataset." in str(caught.value)
    assert path.read_text() == before


def _files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_dataset_that_is_not_there_leaves_the_users_folder_as_it_was(project):
    folder = project / "data" / "mnits"
    (folder / "labels").mkdir(parents=True)
    (folder / "notes.md").write_text("three weeks of work")
    (folder / "labels" / "own.csv").write_text("1,2,3")
    before = _files_below(project / "data")
    with pytest.raises(UserError, match=r"unknown dataset 'mnits': did you mean 'mnist'.+data/ \(digits\)\. `strat"):
        dvc_data.prepare_data(_load("dataset.name=mnits"))
    assert _files_below(project / "data") == before
    with pytest.raises(UserError, match=r"unknown dataset 'photos'.+data/ \(digits\)\. `stratagem data add SOURCE`"):
        dvc_data.check_source(_load("dataset.name=photos").dataset)
    with pytest.raises(UserError, match=r"unknown dataset 'mnits'.+noise\)\. No file or folder is called 'mnits'"):
        dvc_data.add("mnits", None, {})


def test_a_new_dataset_gets_a_folder_of_its_own(project):
    folder = project / "data" / "cifar100"
    dataset = _load("dataset.name=cifar100", "dataset.image_size=[16,16]").dataset
    made = dataset_folder.add(dataset, project)
    assert made == [folder, *(folder / name for name in ("dvc.yaml", ".gitignore", "reader.json", "params.yaml"))]
    described = yaml.safe_load((folder / "params.yaml").read_text())
    assert described == {"dataset": {"name": "cifar100", "version": None, "image_size": [16, 16]}}
    assert dataset_folder.add(dataset, project) == [], "it is there now"
    (folder / "notes.md").write_text("mine")
    dataset_folder.take_away(made)
    assert [path.name for path in folder.iterdir()] == ["notes.md"]
    (folder / "notes.md").unlink()
    dataset_folder.take_away(made)
    assert not folder.exists()


def test_the_dataset_of_the_project_is_as_a_new_one_would_be(project):
    for file, text in {
        "dvc.yaml": dataset_folder.tfds_pipeline("digits", project),
        ".gitignore": dataset_folder.GITIGNORE,
        "reader.json": '{"version": 1}\n',
    }.items():
        assert (project / "data" / "digits" / file).read_text() == text


@pytest.mark.usefixtures("own_code")
def test_data_are_prepared_again_by_another_version_of_the_reader_and_not_by_other_code(project, code_in):
    folder = project / "data" / "digits"
    code_in(project)
    code = project / "tasks" / "data" / "kinds" / "tfds.py"
    assert dataset_folder.is_reader_noted(folder)
    code.write_text(f"{code.read_text()}\nMORE = 2\n")
    assert dataset_folder.is_reader_noted(folder)
    code.write_text(f"{code.read_text()}\nVERSION = 2\n")
    assert not dataset_folder.is_reader_noted(folder)
    dataset_folder.note_reader(folder)
    assert dataset_folder.is_reader_noted(folder)
    assert (folder / "reader.json").read_text() == '{"version": 2}\n'
    stages = yaml.safe_load((folder / "dvc.yaml").read_text())["stages"]
    assert {"data/${dataset.name}/reader.json": ["version"]} in stages["prepare"]["params"]


def test_a_dataset_depends_on_its_own_builder_and_on_no_other_code(project):
    own = "tasks/data/builders/noise.py"
    for name, expected in {"noise": [own], "mnist": [], "noise.loud": [own]}.items():
        stages = yaml.safe_load(dataset_folder.tfds_pipeline(name, project))["stages"]
        assert stages["download"].get("deps", []) == expected
        assert stages["prepare"]["deps"] == ["data/${dataset.name}/raw", *expected]


# Each: what the user has in data/cifar100, what is refused.
IN_THE_WAY = [
    ("dvc.yaml", "data/cifar100/dvc.yaml already exists, but dataset.name=cifar100 needs other content"),
    (".gitignore", "data/cifar100/.gitignore already exists"),
    ("params.yaml", "data/cifar100/params.yaml already exists, but does not describe a dataset"),
]


@pytest.mark.parametrize(("file", "message"), IN_THE_WAY)
def test_what_lies_in_the_way_of_a_new_dataset_is_refused(project, file, message):
    path = project / "data" / "cifar100" / file
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    (project / "data" / "cifar100" / "notes.md").write_text("mine, too")
    before = _files_below(project)
    with pytest.raises(UserError, match=f"{message}.+move it away, then run again"):
        dvc_data.prepare_data(_load("dataset.name=cifar100"))
    assert _files_below(project) == before


def test_a_link_in_the_way_is_not_written_through(project):
    (folder := project / "data" / "cifar100").mkdir()
    (folder / "dvc.yaml").symlink_to(project.with_name("theirs.yaml"))
    with pytest.raises(UserError, match=IN_THE_WAY[0][1]):
        dvc_data.prepare_data(_load("dataset.name=cifar100"))
    assert not project.with_name("theirs.yaml").exists()
    assert [path.name for path in folder.iterdir()] == ["dvc.yaml"]


def test_archives_that_were_brought_are_not_in_the_way(project):
    folder = project / "data" / "mnist"
    for file in ("train.gz", "raw/downloads/mnist/train.gz"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"archive")
    made = dataset_folder.add(_load("dataset.name=mnist").dataset, project)
    dataset_folder.take_away(made)
    assert set(_files_below(folder)) == {"train.gz", "raw/downloads/mnist/train.gz"}


def test_data_that_another_run_is_preparing_are_waited_for(project, monkeypatch):
    monkeypatch.setattr(dvc, "BUSY_SECONDS", 0.1)
    (project / ".dvc" / "tmp").mkdir()
    mine = project / "data" / "digits" / "prepared" / "labels.csv"
    mine.parent.mkdir()
    mine.write_text("mine")
    with (
        FileLock(project / ".dvc" / "tmp" / "stratagem.lock"),
        pytest.raises(StratagemError, match="another command is preparing data"),
    ):
        dvc_data.prepare_data(_load())
    # Before DVC, which removes what it makes before it makes it again.
    assert (project / "data" / "digits" / "set_aside" / "labels.csv").read_text() == "mine"


def test_a_dvc_command_that_runs_outside_is_waited_for(project, digits_folder, monkeypatch):
    """DVC refuses to run beside another DVC; a run tries again until the other one is done."""
    shutil.copytree(digits_folder, project / "data" / "digits", dirs_exist_ok=True)
    pipeline = {"stages": {"slow": {"cmd": "touch began; while ! test -e end; do sleep 0.1; done"}}}
    (project / "other").mkdir()
    (project / "other" / "dvc.yaml").write_text(yaml.safe_dump(pipeline))
    # A stage of no moment in place of the real one: what is looked at is the waiting.
    stage = {"cmd": "touch done", "outs": [{"prepared": {"persist": True}}]}
    (project / "data" / "digits" / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"prepare": stage}}))
    other = subprocess.Popen(
        [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--quiet", "other/dvc.yaml"], stdin=subprocess.DEVNULL
    )
    try:
        while not (project / "other" / "began").exists():
            assert other.poll() is None
            time.sleep(0.1)
        threading.Timer(8, (project / "other" / "end").touch).start()
        assert dvc_data.prepare_data(_load()) is not None
    finally:
        (project / "other" / "end").touch()
        assert other.wait() == 0
    assert (project / "data" / "digits" / "done").exists()


@pytest.mark.slow
def test_a_full_disk_is_one_message_and_nothing_is_done_twice(project, mount_small, run):
    (project / ".dvc" / "cache").mkdir()
    mount_small(project / ".dvc" / "cache", "size=64k")
    full = run(["stratagem", "data", "prepare", "--set", "dataset.name=noise"])
    assert full.returncode == 1
    (message,) = [line for line in full.stderr.splitlines() if line.startswith("error: ")]
    assert "cannot be written (No space left on device). Make room, and run the same command again" in message
    assert full.stderr.count("prepared noise") == 1


NO_S3 = importlib.util.find_spec("dvc_s3") is None
SECRET = "a-secret-that-nobody-may-read"
KEYS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": SECRET}
# Each: what the server answers (None: nothing listens), the credentials, what is said.
REMOTES = [
    (None, {}, "NoCredentialsError: Unable to locate credentials"),
    (None, KEYS, "ConnectionRefusedError: "),
    (403, KEYS, "Forbidden"),
]


@pytest.mark.in_ci(0)
@pytest.mark.skipif(NO_S3, reason="dvc_s3 is not installed: pip install 'stratagem[s3]'")
@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.parametrize(("status", "keys", "says"), REMOTES)
def test_a_remote_that_refuses_or_does_not_answer_is_one_message(
    project, tmp_path, monkeypatch, capfd, proxy, status, keys, says
):
    content = b"what is pushed"
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    cached = project / ".dvc" / "cache" / "files" / "md5" / digest[:2] / digest[2:]
    Path("own.dvc").write_text(f"outs:\n- {{md5: {digest}, size: {len(content)}, hash: md5, path: own}}\n")
    Path(".dvc/config.local").write_text("['remote \"storage\"']\nurl = s3://bucket/folder\n[core]\nremote = storage\n")

    (tmp_path / "aws").touch()
    nowhere = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "aws"), "AWS_CONFIG_FILE": str(tmp_path / "aws")}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    server = proxy(0)
    server.own, server.status = {"": (0, b"")}, status
    port = 1 if status is None else server.port
    environment = {
        **keys, **nowhere, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_MAX_ATTEMPTS": "1",
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_DEFAULT_REGION": "here",
    }  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for action in ("push", "pull"):
        cached.parent.mkdir(parents=True, exist_ok=True)
        cached.write_bytes(content)
        if action == "pull":
            shutil.rmtree(project / ".dvc" / "cache")
        with pytest.raises(StratagemError) as caught:
            {"push": stages.push, "pull": stages.pull}[action](targets=["own.dvc"])
        message, said = str(caught.value), capfd.readouterr().err
        assert message.startswith("own.dvc: DVC says: "), message
        assert says in message
        assert SECRET not in message + said
        assert said == ""
