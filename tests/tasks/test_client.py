"""The stage process of a command: when one serves for several stages, and when there must be another."""

import json

import psutil
import pytest

from tasks import config
from tasks.errors import StratagemError, UserError
from tasks.process import client


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
    same = client.kind_of_process(_load(*overrides)) == client.kind_of_process(settings)
    assert same == (overrides in SAME_PROCESS)


def test_who_is_not_the_chief_leads_no_pipeline(project, monkeypatch):
    place = {"cluster": {"worker": ["localhost:40001", "localhost:40002"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(place))
    with pytest.raises(UserError, match=r"TF_CONFIG makes this process worker 1, and only the chief leads"):
        client.start_run(_load("strategy.kind=multi_worker"), None)
    assert _stage_processes() == []


def test_what_comes_after_a_training_needs_no_cluster(project):
    settings = _load("strategy.kind=multi_worker", "strategy.workers=3")
    try:
        alone = client.start(settings, with_cluster=False)
        assert len(_stage_processes()) == 1
        assert client.start(settings, with_cluster=False) is alone
        all_members = client.start(settings)
        assert all_members is not alone, "one process cannot train"
        assert not alone.first.alive
        assert len(_stage_processes()) == 3
        assert client.start(settings, with_cluster=False) is all_members
        all_members._processes[2].kill()
        assert client.start(settings, with_cluster=False) is all_members, "its chief is there"
        assert client.start(settings) is not all_members
    finally:
        client.stop()
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
    found = client._evaluable(settings)
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
        first = client.start(settings)
        assert client.start(_load("train.epochs=3")) is first
        other = client.start(_load("strategy.device=cpu"))
        assert other is not first
        assert not first.first.alive
        assert other.usable
    finally:
        client.stop()
    assert not other.first.alive
    client.stop()  # There is nothing to stop, and that is no error.


def test_a_stage_process_that_died_is_told_and_replaced(settings):
    try:
        process = client.start(settings)
        (child,) = _stage_processes()
        child.kill()
        with pytest.raises(StratagemError, match=r"the process that ran start died \(SIGKILL\)"):
            process.call("start", {})
        assert client.start(settings) is not process
    finally:
        client.stop()
