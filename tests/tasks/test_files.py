import contextlib
import hashlib
import os
import re
import tempfile
from pathlib import Path

import pytest

from flows.cli.command import command
from tasks.runs.entries import find_entries
from tasks.runs.locks import remove_leftovers
from tasks.system import files
from tasks.system.errors import UserError


def test_a_file_is_replaced_whole_and_after_it_is_on_the_disk(tmp_path, monkeypatch):
    done, path = [], tmp_path / "one.json"
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("flushed") or fsync(descriptor))
    monkeypatch.setattr(os, "replace", lambda *names: done.append("renamed") or replace(*names))
    path.write_text("before")
    with files.replacing(path, ".partial.json") as temporary:
        temporary.write_text("after")
        assert path.read_text() == "before"
        assert temporary.parent == tmp_path
        assert temporary.name.endswith(".partial.json")
    assert done == ["flushed", "renamed"]
    assert path.read_text() == "after"
    with pytest.raises(UnicodeEncodeError), files.replacing(path) as temporary:
        temporary.write_text("half \ud800", encoding="utf-8")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("one.json", "after")]


def test_digests_are_those_of_the_bytes(tmp_path):
    (tmp_path / "file").write_bytes(b"bytes")
    assert files.digest(tmp_path / "file") == hashlib.sha256(b"bytes").hexdigest()
    assert files.digest(tmp_path / "file", "md5") == hashlib.md5(b"bytes").hexdigest()


def test_a_scratch_folder_is_removed_by_whoever_made_it_and_after_a_kill(tmp_path):
    with files.scratch(tmp_path, ".scratch.") as folder:
        assert files.remove_scratch([folder], tmp_path) == [folder], "as if that process had been killed"
        assert not folder.exists()
        folder.mkdir()
    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_only_what_this_program_made_in_the_project(project, tmp_path):
    outside = tmp_path / "outside"
    (outside / ".scratch.marked").mkdir(parents=True)
    (outside / ".scratch.marked" / files.MARK).touch()
    (project / "data" / "elsewhere").symlink_to(outside)
    own = project / "data" / "digits" / ".scratch.mine"
    own.mkdir()
    (project / "data" / "digits" / ".prepared.link").symlink_to(outside / ".scratch.marked")
    killed = project / "data" / "noise" / ".prepared.killed"
    killed.mkdir(parents=True)
    (killed / files.MARK).touch()
    before = sorted(outside.rglob("*"))
    assert remove_leftovers() == [killed]
    assert sorted(outside.rglob("*")) == before, "not even a lock"
    assert own.is_dir()
    assert not killed.exists()


@pytest.fixture
def forbidden():
    """A project whose mlruns/runs this process may not enter: as another user where it is root, else by its mode."""
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders let no other user through.
        folder = Path(place)
        (folder / "mlruns" / "runs").mkdir(parents=True)
        (folder / "mlruns" / "runs" / "run.json").touch()
        (folder / "mlruns" / "mlflow.db").touch()
        (folder / "params.yaml").touch()
        (folder / ".dvc").mkdir()
        folder.chmod(0o755)
        own = os.geteuid()
        for path, mode in ((folder / "mlruns" / "runs", 0o700), (folder / "mlruns" / "mlflow.db", 0o600)):
            path.chmod(mode if own == 0 else 0)
        if own == 0:
            os.seteuid(12345)
        umask = os.umask(0o022)  # A command sets its own.
        try:
            with contextlib.chdir(folder):
                yield folder
        finally:
            os.umask(umask)
            os.seteuid(own)
            (folder / "mlruns" / "runs").chmod(0o700)


def test_what_belongs_to_another_user_is_said_to(forbidden):
    as_root = os.getuid() == 0
    whose = "belongs to the user root, and this is user 12345. Give the command as" if as_root else "change the mode"
    database, run = forbidden / "mlruns" / "mlflow.db", forbidden / "mlruns" / "runs" / "run.json"
    wrapped = RuntimeError("a library's own words")
    try:
        run.read_text()
    except PermissionError as error:
        wrapped.__cause__ = error
    assert re.match(f"{run} cannot be read or written .*{whose}", str(files.find_no_access(wrapped)))
    with pytest.raises(UserError, match=f"{database} cannot be read or written"):
        files.refuse_no_access(database)
    files.refuse_no_access(forbidden / "mlruns" / "none")
    assert files.find_no_access(PermissionError("no file of that")) is None


def test_runs_of_another_user_are_not_no_runs(forbidden):
    with pytest.raises(UserError, match=r"mlruns/runs cannot be read or written"):
        find_entries("runs")


def test_a_command_of_another_user_ends_with_one_message(forbidden, capsys):
    with pytest.raises(SystemExit) as ended, command(debug=False):
        (forbidden / "mlruns" / "runs" / "run.json").read_text()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {forbidden / 'mlruns' / 'runs' / 'run.json'} cannot be read or written")
    assert message.count("\n") == 1
