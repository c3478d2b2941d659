import os
import shutil
import sqlite3
import stat
import subprocess
from pathlib import Path

import pytest

from tasks.runs import dvc
from tasks.system.errors import StratagemError


@pytest.fixture
def site(project, monkeypatch):
    """Where DVC is to keep its cache in a project whose user said nothing of it."""
    monkeypatch.delenv("DVC_SITE_CACHE_DIR")
    return project / ".dvc" / "site"


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_nobody_else_may_enter_it(site):
    site.mkdir()
    site.chmod(0o755)
    dvc.configure()
    assert mode_of(site) == 0o700


# What lies in .dvc/config.local, and what is in it afterwards; PLACE is the project's own.
CONFIGS = [
    (None, "[core]\n    site_cache_dir = PLACE\n"),
    ("[core]\n    site_cache_dir = /was/here/.dvc/site\n", "[core]\n    site_cache_dir = PLACE\n"),
    ("[core]\n    site_cache_dir = /mine\n", "[core]\n    site_cache_dir = /mine\n"),
    (
        "# mine\n['remote \"a\"']\n    url = s3://x, y\n",
        "# mine\n['remote \"a\"']\n    url = s3://x, y\n[core]\n    site_cache_dir = PLACE\n",
    ),
]


def test_what_the_user_wrote_into_the_configuration_stays(site):
    local = site.with_name("config.local")
    for before, after in CONFIGS:
        local.unlink(missing_ok=True) if before is None else local.write_text(before)
        dvc.configure()
        written = local.stat().st_mtime_ns
        lines = [line.strip() for line in local.read_text().splitlines()]
        assert lines == [line.strip() for line in after.replace("PLACE", str(site)).splitlines()]
        assert mode_of(local) == 0o600 or "PLACE" not in after, "a user may keep a remote's password in it"
        dvc.configure()
        assert local.stat().st_mtime_ns == written
    ignored = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    assert ignored.stdout == ""


@pytest.mark.slow
def test_dvc_keeps_its_cache_in_the_project(site, run):
    os.environ.pop("DVC_SITE_CACHE_DIR", None)
    assert run(["stratagem", "data", "prepare"]).returncode == 0
    (cache,) = site.glob("repo/*")
    assert mode_of(site) == 0o700
    assert list(cache.rglob("cache.db"))
    told = run(["dvc", "doctor"], cwd=Path("data/digits"))
    assert f"Repo.site_cache_dir: {cache}" in told.stdout
    assert list(Path.cwd().rglob("site")) == [site]


def test_a_damaged_database_of_dvc_is_named_with_its_fix(project):
    from tasks.process import dvc_program  # It imports DVC.

    damaged = project / ".dvc/site/repo/1/hashes/local/cache.db"
    with sqlite3.connect(project / "whole.db") as whole:
        whole.execute("CREATE TABLE a (b)")
    damaged.parent.mkdir(parents=True)
    shutil.copy("whole.db", damaged)
    assert dvc.damaged_databases(project) == []
    damaged.write_bytes(b"garbage" * 1000)
    with pytest.raises(StratagemError) as caught, dvc_program._opened("data/digits/dvc.yaml"):
        sqlite3.connect(damaged).execute("SELECT * FROM a")
    assert str(caught.value) == (
        f"data/digits/dvc.yaml: {damaged} is damaged. Remove it, and DVC makes it again: rm {damaged}"
    )


def test_plain_dvc_in_a_fresh_clone_stays_in_the_project(site, run):
    os.environ.pop("DVC_SITE_CACHE_DIR", None)
    assert not site.with_name("config.local").exists()
    for folder in (Path(), Path("data/digits")):
        told = run(["dvc", "doctor"], cwd=folder)
        assert "Repo.site_cache_dir: .dvc_site/repo/" in told.stdout, told.stderr
        assert (folder / ".dvc_site" / "repo").is_dir()
    ignored = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    assert ignored.stdout == ""
    dvc.configure()
    assert f"Repo.site_cache_dir: {site}/repo/" in run(["dvc", "doctor"]).stdout
