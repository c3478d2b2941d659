import json
import math
import os
import stat

import pytest

from tasks import records
from tasks.records import EvaluationResult, SourceFile
from tasks.system.errors import UserError

OLD = SourceFile(url="https://example.org/old.gz", sha256="0" * 64, num_bytes=1)
NEW = SourceFile(url="https://example.org/new.gz", sha256="f" * 64, num_bytes=2)
DIVERGED = EvaluationResult(
    run_id="r",
    checkpoint="mlruns/runs/r/checkpoints/3",
    step=3,
    num_examples=2,
    metrics={"test/loss": math.nan, "test/accuracy": 0.5},
    classes=(records.ClassMetrics(name="0", precision=0.5, recall=1.0, f1=2 / 3, support=1),),
    confusion_matrix=((1, 0), (1, 0)),
    strategy="one_device",
    lower_is_better=("test/loss",),
    outputs="mlruns/runs/r/evaluation/3.npz",
    outputs_sha256="0" * 64,
    test_rows="0" * 64,
)


@pytest.mark.parametrize("record", [OLD, DIVERGED], ids=["plain", "diverged"])
def test_what_is_saved_is_loaded(record, tmp_path):
    path = records.save(record, tmp_path / "new" / "folders" / "record.json")
    loaded = records.load(type(record), path)
    assert loaded.model_dump_json() == record.model_dump_json()
    json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN is not JSON: jq, DVC and browsers refuse it


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o007, 0o660)])
def test_a_saved_record_is_for_those_of_the_umask_and_nothing_else_is_left(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        path = records.save(OLD, tmp_path / "record.json")
        records.save(NEW, path)
    finally:
        os.umask(before)
    assert records.load(SourceFile, path) == NEW
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is missing: the stage that writes it has not finished"),
        (b'{"url": "https://exa', "is not a readable SourceFile"),
        (b"\xff\xfe", "is not a readable SourceFile"),
        (b'{"url": "u", "sha256": "s", "num_bytes": 1, "size": 1}', "is not a readable SourceFile"),
        ("folder", "is not a readable SourceFile"),
    ],
)
def test_a_record_that_cannot_be_read(content, said, tmp_path):
    path = tmp_path / "record.json"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        records.load(SourceFile, path)
    assert str(caught.value).startswith(f"{path} {said}")
    assert "\n" not in str(caught.value)


RUN = records.Run(
    run_id="r",
    experiment="e",
    name="n",
    folder="mlruns/runs/r",
    lineage=records.Lineage(git_commit=None, git_dirty=None, code_digest="", settings_digest="", data_version=None),
    settings={},
)


def test_a_run_carries_the_number_of_its_format(tmp_path):
    path = records.save(RUN, tmp_path / "run.json")
    assert json.loads(path.read_text())["format"] == records.FORMAT == 1
    assert records.load(records.Run, path) == RUN
    assert "format" not in json.loads(records.save(OLD, tmp_path / "record.json").read_text()), "a part of a folder"


@pytest.mark.parametrize(
    ("given", "found"), [({}, "no format number"), ({"format": 2}, "format 2"), ({"format": "1"}, "format '1'")]
)
def test_a_run_of_another_format_is_rejected_in_one_sentence(given, found, tmp_path):
    """Also where its other fields are those of another version."""
    path = tmp_path / "run.json"
    for fields in (RUN.model_dump(mode="json"), {"id": 5}):
        path.write_text(json.dumps(given | fields))
        with pytest.raises(UserError) as caught:
            records.load(records.Run, path)
        assert str(caught.value) == (
            f"{path} has {found}, but this version of Stratagem reads only format 1: start the run again with --fresh, "
            "or remove its folder"
        )
    path.write_text("{")
    with pytest.raises(UserError, match=r"is not a readable Run \(.*: start the run again with --fresh, or remove"):
        records.load(records.Run, path)
