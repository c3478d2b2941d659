import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
import yaml
from filelock import FileLock

from tasks import config, processes
from tasks.errors import StratagemError, UserError
from tasks.records import Run


@pytest.fixture
def settings(project):
    return config.load()


def _load(*overrides: str) -> config.Settings:
    return config.load(None, overrides)


def test_a_stage_finds_its_backend_and_the_environment_it_was_installed_in(settings, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    environment = processes.stage_environment(settings)
    assert environment["KERAS_BACKEND"] == "tensorflow"
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert environment["TF_CPP_MIN_LOG_LEVEL"] == "0", "what the user set stays"
    assert "PREFECT_API_URL" not in environment


@pytest.mark.parametrize(("device", "hidden"), [("cpu", True), ("gpu:0", False), ("null", False)])
def test_a_run_on_the_cpu_hides_the_gpus_from_its_process(project, monkeypatch, device, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    environment = processes.stage_environment(_load(f"strategy.device={device}"))
    assert environment["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "3")


def test_what_the_user_set_for_prefect_stays(monkeypatch):
    for name in ("PREFECT_LOGGING_LEVEL", "PREFECT_SERVER_ANALYTICS_ENABLED", "DO_NOT_TRACK", "STRATAGEM_DEBUG"):
        monkeypatch.setenv(name, "")  # So that the test's end restores it.
        monkeypatch.delenv(name)
    monkeypatch.setenv("PREFECT_LOGGING_LEVEL", "WARNING")
    processes.set_flow_environment(debug=False)
    assert os.environ["PREFECT_LOGGING_LEVEL"] == "WARNING"
    assert os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert "STRATAGEM_DEBUG" not in os.environ
    processes.set_flow_environment(debug=True)
    assert os.environ["STRATAGEM_DEBUG"] == "1"


SAME_PROCESS = [["train.epochs=3"], ["model.name=mlp"], ["train.seed=7"]]
OTHER_PROCESS = [
    ["strategy.device=cpu"],
    ["strategy.kind=mirrored", "strategy.devices=2"],
    ["train.deterministic=true"],
]


@pytest.mark.parametrize("overrides", [*SAME_PROCESS, *OTHER_PROCESS], ids=",".join)
def test_only_what_is_decided_once_in_a_process_needs_another_one(settings, overrides):
    same = processes.kind_of_process(_load(*overrides)) == processes.kind_of_process(settings)
    assert same == (overrides in SAME_PROCESS)


def test_one_stage_process_serves_settings_of_one_kind(settings):
    try:
        first = processes.start(settings)
        assert processes.start(_load("train.epochs=3")) is first
        other = processes.start(_load("strategy.device=cpu"))
        assert other is not first
        assert not first.alive
        assert other.alive
    finally:
        processes.stop()
    assert not other.alive
    processes.stop()  # There is nothing to stop, and that is no error.


def test_a_stage_process_that_died_is_told_and_replaced(settings):
    try:
        process = processes.start(settings)
        (child,) = [p for p in psutil.Process().children() if p.cmdline()[-2:] == ["tasks", "serve"]]
        child.kill()
        with pytest.raises(StratagemError, match=r"the process that ran start died \(SIGKILL\)"):
            process.call("start", {})
        assert processes.start(settings) is not process
    finally:
        processes.stop()


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
        processes.prepare_data(_load(override))
    assert "Change it there, or leave dataset." in str(caught.value)
    assert path.read_text() == before


def test_a_dataset_that_is_not_there_leaves_no_folder(project):
    before = sorted(path.name for path in (project / "data").iterdir())
    with pytest.raises(UserError, match="unknown dataset 'mnits': did you mean 'mnist'"):
        processes.prepare_data(_load("dataset.name=mnits"))
    assert sorted(path.name for path in (project / "data").iterdir()) == before


def test_a_new_dataset_gets_a_folder_of_its_own(project):
    folder = project / "data" / "cifar100"
    dataset = _load("dataset.name=cifar100", "dataset.image_size=[16,16]").dataset
    assert processes._add_dataset(dataset, project)
    described = yaml.safe_load((folder / "params.yaml").read_text())
    assert described == {"dataset": {"name": "cifar100", "version": None, "image_size": [16, 16]}}
    for name in ("dvc.yaml", ".gitignore"):
        assert (folder / name).read_bytes() == (project / "data" / "digits" / name).read_bytes()
    assert not processes._add_dataset(dataset, project), "it is there now"


def test_data_that_another_run_is_preparing_are_waited_for(project, monkeypatch):
    monkeypatch.setattr(processes, "DVC_BUSY_SECONDS", 0.1)
    (project / ".dvc" / "tmp").mkdir()
    with (
        FileLock(project / ".dvc" / "tmp" / "stratagem.lock"),
        pytest.raises(StratagemError, match="another run has been preparing data"),
    ):
        processes.prepare_data(_load())


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
        assert processes.prepare_data(_load()) is not None
    finally:
        (project / "other" / "end").touch()
        assert other.wait() == 0
    assert (project / "data" / "digits" / "done").exists()


@pytest.mark.parametrize("room", ["data", "mlruns", ".dvc"])
def test_a_folder_that_cannot_be_written_is_named(project, room):
    shutil.rmtree(project / room)
    (project / room).symlink_to("/proc/self")  # Nobody can make a file there, root neither.
    with pytest.raises(UserError, match=rf"{room} cannot be written \(.+\): make the project's folder writable"):
        processes.check_writable()


def _begin(project: Path, name: str, dataset: str) -> Path:
    """Write the record of a run as `start` does; return its folder."""
    folder = project / "mlruns" / "runs" / name
    (folder / "records").mkdir(parents=True)
    values = {
        "run_id": name, "experiment": dataset, "name": f"{dataset}-x", "folder": f"mlruns/runs/{name}",
        "settings": _load(f"dataset.name={dataset}").to_json(),
        "lineage": dict.fromkeys(("git_commit", "git_dirty", "data_version"))
        | {"code_digest": "", "settings_digest": ""},
    }  # fmt: skip
    (folder / "records" / "run.json").write_text(Run.model_validate(values).model_dump_json())
    return folder


def test_the_newest_run_is_that_on_the_same_dataset(project):
    with pytest.raises(UserError, match="no run on digits has begun"):
        processes.newest_run("digits")
    for age, (name, dataset) in enumerate([("other", "mnist"), ("new", "digits"), ("old", "digits")]):
        record = _begin(project, name, dataset) / "records" / "run.json"
        os.utime(record, (time.time() - age * 100,) * 2)
    assert processes.newest_run("digits") == "new"


def test_a_run_that_cannot_be_evaluated_is_refused(project, settings):
    _begin(project, "abcdef", "digits")
    with pytest.raises(UserError, match="unknown run 'abcdeg': did you mean 'abcdef'"):
        processes.load_training(settings, "abcdeg")
    with pytest.raises(UserError, match="abcdef was not trained to its end: go on with `stratagem train --resume"):
        processes.load_training(settings, "abcdef")


@pytest.fixture
def own_prefect(project, tmp_path, monkeypatch):
    """A Prefect home of its own, and no server."""
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("PREFECT_API_URL", "")
    monkeypatch.delenv("PREFECT_API_URL")
    return tmp_path / "prefect"


def test_a_run_has_an_api_of_its_own_which_ends_with_it(own_prefect):
    server = processes.start_flow_server()
    assert server is not None
    try:
        server.await_ready()
        url = os.environ["PREFECT_API_URL"]
        assert url.startswith("http://127.0.0.1:")
        assert urllib.request.urlopen(f"{url}/health", timeout=60).read() == b"true"
        assert (own_prefect / "prefect.db").exists(), "`stratagem ui` shows the run later"
    finally:
        server.close()
    assert [child for child in psutil.Process().children() if "flows.server" in child.cmdline()] == []


def test_a_server_of_the_users_own_is_used(own_prefect, monkeypatch):
    own_prefect.mkdir()
    profile = "active = 'mine'\n[profiles.mine]\nPREFECT_API_URL = 'http://127.0.0.1:1/api'\n"
    (own_prefect / "profiles.toml").write_text(profile)
    assert processes.start_flow_server() is None
    assert "PREFECT_API_URL" not in os.environ, "Prefect reads it from the profile itself"
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:2/api")
    assert processes.start_flow_server() is None


def test_an_api_that_cannot_start_is_told_in_one_message(own_prefect):
    own_prefect.mkdir()
    (own_prefect / "prefect.db").write_text("no database " * 1000)
    server = processes.start_flow_server()
    assert server is not None
    with pytest.raises(StratagemError, match=r"^Prefect's server for this run did not start: .+--debug\)$") as caught:
        server.await_ready()
    server.close()
    assert "\n" not in str(caught.value)
