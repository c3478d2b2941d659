"""What has changed since a run, its commit in a folder of its own, and what is refused; without a training."""

import json
import re
import shutil
from pathlib import Path

import pytest

from flows.cli import runs as run_commands
from tasks import config, records
from tasks.operations import reproduce, trace
from tasks.records import Change, Changed, TrainingResult
from tasks.reports import material, sections
from tasks.runs import lineage, pruning, repository
from tasks.runs.listing import compare, show
from tasks.system import files, machine, temporary
from tasks.system.errors import UserError
from tests.tasks import made_up
from tests.tasks.test_lineage import git
from tests.tasks.test_side_by_side import two
from tests.tasks.written_runs import run_id_of, write_results, write_run

pytestmark = pytest.mark.usefixtures("own_code")
VERSION = "3c18f53eff0927cf84d227dcc2cdcf79"


@pytest.fixture
def trained(digits, project):
    """A run that was trained with the code, the data and the settings of the project as it is, all committed."""
    return write()


def write(number=1, **more):
    """Leave a trained run behind; ``more`` are fields of its record, or of where it comes from."""
    commit, dirty = repository.state(Path.cwd())
    values = {"git_commit": commit, "git_dirty": dirty, "code_digest": lineage.code_of(config.load())}
    values |= {"data_version": lineage.data_version("digits"), "environment": machine.surroundings()}
    run = write_run(number, **(values | more))
    write_results(run, accuracy=0.9)
    return run


def changes(run, **more):
    """Return what has changed, by its name: then, now, and what follows."""
    done = reproduce.reproduce(run.run_id, dry_run=True, **more)
    assert (done.same, done.reproduced_by) == (None, None)
    return {one.what: (one.then, one.now, one.effect) for one in done.changes}, done.reason


def test_of_a_run_as_it_was_nothing_is_otherwise(trained):
    assert changes(trained) == ({}, "it can be trained again")


def test_the_records_of_a_pruned_run_are_enough(trained):
    assert pruning.prune(pruning.Selection(keep_last=0), lambda: [], dry_run=False).pruned[0].run_id == trained.run_id
    assert changes(trained) == ({}, "it can be trained again")


def test_code_and_settings_are_brought_back_and_nothing_of_the_users_is_touched(trained):
    before = trained.lineage
    Path("tasks/train.py").write_text(Path("tasks/train.py").read_text() + "\nEXTRA = 1\n")
    Path("params.yaml").write_text(Path("params.yaml").read_text().replace("epochs: 15", "epochs: 9"))
    git("commit", "--quiet", "--all", "-m", "later")
    (Path("tasks") / "new.py").write_text("NEW = 1\n")
    index, status = Path(".git/index").read_bytes(), git("status", "--porcelain")
    found, reason = changes(trained)
    assert reason == "it can be trained again"
    assert found == {
        "git commit": (before.git_commit, git("rev-parse", "HEAD"), "restored"),
        "code": (before.code_digest, lineage.code_of(config.load()), "restored"),
        "train.epochs": ("15", "9", "restored"),
    }
    assert (Path(".git/index").read_bytes(), git("status", "--porcelain")) == (index, status)
    assert [len(git(*words).splitlines()) for words in (("worktree", "list"), ("branch", "--all"))] == [1, 1]
    left = [path.name for path in temporary.folder().iterdir() if not path.name.startswith(temporary.NOTE)]
    assert left == [".stratagem"], "the checkout is gone; notes of other tests' files stay until this process ends"


def test_code_of_another_version_of_the_package_is_asked_for(trained):
    run = write(2, code_digest="0" * 64, package_version="0.0.1")
    found, reason = changes(run)
    assert found["code"][2] == "cannot be restored"
    assert f"of stratagem 0.0.1, and {lineage.package_version()} is installed: install stratagem==0.0.1" in reason


def test_changes_that_were_in_no_commit_are_brought_back_where_they_are_whole(trained):
    Path("tasks/train.py").write_text(Path("tasks/train.py").read_text() + "\nEXTRA = 'A'\r\n")
    Path("tasks/added.py").write_text("ADDED = 1\n")
    Path("README.md").unlink()
    run = write(2)
    kept = Path(run.folder, "records", "uncommitted.diff")
    kept.write_text(repository.changes(Path.cwd()), newline="")
    git("stash", "--include-untracked", "--quiet")
    found, reason = changes(run)
    assert reason == "it can be trained again"
    assert found["code"] == (run.lineage.code_digest, trained.lineage.code_digest, "restored")
    kept.write_bytes(kept.read_bytes().replace(b"+ADDED = 1", b"+ADDED = ***"))
    _, reason = changes(run)
    assert "its code cannot be restored. Its digest was" in reason
    kept.write_bytes(b"not shown: tasks/secret.bin\n" + kept.read_bytes())
    assert "with its uncommitted changes; not shown: tasks/secret.bin. Only a run of committed code" in changes(run)[1]
    kept.unlink()
    with pytest.raises(UserError, match="its code cannot be restored"):
        reproduce.reproduce(run.run_id, allow_changes=True)


def test_data_come_from_dvcs_cache_where_they_are_others_today_and_are_refused_where_that_is_gone(trained):
    folder, cache = Path("data/digits"), Path(".dvc/cache/files/md5")
    listing = []
    for path in sorted((folder / "prepared").iterdir()):
        md5 = files.digest(path, "md5")
        (cache / md5[:2]).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, cache / md5[:2] / md5[2:])
        listing.append({"md5": md5, "relpath": path.name})
    (cache / VERSION[:2]).mkdir(exist_ok=True)
    (cache / VERSION[:2] / f"{VERSION[2:]}.dir").write_text(json.dumps(listing))
    lock = (folder / "dvc.lock").read_text()
    (folder / "dvc.lock").write_text(lock.replace(VERSION, "f" * 32))
    assert changes(trained)[0]["data version"] == (VERSION, "f" * 32, "restored")
    made = Path.cwd().parent / "there"
    reproduce.write_commit(str(trained.lineage.git_commit), made)
    assert reproduce.bring_data("digits", VERSION, made) == "DVC's cache"
    there = sorted((made / "data" / "digits" / "prepared").iterdir())
    assert [one.name for one in there] == sorted(one["relpath"] for one in listing)
    assert all(one.resolve().is_relative_to(cache.resolve()) for one in there)
    next(cache.glob("*/" + listing[0]["md5"][2:])).unlink()
    found, reason = changes(trained)
    assert found["data version"] == (VERSION, "f" * 32, "cannot be restored")
    assert f"It was trained on data version {VERSION}, and data/digits is {'f' * 32}; DVC's cache" in reason


def test_a_link_in_a_commit_leads_to_no_file_of_the_users(trained, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    lock = Path("data/digits/dvc.lock").read_text()
    shutil.rmtree("data/digits")
    Path("data/digits").symlink_to(outside)
    git("add", "--all")
    git("commit", "--quiet", "-m", "a link")
    run = write(2, data_version=VERSION)
    Path("data/digits").unlink()
    Path("data/digits").mkdir()
    Path("data/digits/dvc.lock").write_text(lock)
    with pytest.raises(UserError, match="data/digits of that commit is a link that points outside the project"):
        reproduce.reproduce(run.run_id, dry_run=True)
    assert list(outside.iterdir()) == []


def test_another_machine_or_other_packages_are_refused_unless_that_is_allowed(trained):
    now = machine.surroundings()
    assert {"python", "tensorflow", "keras", "jax", "numpy", "system", "processor", "cores"} <= now.keys()
    run = write(2, environment=now | {"tensorflow": "2.1.0", "cores": "640", "gpus": "Tesla K80"})
    found, reason = changes(run)
    assert found == {
        "tensorflow": ("2.1.0", now["tensorflow"], "matters"),
        "cores": ("640", now["cores"], "matters"),
        "gpus": ("Tesla K80", now.get("gpus"), "matters"),
    }
    assert f"tensorflow was 2.1.0 and is now {now['tensorflow']}" in reason
    assert "--allow-changes" in reason
    assert changes(run, allow_changes=True)[1] == "it can be trained again"
    kinds = {one.what: one.kind for one in reproduce.reproduce(run.run_id, dry_run=True).changes}
    assert kinds == {"tensorflow": "environment", "cores": "machine", "gpus": "machine"}


EPOCHS = Changed(step=82, kind="settings", what="train.epochs", before=2, now=10, affects="result")
LOOP = Changed(step=41, kind="settings", what="train.loop", before="fit", now="custom", affects="speed")


def test_a_run_that_was_resumed_as_another_training_is_refused_and_says_so_everywhere(trained, capsys):
    run = write(2, changed=(LOOP, EPOCHS))
    found, reason = changes(run, allow_changes=True)
    assert found["train.epochs"] == ("2 up to step 82, then 10", "10", "cannot be restored")
    said = "train.epochs was 2 up to step 82, then 10. Training from the beginning"
    assert f"run {run.run_id} was resumed with other values: {said}" in reason
    with pytest.raises(UserError, match="was resumed with other values"):
        reproduce.reproduce(run.run_id, allow_changes=True)
    both = "train.loop 'fit' up to step 41, then 'custom'; train.epochs 2 up to step 82, then 10"
    assert ("resumed with others", (both, None)) in compare(run, trained).items()
    assert trace.trace(run.run_id).link.facts["resumed with"] == both
    run_commands.print_details(show(run))
    assert both in " ".join(capsys.readouterr().out.split())
    assert "train.epochs 2 up to step 82, then 10" in str(sections.origin(material.load(run)))


def test_a_run_that_was_resumed_with_what_moves_the_last_bits_alone_is_reproduced_if_that_is_allowed(trained):
    run = write(2, changed=(LOOP,))
    found, reason = changes(run)
    assert found == {"train.loop": ("'fit' up to step 41, then 'custom'", '"custom"', "matters")}
    assert "train.loop was 'fit' up to step 41, then 'custom' and is" in reason
    assert "--allow-changes" in reason
    assert changes(run, allow_changes=True)[1] == "it can be trained again"


REFUSED = [
    ({"git_commit": None}, {}, "has no git commit"),
    ({"git_commit": "ab" * 20}, {}, "git commit abab.* is not in this repository"),
    ({"data_version": None}, {}, "has no data version"),
]


@pytest.mark.parametrize(("more", "overrides", "words"), REFUSED, ids=[words for _, _, words in REFUSED])
def test_a_run_that_cannot_be_trained_again_is_refused(trained, more, overrides, words):
    run = write(2, overrides=overrides, **more)
    with pytest.raises(UserError, match=words):
        reproduce.reproduce(run.run_id)


def test_a_run_that_was_not_trained_to_its_end_and_one_that_there_is_not(trained):
    run = write_run(5, status="KILLED")
    with pytest.raises(UserError, match=rf"did not finish its training.*stratagem run --resume {run.run_id}"):
        reproduce.reproduce(run.run_id)
    with pytest.raises(UserError, match=rf"unknown run '{run_id_of(1)[:-1]}x': did you mean '{run_id_of(1)}'"):
        reproduce.reproduce(f"{run_id_of(1)[:-1]}x")


# Each: weights of both, deterministic, whether the machine is another, how the second outputs are moved, the verdict.
VERDICTS = [
    (("a", "a"), False, False, 0.0, True, "the same weights, bit for bit"),
    (("a", "b"), False, False, 0.05, True, r"different weights \(train.deterministic = false\), but each test metric"),
    (("a", "b"), False, False, 3.0, False, "different weights, and test/accuracy .* is outside "),
    (("a", "b"), True, False, 0.05, False, "different weights, although train.deterministic = true"),
]


@pytest.mark.in_ci(0, 1, 2)
@pytest.mark.parametrize(("digests", "deterministic", "elsewhere", "moved", "same", "words"), VERDICTS)
def test_whether_the_same_came_out(tmp_path, monkeypatch, digests, deterministic, elsewhere, moved, same, words):
    monkeypatch.chdir(made_up.project(tmp_path / "made"))
    labels, outputs = made_up.classification(400, 5)
    first, second = two(labels, outputs, outputs + moved * made_up.classification(400, 5, seed=9)[1])
    for run, digest in zip((first, second), digests, strict=True):
        path = Path(run.folder, "records", "training.json")
        trained = records.load(TrainingResult, path)
        records.save(trained.model_copy(update={"weights_digest": digest}), path)
    settings = config.load(None, {"train.deterministic": deterministic})
    change = Change(kind="machine", what="cores", then="1", now="2", effect="matters")
    done = reproduce.judge(first, second, settings, [change] if elsewhere else [])
    assert (done.same, done.weights_digests, done.reproduced_by) == (same, digests, second.run_id)
    assert re.search(words, done.reason), done.reason
