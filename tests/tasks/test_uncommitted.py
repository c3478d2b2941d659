from pathlib import Path

import pytest

from tasks import uncommitted
from tests.tasks.test_lineage import git


def test_a_clean_checkout_has_no_changes(project):
    assert uncommitted.changes(project) is None
    Path("mlruns/runs/x").mkdir(parents=True)
    Path("mlruns/runs/x/notes.py").write_text("git ignores it")
    assert uncommitted.changes(project) is None
    assert uncommitted.changes(project.parent) is None, "no repository"


@pytest.mark.usefixtures("own_code")
def test_changes_can_be_applied_to_the_commit_again(project):
    new = {Path("my_models.py"): b"units = 64", Path("empty.py"): b"", Path("odd.py"): b"a = 1\r\n\x0c\n\nb = 2\n"}
    for path, data in new.items():
        path.write_bytes(data)
    Path("recipes/mnist.yaml").write_text("train: {epochs: 9}\n")
    Path("README.md").unlink()
    Path("tasks/errors.py").rename("tasks/faults.py")
    kept = uncommitted.changes(project)
    git("stash", "--include-untracked", "--quiet")
    assert uncommitted.changes(project) is None
    Path("mlruns/kept.diff").write_text(kept, newline="")
    git("apply", "mlruns/kept.diff")
    assert {path: path.read_bytes() for path in new} == new
    assert Path("recipes/mnist.yaml").read_text() == "train: {epochs: 9}\n"
    assert not Path("README.md").exists()
    assert uncommitted.changes(project) == kept


def test_what_may_be_data_or_a_key_is_named_and_not_shown(project):
    for name in ("server.pem", "patients.csv", ".env", "photo.png"):
        Path(name).write_bytes(b"private \xff\0")
    Path("linked.py").symlink_to("/etc/hostname")
    Path("large.py").write_text("x = 1\n" * uncommitted.MAX_BYTES)
    Path("params.yaml").write_text("y: 1\n" * uncommitted.MAX_BYTES)
    kept = uncommitted.changes(project)
    assert "private" not in kept
    assert sorted(kept.splitlines()) == [
        "changed, and too large to be shown: params.yaml",
        "new, and a link: linked.py",
        *(f"new, and not shown: {name}" for name in (".env", "large.py", "patients.csv", "photo.png", "server.pem")),
    ]


def test_many_changes_are_cut(project):
    for number in range(4):
        Path(f"part{number}.py").write_text(f"x = {number}\n" * (uncommitted.MAX_BYTES // 12))
    kept = uncommitted.changes(project)
    assert kept.endswith(f"\n... cut after {uncommitted.MAX_BYTES:,} bytes\n")
    assert len(kept.encode()) < uncommitted.MAX_BYTES + 100


# Each: a line, and what is left of it.
SECRETS = [
    ("+API_KEY = 'abc'", "+API_KEY = ***"),
    ('-  "db_password": "hunter2",', '-  "db_password": ***'),
    ("export SECRET_TOKEN=abc", "export SECRET_TOKEN=***"),
    ("aws_access_key_id: AKIAABCDEFGHIJKLMNOP", "aws_access_key_id: ***"),
    ("url = 'postgres://me:pass@host/db'", "url = 'postgres://host/db'"),
    ("login('hf_abcdefghijklmnopqrstuv')", "login('***')"),
    ("+-----BEGIN RSA PRIVATE KEY-----\n+MIIE\n+-----END RSA PRIVATE KEY-----", "+***"),
    ("+-----BEGIN PRIVATE KEY-----\n+MIIE", "+***"),
    ("+passwords:\n+  - abc\n+  - def\n+units: 64", "+passwords:\n***\n+units: 64"),
    ("+  api_key:\n+  - abc\n+  - def\n+  - ghi", "+  api_key:\n***"),
    ("+passwords:\n+- abc\n+- def\n+- ghi\n+units: 64", "+passwords:\n***\n+units: 64"),
    (" passwords:\n - abc\n \n+- def\n+\n+units: 64", " passwords:\n ***\n+\n+units: 64"),
    ("DefaultEndpointsProtocol=https;AccountKey=bXkga2V5;", "DefaultEndpointsProtocol=https;AccountKey=***"),
    ("-token = abc\n-  a = 1\n- b", "-token = ***\n-  a = 1\n- b"),
    ("hold 53cr37-0f-7h3-5h3ll", "hold ***"),
    ("tokenizer = build(tokens=5)", "tokenizer = build(tokens=5)"),
    ("units = 64", "units = 64"),
]


@pytest.mark.parametrize(("line", "left"), SECRETS)
def test_secrets_are_masked(monkeypatch, line, left):
    monkeypatch.setenv("MY_TOKEN", "53cr37-0f-7h3-5h3ll")
    assert uncommitted.masked(line) == left
