"""parameter_server in half precision. One worker does the steps one after the other, so it is near one device."""

import json

import keras
import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.exhaustive
def test_mixed_precision_is_that_of_one_device(digits, train, run):
    options = ("train.dtype_policy=mixed_bfloat16", "optimizer={kind: sgd, momentum: 0.9}", "train.epochs=2")
    expected = train(digits, *options)
    cluster = ("strategy.kind=parameter_server", "strategy.workers=1", "train.loop=custom")
    chosen = [part for option in options + cluster for part in ("--set", option)]
    done = run(["stratagem", "train", "../small.yaml", "--json", *chosen], env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["strategy"] == "parameter_server"
    for name, values in expected.history.items():
        assert np.isfinite(found["history"][name]).all()
        assert found["history"][name] == pytest.approx(values, abs=0.03), name
    assert found["history"]["train/loss"][1] < found["history"]["train/loss"][0]
    model = keras.models.load_model(found["final_model"])
    assert model.get_layer("mlp").get_layer("dense1").compute_dtype == "bfloat16"
    assert {weight.dtype for weight in model.weights} == {"float32"}
