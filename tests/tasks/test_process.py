import os
import sys
from pathlib import Path

import pytest

from tasks import config
from tasks.strategies.environment import stage_environment


def test_a_stage_finds_its_backend_and_the_environment_it_was_installed_in(project, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    environment = stage_environment(config.load())
    assert environment["KERAS_BACKEND"] == "tensorflow"
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert environment["TF_CPP_MIN_LOG_LEVEL"] == "0", "what the user set stays"
    assert "PREFECT_API_URL" not in environment
    assert environment["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0", "a lost reply would make a second run"
    assert environment["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] == "false"


def test_only_a_launcher_says_who_is_in_a_cluster(project, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    for kind in ("one_device", "multi_worker"):
        assert "TF_CONFIG" not in stage_environment(config.load(None, [f"strategy.kind={kind}"]))


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
    (["strategy.kind=model_parallel", "strategy.mesh_shape=[2,4]", "strategy.workers=2"], {"XLA_FLAGS": f"{FORCED}=4"}),
    (["strategy.kind=data_parallel", "strategy.devices=3", "strategy.workers=2"], {"XLA_FLAGS": f"{FORCED}=3"}),
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
    environment = stage_environment(config.load(None, overrides))
    assert environment["KERAS_BACKEND"] == "jax"
    assert {name: environment.get(name) for name in found} == found


def test_what_the_user_set_for_jax_stays(project, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=somewhere")
    environment = stage_environment(config.load(None, ["strategy.kind=data_parallel", "strategy.devices=2"]))
    assert environment["JAX_PLATFORMS"] == "cuda"
    assert environment["XLA_FLAGS"] == f"--xla_dump_to=somewhere {FORCED}=2"
    assert stage_environment(config.load())["JAX_PLATFORMS"] == "cpu", "TensorFlow has the GPU there"


@pytest.mark.parametrize(("device", "hidden"), [("cpu", True), ("gpu:0", False), ("null", False)])
def test_a_run_on_the_cpu_hides_the_gpus_from_its_process(project, monkeypatch, device, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    environment = stage_environment(config.load(None, [f"strategy.device={device}"]))
    assert environment["CUDA_VISIBLE_DEVICES"] == ("" if hidden else "3")
