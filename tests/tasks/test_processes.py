import importlib.util
import json
import os
import shutil
import time
from pathlib import Path

import psutil
import pytest

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


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["strategy.kind=multi_worker", "strategy.devices=2"], "2 workers need 4 GPUs, and this machine has 0"),
        (["strategy.kind=multi_worker", "strategy.launcher=tf_config"], "someone else starts the members"),
        (["strategy.kind=multi_worker"], None),
        (["strategy.kind=multi_worker", "strategy.devices=2", "evaluate.strategy=one_device"], None),
        (["strategy.kind=mirrored", "strategy.devices=['gpu:7']"], None),  # The process itself will see.
    ],
    ids=str,
)
def test_a_run_is_evaluated_on_one_device_where_its_cluster_is_not_to_be_had(monkeypatch, capsys, overrides, reason):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = _load(*overrides)
    found = processes._evaluable(settings)
    said = capsys.readouterr().err
    if reason is None:
        assert (found, said) == (settings, "")
    else:
        assert found.evaluate.strategy == "one_device"
        assert said.startswith("evaluated on one device: ")
        assert reason in said
        assert said.count("\n") == 1


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
    run_id = "0123456789abcdef" * 2
    _begin(project, run_id, "digits")
    with pytest.raises(UserError, match=f"unknown run '{run_id[:-1]}': did you mean '{run_id}'"):
        processes.load_training(settings, run_id[:-1])
    with pytest.raises(UserError, match=f"{run_id} was not trained to its end: go on with `stratagem train --resume"):
        processes.load_training(settings, run_id)
