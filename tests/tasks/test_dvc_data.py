import shutil
import subprocess
import sys
import threading
import time

import pytest
import yaml
from filelock import FileLock

from tasks import config, dvc_data
from tasks.errors import StratagemError, UserError


def _load(*overrides: str) -> config.Settings:
    return config.load(None, overrides)


# Each: what data/digits/params.yaml says, what the settings ask for, what is refused.
CONTRADICTIONS = [
    ({}, "dataset.version=9.9.9", "dataset.version = 9.9.9: data/digits/params.yaml says None"),
    ({"version": "1.0.0"}, "dataset.version=2.0.0", "dataset.version = 2.0.0: data/digits/params.yaml says 1.0.0"),
    ({}, "dataset.image_size=[16,16]", r"dataset.image_size = \[16, 16\]: data/digits/params.yaml says None"),
    ({"image_size": [8, 8]}, "dataset.image_size=[16,16]", r"params.yaml says \[8, 8\]"),
]


@pytest.mark.parametrize(("present", "override", "message"), CONTRADICTIONS)
def test_settings_that_contradict_the_datasets_own_are_refused(project, present, override, message):
    path = project / "data" / "digits" / "params.yaml"
    values = yaml.safe_load(path.read_text())
    values["dataset"] |= present
    path.write_text(yaml.safe_dump(values))
    before = path.read_text()
    with pytest.raises(UserError, match=message) as caught:
        dvc_data.prepare_data(_load(override))
    assert "Change it there, or leave dataset." in str(caught.value)
    assert path.read_text() == before


def test_a_dataset_that_is_not_there_leaves_no_folder(project):
    before = sorted(path.name for path in (project / "data").iterdir())
    with pytest.raises(UserError, match="unknown dataset 'mnits': did you mean 'mnist'"):
        dvc_data.prepare_data(_load("dataset.name=mnits"))
    assert sorted(path.name for path in (project / "data").iterdir()) == before


def test_a_new_dataset_gets_a_folder_of_its_own(project):
    folder = project / "data" / "cifar100"
    dataset = _load("dataset.name=cifar100", "dataset.image_size=[16,16]").dataset
    assert dvc_data._add_dataset(dataset, project)
    described = yaml.safe_load((folder / "params.yaml").read_text())
    assert described == {"dataset": {"name": "cifar100", "version": None, "image_size": [16, 16]}}
    for name in ("dvc.yaml", ".gitignore"):
        assert (folder / name).read_bytes() == (project / "data" / "digits" / name).read_bytes()
    assert not dvc_data._add_dataset(dataset, project), "it is there now"


def test_data_that_another_run_is_preparing_are_waited_for(project, monkeypatch):
    monkeypatch.setattr(dvc_data, "DVC_BUSY_SECONDS", 0.1)
    (project / ".dvc" / "tmp").mkdir()
    with (
        FileLock(project / ".dvc" / "tmp" / "stratagem.lock"),
        pytest.raises(StratagemError, match="another run has been preparing data"),
    ):
        dvc_data.prepare_data(_load())


def test_a_dvc_command_that_runs_outside_is_waited_for(project, digits_folder, monkeypatch):
    """DVC refuses to run beside another DVC; a run tries again until the other one is done."""
    shutil.copytree(digits_folder, project / "data" / "digits", dirs_exist_ok=True)
    pipeline = {"stages": {"slow": {"cmd": "touch began; while ! test -e end; do sleep 0.1; done"}}}
    (project / "other").mkdir()
    (project / "other" / "dvc.yaml").write_text(yaml.safe_dump(pipeline))
    # A stage of no moment in place of the real one: what is looked at is the waiting.
    stage = {"cmd": "touch done", "outs": [{"prepared": {"persist": True}}]}
    (project / "data" / "digits" / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"prepare": stage}}))
    other = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro", "--quiet", "other/dvc.yaml"], stdin=subprocess.DEVNULL
    )
    try:
        while not (project / "other" / "began").exists():
            assert other.poll() is None
            time.sleep(0.1)
        threading.Timer(8, (project / "other" / "end").touch).start()
        assert dvc_data.prepare_data(_load()) is not None
    finally:
        (project / "other" / "end").touch()
        assert other.wait() == 0
    assert (project / "data" / "digits" / "done").exists()
