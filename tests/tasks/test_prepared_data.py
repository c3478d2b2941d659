import hashlib
import json
import os
from pathlib import Path

import pytest

from tasks.data import prepared_data
from tasks.operations import dvc_data
from tasks.system.errors import UserError


def test_what_prepare_did_not_make_is_moved_out_of_its_way(project, tiny, capsys):
    folder = project / "data" / "tiny"
    made = {path.name for path in (folder / "prepared").iterdir()}
    prepared_data.set_foreign_aside("tiny")
    for content in ("first", "second"):
        (folder / "prepared" / "my_labels.npy").write_text(content)
        (folder / "prepared" / "notes").mkdir()
        (folder / "prepared" / "notes" / "a.md").write_text(content)
        prepared_data.set_foreign_aside("tiny")
    assert {path.name for path in (folder / "prepared").iterdir()} == made
    aside = {path.name for path in (folder / "set_aside").iterdir()}
    assert aside == {"my_labels.npy", "my_labels.npy.2", "notes", "notes.2"}
    assert (folder / "set_aside" / "notes" / "a.md").read_text() == "first"
    assert "It is now data/tiny/set_aside/notes.2" in capsys.readouterr().err


def test_without_a_manifest_what_is_made_is_known_by_its_names(project, tiny):
    folder = project / "data" / "tiny"
    (folder / "prepared" / "manifest.json").write_text("{")
    (folder / "prepared" / "notes.md").write_text("mine")
    prepared_data.set_foreign_aside("tiny")
    assert [path.name for path in (folder / "set_aside").iterdir()] == ["notes.md"]


@pytest.fixture
def versioned(project, digits):
    """The digits, with the data version that DVC gave them in data/digits/dvc.lock."""
    return dvc_data.load_prepared("digits")


def _list(versioned, project):
    """Put the listing of the data version where DVC keeps it."""
    names = sorted(path.name for path in Path(versioned.folder).iterdir())
    md5s = [hashlib.md5(Path(versioned.folder, name).read_bytes()).hexdigest() for name in names]
    entries = [{"md5": md5, "relpath": name} for md5, name in zip(md5s, names, strict=True)]
    listing = project / prepared_data.LISTINGS / versioned.data_version[:2] / f"{versioned.data_version[2:]}.dir"
    listing.parent.mkdir(parents=True)
    listing.write_text(json.dumps(entries))


def _replace(path: Path, old: bytes, new: bytes) -> None:
    """Change a file as quietly as can be: its size and its time stay."""
    before = path.stat()
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_changed_digit_in_the_manifest_is_refused(project, versioned):
    _list(versioned, project)
    prepared_data.verify(versioned)
    manifest = Path(versioned.folder) / "manifest.json"
    digit = f"{versioned.features['image'].mean[0]}".encode()
    _replace(manifest, digit, digit[:-1] + (b"1" if digit[-1:] != b"1" else b"2"))
    with pytest.raises(UserError, match=f"{manifest} (has changed|differs from the one)"):
        prepared_data.verify(versioned)
    with pytest.raises(UserError, match=f"{manifest} has changed") as caught:
        prepared_data.verify(dvc_data.load_prepared("digits"))
    assert versioned.data_version in str(caught.value)
    assert "stratagem data prepare --set dataset.name=digits --force" in str(caught.value)


def test_a_manifest_that_is_another_one_than_the_runs_is_refused(project, tiny):
    prepared_data.verify(tiny)
    manifest = Path(tiny.folder) / "manifest.json"
    _replace(manifest, b'"num_outputs": 10', b'"num_outputs": 11')
    with pytest.raises(UserError, match=f"{manifest} differs from the one that this run started with"):
        prepared_data.verify(tiny)
    manifest.write_text("{")
    with pytest.raises(
        UserError, match=f"{manifest} is missing or damaged.+stratagem data prepare --set dataset.name=tiny"
    ):
        prepared_data.verify(tiny)
    with pytest.raises(
        UserError, match=f"{manifest} is not a readable.+stratagem data prepare --set dataset.name=tiny"
    ):
        dvc_data.load_prepared("tiny")


def test_what_was_verified_is_read_again_where_it_was_written_to(project, tiny):
    prepared_data.verify(tiny)
    images = Path(tiny.splits["train"].features["image"])
    _replace(images, images.read_bytes()[-8:], b"12345678")
    with pytest.raises(UserError, match=f"{images} is damaged: its sha256 is"):
        prepared_data.verify(tiny)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\7"), "its manifest says"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "its manifest says"),
        (lambda path: path.unlink(), "cannot be read"),
    ],
    ids=["one byte changed", "one byte short", "missing"],
)
@pytest.mark.parametrize("kind", ["images", "labels"])
def test_verify_names_a_damaged_array(tiny, damage, expected, kind):
    split = tiny.splits["train"]
    path = {"images": split.features["image"], "labels": split.labels}[kind]
    damage(Path(path))
    with pytest.raises(UserError) as caught:
        prepared_data.verify(tiny)
    message = str(caught.value)
    assert path in message
    assert expected in message
    assert "stratagem data prepare --set dataset.name=tiny --force" in message
    assert "cannot be read" in message or tiny.splits["train"].sha256[path] in message
