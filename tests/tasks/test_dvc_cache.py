import os
import stat
import subprocess
from pathlib import Path

import pytest

from tasks.process import dvc
from tasks.system.errors import UserError


@pytest.fixture
def site(project, monkeypatch):
    """Where DVC is to keep its cache in a project whose user said nothing of it."""
    monkeypatch.delenv("DVC_SITE_CACHE_DIR")
    return project / ".dvc" / "site"


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_others_could_write_to_is_made_anew(site):
    planted = site / "repo" / "x" / "hashes" / "cache.db"
    for mode in (0o777, 0o755, 0o770):
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.touch()
        site.chmod(mode)
        dvc.configure()
        assert mode_of(site) == 0o700
        assert not planted.exists()
    planted.parent.mkdir(parents=True)
    planted.touch()
    dvc.configure()
    assert planted.exists(), "its own is kept"


def test_a_place_that_leads_elsewhere_is_refused(site, tmp_path):
    site.symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"\.dvc/site is not a folder of yours: let its owner remove it"):
        dvc.configure()


def test_a_place_of_another_user_is_refused(site, monkeypatch):
    site.mkdir(0o700)
    monkeypatch.setattr(os, "getuid", lambda: site.stat().st_uid + 1)
    with pytest.raises(UserError, match=r"\.dvc/site is not a folder of yours: let its owner remove it"):
        dvc.configure()


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
        dvc.configure()
        assert local.stat().st_mtime_ns == written
    ignored = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    assert ignored.stdout == ""


@pytest.mark.slow
def test_dvc_keeps_its_cache_in_the_project(site, run):
    os.environ.pop("DVC_SITE_CACHE_DIR", None)
    assert run(["stratagem", "prepare"]).returncode == 0
    (cache,) = site.glob("repo/*")
    assert mode_of(site) == 0o700
    assert list(cache.rglob("cache.db"))
    told = run(["dvc", "doctor"], cwd=Path("data/digits"))
    assert f"Repo.site_cache_dir: {cache}" in told.stdout
    assert list(Path.cwd().rglob("site")) == [site]
