import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import yaml
from filelock import FileLock

from tasks import config, processes, runs
from tasks.errors import StratagemError, UserError
from tasks.records import Run


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    """A cluster here does not depend on the machine that the tests run on."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


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


def test_only_a_launcher_says_who_is_in_a_cluster(project, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    for kind in ("one_device", "multi_worker"):
        assert "TF_CONFIG" not in processes.stage_environment(_load(f"strategy.kind={kind}"))


# Each: settings of a strategy on JAX, what its process finds.
FORCED = "--xla_force_host_platform_device_count"
ON_JAX = [
    (["strategy.kind=data_parallel"], {"XLA_FLAGS": None, "JAX_PLATFORMS": "", "NPROC": "32", "JAX_ENABLE_X64": None}),
    (["strategy.kind=data_parallel", "strategy.devices=8"], {"XLA_FLAGS": f"{FORCED}=8", "JAX_PLATFORMS": ""}),
    (["strategy.kind=data_parallel", "strategy.devices=[cpu:0,cpu:3]"], {"XLA_FLAGS": f"{FORCED}=4"}),
    (["strategy.kind=data_parallel", "strategy.devices=[cpu:0,cpu:3]"], {"JAX_PLATFORMS": "cpu"}),
    (["strategy.kind=data_parallel", "strategy.devices=[gpu:0,gpu:1]"], {"XLA_FLAGS": None, "JAX_PLATFORMS": ""}),
    (["strategy.kind=model_parallel", "strategy.mesh_shape=[2,4]"], {"XLA_FLAGS": f"{FORCED}=8", "NPROC": "32"}),
    (["strategy.kind=model_parallel", "strategy.mesh_shape=[4,4]"], {"XLA_FLAGS": f"{FORCED}=16", "NPROC": "64"}),
    (["strategy.kind=data_parallel", "train.dtype_policy=float64"], {"JAX_ENABLE_X64": "1"}),
    (
        ["strategy.kind=data_parallel", "strategy.devices=2", "train.deterministic=true"],
        {"XLA_FLAGS": f"{FORCED}=2 --xla_gpu_deterministic_ops=true"},
    ),
]


@pytest.mark.parametrize(("overrides", "found"), ON_JAX)
def test_a_stage_on_jax_finds_its_devices(project, monkeypatch, overrides, found):
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_ENABLE_X64", "NPROC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    environment = processes.stage_environment(_load(*overrides))
    assert environment["KERAS_BACKEND"] == "jax"
    assert {name: environment.get(name) for name in found} == found


def test_what_the_user_set_for_jax_stays(project, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=somewhere")
    environment = processes.stage_environment(_load("strategy.kind=data_parallel", "strategy.devices=2"))
    assert environment["JAX_PLATFORMS"] == "cuda"
    assert environment["XLA_FLAGS"] == f"--xla_dump_to=somewhere {FORCED}=2"
    assert processes.stage_environment(_load())["JAX_PLATFORMS"] == "cpu", "TensorFlow has the GPU there"


@pytest.mark.parametrize(("device", "hidden"), [("cpu", True), ("gpu:0", False), ("null", False)])
def test_a_run_on_the_cpu_hides_the_gpus_from_its_process(project, monkeypatch, device, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    environment = processes.stage_environment(_load(f"strategy.device={device}"))
    assert environment["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "3")


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


# Each: the variable, its value, the strategy, what is refused.
CONTRADICTED = [
    ("KERAS_BACKEND", "tensorflow", ["strategy.kind=data_parallel"], "contradicts strategy.kind = 'data_parallel'"),
    ("KERAS_BACKEND", "jax", ["strategy.kind=mirrored"], "Unset KERAS_BACKEND, or give strategy.kind=data_parallel or"),
    ("KERAS_BACKEND", "torch", [], r"which trains on tensorflow\. Unset KERAS_BACKEND$"),
    ("TF_CONFIG", "{", ["strategy.kind=multi_worker"], r"TF_CONFIG = '\{': it is not JSON"),
]


@pytest.mark.parametrize(("variable", "value", "overrides", "message"), CONTRADICTED)
def test_what_contradicts_a_strategy_is_refused_at_once(project, monkeypatch, variable, value, overrides, message):
    settings = _load(*overrides)
    processes.check_devices(settings)
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=message):
        processes.check_devices(settings)


def test_what_fits_is_not_refused(project, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    for overrides in ([], ["strategy.kind=mirrored"], ["strategy.kind=multi_worker", "strategy.launcher=local"]):
        processes.check_devices(_load(*overrides))


def test_a_strategy_on_jax_needs_jax(project, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    processes.check_devices(_load())
    with pytest.raises(UserError, match=r"strategy.kind = 'data_parallel' trains on JAX, which is not installed"):
        processes.check_devices(_load("strategy.kind=data_parallel"))


def test_there_is_no_tpu_here(project):
    with pytest.raises(UserError, match=r"strategy.kind = 'tpu'"):
        processes.check_devices(_load("strategy.kind=tpu"))


@pytest.mark.parametrize(("index", "name"), [(0, None), (1, "worker 1")])
def test_who_is_not_the_chief_of_a_cluster_knows_its_name(project, monkeypatch, index, name):
    assert processes.member_name(_load("strategy.kind=multi_worker")) is None, "there the chief starts the others"
    place = {"cluster": {"worker": ["localhost:40001", "localhost:40002"]}, "task": {"type": "worker", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(place))
    assert processes.member_name(_load("strategy.kind=multi_worker")) == name
    assert processes.member_name(_load()) is None, "no cluster"


def test_who_is_not_the_chief_leads_no_pipeline(project, monkeypatch):
    place = {"cluster": {"worker": ["localhost:40001", "localhost:40002"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(place))
    with pytest.raises(UserError, match=r"TF_CONFIG makes this process worker 1, and only the chief leads"):
        processes.run("start", Run, _load("strategy.kind=multi_worker"))
    assert _stage_processes() == []


def test_a_member_does_not_begin_before_the_data_are_prepared(project, monkeypatch):
    place = {"cluster": {"worker": ["localhost:40001", "localhost:40002"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(place))
    with pytest.raises(UserError, match="dataset digits is not prepared"):
        processes.join(_load("strategy.kind=multi_worker"))
    assert not (project / "mlruns" / "logs").exists()


def test_what_comes_after_a_training_needs_no_cluster(project):
    settings = _load("strategy.kind=multi_worker", "strategy.workers=3")
    try:
        alone = processes.start(settings, whole=False)
        assert len(_stage_processes()) == 1
        assert processes.start(settings, whole=False) is alone
        whole = processes.start(settings)
        assert whole is not alone, "one process cannot train"
        assert not alone.first.alive
        assert len(_stage_processes()) == 3
        assert processes.start(settings, whole=False) is whole
        whole._processes[2].kill()
        assert processes.start(settings, whole=False) is whole, "its chief is there"
        assert processes.start(settings) is not whole
    finally:
        processes.stop()
    assert _stage_processes() == []


def _stage_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "tasks" in child.cmdline()]


def test_one_stage_process_serves_settings_of_one_kind(settings):
    try:
        first = processes.start(settings)
        assert processes.start(_load("train.epochs=3")) is first
        other = processes.start(_load("strategy.device=cpu"))
        assert other is not first
        assert not first.first.alive
        assert other.usable
    finally:
        processes.stop()
    assert not other.first.alive
    processes.stop()  # There is nothing to stop, and that is no error.


def test_a_stage_process_that_died_is_told_and_replaced(settings):
    try:
        process = processes.start(settings)
        (child,) = _stage_processes()
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
        runs.newest("digits")
    for age, (name, dataset) in enumerate([("other", "mnist"), ("new", "digits"), ("old", "digits")]):
        record = _begin(project, name, dataset) / "records" / "run.json"
        os.utime(record, (time.time() - age * 100,) * 2)
    assert runs.newest("digits").run_id == "new"


def test_a_run_that_cannot_be_evaluated_is_refused(project, settings):
    _begin(project, "abcdef", "digits")
    with pytest.raises(UserError, match="unknown run 'abcdeg': did you mean 'abcdef'"):
        processes.load_training(settings, "abcdeg")
    with pytest.raises(UserError, match="abcdef was not trained to its end: go on with `stratagem train --resume"):
        processes.load_training(settings, "abcdef")
