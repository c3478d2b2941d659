from tasks import files
from tasks.runs.leftovers import remove_leftovers


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
    (project / "data" / "digits" / ".prepared.link").symlink_to(outside)
    killed = project / "data" / "noise" / ".prepared.killed"
    killed.mkdir(parents=True)
    (killed / files.MARK).touch()
    before = sorted(outside.rglob("*"))
    assert remove_leftovers() == [killed]
    assert sorted(outside.rglob("*")) == before, "not even a lock"
    assert own.is_dir()
    assert not killed.exists()
