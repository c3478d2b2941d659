import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tasks import config
from tasks.runs import lineage, repository
from tasks.system.errors import UserError

LOCK = """\
schema: '2.0'
stages:
  download:
    outs:
    - {path: data/digits/raw, hash: md5, md5: 11111111111111111111111111111111.dir}
  prepare:
    deps:
    - {path: data/digits/raw, hash: md5, md5: 11111111111111111111111111111111.dir}
    outs:
    - {path: data/digits/prepared.json, hash: md5, md5: 22222222222222222222222222222222}
    - {path: data/digits/prepared, hash: md5, md5: 33333333333333333333333333333333.dir}
"""


def git(*args: str) -> str:
    command = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false", *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_trace_holds_commit_settings_data_and_code(project: Path) -> None:
    settings = config.load()
    traced = lineage.collect(settings, "abc")
    assert traced.git_commit == git("rev-parse", "HEAD")
    assert traced.git_dirty is False
    assert traced.settings_digest == settings.digest()
    assert traced.data_version == "abc"
    assert traced.code_digest == lineage.code_of(config.load())


@pytest.mark.parametrize(
    ("change", "dirty"),
    [
        (lambda: Path("my_model.py").write_text("new and in no commit"), True),
        (lambda: Path("mlruns/mlflow.db").write_text("git ignores it"), False),
    ],
)
@pytest.mark.usefixtures("own_code")
def test_dirty_when_a_file_is_not_as_committed(project: Path, change: object, dirty: bool) -> None:
    Path("mlruns").mkdir(exist_ok=True)
    assert callable(change)
    change()
    assert repository.state(project) == (git("rev-parse", "HEAD"), dirty)


@pytest.mark.usefixtures("own_code")
def test_a_folder_below_the_checkout_has_its_commit(project: Path) -> None:
    assert repository.state(project / "tasks") == (git("rev-parse", "HEAD"), False)


def test_before_the_first_commit_there_is_none(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "file").touch()
    assert repository.state(tmp_path) == (None, True)


@pytest.mark.parametrize("broken", [False, True])
def test_no_usable_git_checkout_is_recorded_as_such(project: Path, broken: bool) -> None:
    shutil.rmtree(project / ".git")
    if broken:
        (project / ".git").write_text("gitdir: /nowhere/at/all\n")
    traced = lineage.collect(config.load(), None)
    assert (traced.git_commit, traced.git_dirty) == (None, None)
    changed = [traced.model_copy(update={"git_commit": one, "git_dirty": True}) for one in (None, "c0")]
    assert [one.commit for one in changed] == ["none", "c0 with uncommitted changes"], "a project without a commit"
    assert len(traced.code_digest) == 64


@pytest.mark.parametrize(("path", "counts"), [("tasks/config/schema.py", True), ("params.yaml", False)])
@pytest.mark.usefixtures("own_code")
def test_code_digest_changes_with_the_code_only(project: Path, path: str, counts: bool) -> None:
    settings = config.load()
    before = lineage.code_of(settings)
    Path(path).parent.mkdir(exist_ok=True)
    with Path(path).open("a") as file:
        file.write("\nchanged = 1\n")
    assert (lineage.code_of(settings) != before) == counts


SOURCE = '''
"""A module."""
def build(a, *, b, c=1):
    """Return."""
    return {**a, b: c}
'''
# Each row: the same file written otherwise, and whether it says the same.
SOURCES = [
    (SOURCE.replace("Return.", "Give back."), True),
    (SOURCE.replace("\n", "\n\n") + "# a comment\n", True),
    (SOURCE.replace("(a, *, b, c=1)", "(\n    a,\n    *,\n    b,\n    c=1,\n)"), True),
    (SOURCE.replace('    """Return."""\n', ""), True),
    (SOURCE.replace("c=1", "c=1.0"), False),
    (SOURCE.replace("b, c=1", "b=1, c"), False),
    (SOURCE.replace("{**a, b: c}", "{b: c, **a}"), False),
    (SOURCE.replace("{**a, b: c}", "{a: b, **c}"), False),
    (SOURCE.replace("{**a, b: c}", "'a'"), False),
    (SOURCE + "build = None\n", False),
    ("this is not Python\n", False),
]


@pytest.mark.parametrize(("other", "same"), SOURCES)
def test_a_file_means_what_python_makes_of_it(other: str, same: bool) -> None:
    assert (lineage.meaning(other.encode()) == lineage.meaning(SOURCE.encode())) == same


def test_code_digest_is_the_same_whatever_became_of_what_is_kept_of_it(project: Path) -> None:
    kept, before = project / "mlruns" / "code.json", lineage.code_of(config.load())
    kept.write_bytes(kept.read_bytes()[:-100])
    assert lineage.code_of(config.load()) == before
    assert lineage.code_of(config.load()) == before, "as it was kept again"


@pytest.mark.usefixtures("own_code")
def test_code_digest_tells_a_moved_file(project: Path) -> None:
    before = lineage.code_of(config.load())
    Path("tasks/modeling/models/mlp.py").rename("tasks/modeling/models/perceptron.py")
    assert lineage.code_of(config.load()) != before


# What can be a user's own.
OWN_CODE = [
    "model={{name: '{}', options: {{}}}}",
    "train.loss={}",
    "train.metrics=[{}]",
    "checkpoint.monitor=validation/{}",
    "register.metric=test/{}",
    "train.early_stopping={{monitor: 'validation/{}'}}",
]


@pytest.mark.parametrize("path", ["my/models.py", "my/models/__init__.py", "my/layers.py"])
def test_code_digest_holds_the_users_own_code(project: Path, path: str) -> None:
    Path("my").mkdir()
    Path("my/__init__.py").touch()
    Path("my/models.py").write_text("import my.layers\n")
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text("def build(): ...\n")
    settings = [config.load(overrides=[override.format("my.models:build")]) for override in OWN_CODE]
    digests = [lineage.collect(one, None).code_digest for one in settings]
    other = lineage.code_of(config.load(None, {"model.name": "mlp"}))
    Path(path).write_text("def build(): return None\n")
    assert not set(digests) & {lineage.collect(one, None).code_digest for one in settings}
    assert lineage.code_of(config.load(None, {"model.name": "mlp"})) == other


KERNEL = np.arange(6, dtype=np.float32).reshape(2, 3)
BIAS = np.ones(3, np.float32)


def test_weights_digest_does_not_depend_on_order_or_memory_layout() -> None:
    digest = lineage.weights_digest([("dense/kernel", KERNEL), ("dense/bias", BIAS)])
    assert lineage.weights_digest([("dense/bias", BIAS), ("dense/kernel", np.asfortranarray(KERNEL))]) == digest


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("dense1/kernel", KERNEL),
        ("dense/kernel", KERNEL.T),
        ("dense/kernel", KERNEL.reshape(3, 2)),
        ("dense/kernel", KERNEL.astype(np.float64)),
        ("dense/kernel", KERNEL.view(np.int32)),
        ("dense/kernel", np.nextafter(KERNEL, np.float32(9))),
    ],
)
def test_weights_digest_depends_on_everything_else(name: str, kernel: np.ndarray) -> None:
    assert lineage.weights_digest([(name, kernel)]) != lineage.weights_digest([("dense/kernel", KERNEL)])


def test_data_version_is_the_md5_of_prepared(project: Path) -> None:
    assert lineage.data_version("never_prepared") is None
    lock = project / "data" / "digits" / "dvc.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text(LOCK)
    assert lineage.data_version("digits") == "33333333333333333333333333333333"
    lock.write_text(LOCK.partition("  prepare:")[0])
    assert lineage.data_version("digits") is None


@pytest.mark.parametrize(
    "text", ["<<<<<<< HEAD\nstages: {}\n=======\n", "stages: [", "", LOCK.replace(" md5: 3", " m: 3")]
)
def test_an_unreadable_lock_is_named(project: Path, text: str) -> None:
    lock = project / "data" / "digits" / "dvc.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.write_text(text)
    with pytest.raises(UserError, match=r"data/digits/dvc\.lock cannot be read"):
        lineage.data_version("digits")
