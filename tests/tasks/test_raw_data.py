import hashlib
import json
import os
from pathlib import Path

import pytest

from tasks import config
from tasks.data import data_state, prepared_data
from tasks.input import sources
from tasks.operations import dvc_data
from tasks.runs import lineage
from tasks.system import files
from tasks.system.errors import UserError

SHARD = "digits/1.0.0/digits-train.tfrecord-00000-of-00001"


@pytest.fixture
def raw(project, digits):
    """data/digits/raw, as data/digits/dvc.lock says."""
    (project / ".dvc" / "tmp").mkdir()
    return project / "data" / "digits" / "raw"


def _list(raw: Path, project: Path) -> None:
    """Put the listing of the raw folder where DVC keeps it."""
    files = sorted(path for path in raw.rglob("*") if path.is_file())
    md5s = {path.relative_to(raw).as_posix(): hashlib.md5(path.read_bytes()).hexdigest() for path in files}
    version = lineage.data_version("digits", "raw")
    listing = project / prepared_data.LISTINGS / version[:2] / f"{version[2:]}.dir"
    listing.parent.mkdir(parents=True)
    listing.write_text(json.dumps([{"md5": md5, "relpath": path} for path, md5 in md5s.items()]))


def _change(path: Path) -> None:
    """Change a byte as quietly as can be: the file's size and its time stay."""
    before = path.stat()
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("has_listing", [True, False])
def test_a_changed_shard_is_refused_where_it_is_streamed(project, raw, has_listing):
    if has_listing:
        _list(raw, project)
    prepared = dvc_data.load_prepared("digits")
    array, stream = (config.load(None, [f"input.source={source}"]).input for source in ("array", "stream"))
    sources.verify(stream, prepared)
    _change(raw / SHARD)
    sources.verify(array, prepared)
    with pytest.raises(UserError) as caught:
        sources.verify(stream, prepared)
    assert str(caught.value).startswith(f"data/digits/raw/{SHARD}: damaged" if has_listing else "data/digits/raw: ch")
    assert "Move data/digits/raw away, then make it again: stratagem prepare" in str(caught.value)
    (raw / SHARD).unlink()
    with pytest.raises(UserError, match=f"{SHARD}: cannot be read" if has_listing else "data/digits/raw: changed"):
        sources.verify(stream, prepared)


def test_shards_are_read_only_if_a_file_has_changed_since_dvc_found_it_up_to_date(project, raw, monkeypatch):
    prepared = dvc_data.load_prepared("digits")
    with data_state.remembered(project, "digits", trusted_after_seconds=0):
        pass
    read = []
    digest = files.digest
    monkeypatch.setattr(files, "digest", lambda path, *how: read.append(path.name) or digest(path, *how))
    prepared_data.verify_raw(prepared)
    assert read == []
    _change(raw / SHARD)
    for _ in range(2):
        with pytest.raises(UserError, match="data/digits/raw: changed"):
            prepared_data.verify_raw(prepared)
        assert Path(SHARD).name in read
        read.clear()


def test_without_dvc_nothing_is_compared(project, tiny):
    prepared_data.verify_raw(tiny)
