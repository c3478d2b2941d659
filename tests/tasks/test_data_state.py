import os

import pytest

from tasks.data import data_state

STAGES = """
stages:
  download: {wdir: ../.., cmd: x, deps: [tasks/download.py], outs: ["data/${dataset.name}/raw"]}
  prepare:
    deps: ["data/${dataset.name}/raw", tasks/data/builders]
    outs: ["data/${dataset.name}/prepared"]
"""
FILES = (
    "tasks/download.py",
    "tasks/data/builders/one.py",
    "data/d/raw/a",
    "data/d/prepared/b",
    "data/d/dvc.lock",
    ".dvc/config",
)


@pytest.fixture
def known(tmp_path):
    """A project whose dataset DVC found up to date a while ago."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("12345")
    (tmp_path / ".dvc" / "tmp").mkdir()
    (tmp_path / "data" / "d" / "dvc.yaml").write_text(STAGES)
    with data_state.remembered(tmp_path, "d"):
        pass
    return tmp_path


def rewrite(path):
    """Change the content, and nothing else that a user can set."""
    times = path.stat()
    path.write_text("54321")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


CHANGES = {
    **{
        f"{name} has other content of the same size and time": lambda root, name=name: rewrite(root / name)
        for name in FILES
    },
    "a file was removed": lambda root: (root / "data/d/prepared/b").unlink(),
    "a file came": lambda root: (root / "data/d/raw/c").write_text(""),
    "a dependency came": lambda root: (root / "tasks/data/builders/two.py").write_text(""),
    "a stage cannot be read": lambda root: (root / "data/d/dvc.yaml").write_text("stages: ["),
    "DVC was told something": lambda root: (root / ".dvc/config.local").write_text(""),
    "a file has moved": lambda root: (root / "data/d/raw/a").rename(root / "data/d/raw/z"),
    "a link leads elsewhere": lambda root: (root / "data/d/raw/l").symlink_to(root / "data"),
    "the record was damaged": lambda root: (root / ".dvc/tmp/stratagem-d").write_text("0"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_seen(known, change):
    assert data_state.is_known(known, "d")
    CHANGES[change](known)
    assert not data_state.is_known(known, "d")


def test_nothing_is_trusted_that_changed_while_dvc_looked(known):
    assert data_state.is_known(known, "d")
    assert not data_state.is_known(known, "e")
    (known / "tasks" / "data" / "builders" / "__pycache__").mkdir()
    assert data_state.is_known(known, "d"), "DVC leaves it out"
    with data_state.remembered(known, "d"):
        assert not data_state.is_known(known, "d"), "while DVC is at work"
        (known / "data" / "d" / "raw" / "a").write_text("54321")
    assert not data_state.is_known(known, "d")
