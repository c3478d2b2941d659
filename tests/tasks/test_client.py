"""The stage process of a command: when one serves for several stages, and when there must be another."""

from pathlib import Path

import psutil
import pytest

from tasks import config
from tasks.process import client, stages
from tasks.system.errors import Interrupted, StratagemError, UserError
from tests.tasks.clusters import TWO, place_of
from tests.tasks.written_runs import write_run

pytestmark = pytest.mark.usefixtures("on_cpus")


SAME_PROCESS = [["train.epochs=3"], ["model.name=mlp"], ["train.seed=7"]]
OTHER_PROCESS = [
    ["strategy.device=cpu"],
    ["strategy.kind=mirrored", "strategy.devices=2"],
    ["train.deterministic=true"],
]


@pytest.mark.parametrize("overrides", [*SAME_PROCESS, *OTHER_PROCESS], ids=",".join)
def test_only_what_is_decided_once_in_a_process_needs_another_one(settings, overrides):
    same = client.fixed_at_start(config.load(None, overrides)) == client.fixed_at_start(settings)
    assert same == (overrides in SAME_PROCESS)


def test_who_is_not_the_chief_leads_no_pipeline(project, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", place_of("worker", 1, worker=TWO))
    with pytest.raises(UserError, match=r"TF_CONFIG makes this process worker 1, and only the chief runs"):
        stages.start_run(config.load(None, ["strategy.kind=multi_worker"]), prepared=None)
    assert _stage_processes() == []


@pytest.mark.slow
def test_what_comes_after_a_training_needs_no_cluster(project):
    settings = config.load(None, ["strategy.kind=multi_worker", "strategy.workers=3"])
    try:
        alone = client.start_processes(settings, with_cluster=False)
        assert len(_stage_processes()) == 1
        assert client.start_processes(settings, with_cluster=False) is alone
        all_members = client.start_processes(settings)
        assert all_members is not alone, "one process cannot train"
        assert not alone.first.alive
        assert len(_stage_processes()) == 3
        assert client.start_processes(settings, with_cluster=False) is all_members
        all_members.processes[2].kill()
        assert client.start_processes(settings, with_cluster=False) is all_members, "its chief is there"
        assert client.start_processes(settings) is not all_members
    finally:
        client.stop_processes()
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
    settings = config.load(None, overrides)
    found = client._evaluable(settings)
    said = capsys.readouterr().err
    if reason is None:
        assert (found, said) == (settings, "")
    else:
        assert found.evaluate.strategy == "one_device"
        assert said.startswith("evaluating on one device: ")
        assert reason in said
        assert said.count("\n") == 1


def _stage_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "tasks" in child.cmdline()]


def test_one_stage_process_serves_settings_that_fix_the_same(settings):
    try:
        first = client.start_processes(settings)
        assert client.start_processes(config.load(None, ["train.epochs=3"])) is first
        other = client.start_processes(config.load(None, ["strategy.device=cpu"]))
        assert other is not first
        assert not first.first.alive
        assert other.usable
    finally:
        client.stop_processes()
    assert not other.first.alive
    client.stop_processes()  # There is nothing to stop, and that is no error.


def test_a_stage_process_that_died_is_told_and_replaced(settings):
    try:
        process = client.start_processes(settings)
        (child,) = _stage_processes()
        child.kill()
        with pytest.raises(StratagemError, match=r"the process that ran start_run died \(SIGKILL\)"):
            process.call("start_run", {})
        assert client.start_processes(settings) is not process
    finally:
        client.stop_processes()


@pytest.mark.slow
def test_a_report_that_cannot_be_written_fails_no_run(settings, capfd, interrupted_when):
    run = write_run(1)
    (Path(run.folder) / "report").mkdir(exist_ok=True)
    (Path(run.folder) / "report" / "report.html").mkdir()  # Where the page is to be.
    imports = []

    def half_a_second_has_gone():
        imports.extend(_stage_processes())
        return len(imports) > 5

    try:
        with interrupted_when(half_a_second_has_gone), pytest.raises(Interrupted):
            client.write_report(settings, run)
        client.write_report(settings, run)
    finally:
        client.stop_processes()
    told = capfd.readouterr().err
    assert "the report could not be written: " in told
    assert f"; `stratagem report {run.run_id}` tries again\n" in told
