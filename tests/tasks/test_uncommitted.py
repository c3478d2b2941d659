import hashlib
import stat
from pathlib import Path

import pytest

from tasks.runs import repository
from tests.tasks.test_lineage import git
from tests.tasks.written_runs import write_run


def test_a_clean_checkout_has_no_changes(project):
    assert repository.changes(project) is None
    Path("mlruns/runs/x").mkdir(parents=True)
    Path("mlruns/runs/x/notes.py").write_text("git ignores it")
    assert repository.changes(project) is None
    assert repository.changes(project.parent) is None, "no repository"


@pytest.mark.usefixtures("own_code")
def test_changes_can_be_applied_to_the_commit_again(project):
    new = {Path("my_models.py"): b"units = 64", Path("empty.py"): b"", Path("odd.py"): b"a = 1\r\n\x0c\n\nb = 2\n"}
    for path, data in new.items():
        path.write_bytes(data)
    Path("recipes/mnist.yaml").write_text("train: {epochs: 9}\n")
    Path("README.md").unlink()
    Path("tasks/system/errors.py").rename("tasks/faults.py")
    kept = repository.changes(project)
    git("stash", "--include-untracked", "--quiet")
    assert repository.changes(project) is None
    Path("mlruns/kept.diff").write_text(kept, newline="")
    git("apply", "mlruns/kept.diff")
    assert {path: path.read_bytes() for path in new} == new
    assert Path("recipes/mnist.yaml").read_text() == "train: {epochs: 9}\n"
    assert not Path("README.md").exists()
    assert repository.changes(project) == kept


def test_what_may_be_data_or_a_key_is_named_and_not_shown(project):
    for name in ("server.pem", "patients.csv", ".env", "photo.png"):
        Path(name).write_bytes(b"private \xff\0")
    Path("linked.py").symlink_to("/etc/hostname")
    Path("large.py").write_text("x = 1\n" * repository.MAX_BYTES)
    Path("params.yaml").write_text("y: 1\n" * repository.MAX_BYTES)
    kept = repository.changes(project)
    assert "private" not in kept
    hidden = (".env", "large.py", "linked.py", "params.yaml", "patients.csv", "photo.png", "server.pem")
    assert sorted(kept.splitlines()) == [f"not shown: {name}" for name in hidden]


def test_of_many_changes_the_last_ones_are_named(project):
    for number in range(4):
        Path(f"part{number}.py").write_text(f"x = {number}\n" * (repository.MAX_BYTES // 18))
    kept = repository.changes(project)
    assert kept.endswith("not shown: part3.py\n")
    assert len(kept.encode()) < repository.MAX_BYTES + 100


def test_what_is_kept_with_a_run_is_this_users_alone(project):
    run = write_run(0)
    assert repository.keep_changes(run) is None
    Path("settings.py").write_text("password = 'planted'\r\n", newline="")
    digest = repository.keep_changes(run)
    kept = Path(run.folder, "records", "uncommitted.diff")
    assert "+password = 'planted'\r\n" in kept.read_bytes().decode(), "as git has it, so that it can be applied"
    assert digest == hashlib.sha256(kept.read_bytes()).hexdigest()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
