import hashlib
import os

import pytest

from tasks import files
from tasks.runs.leftovers import remove_leftovers


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
