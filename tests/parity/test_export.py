import json
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tasks import config
from tasks.modeling import models
from tasks.training import model_state
from tasks.training.checkpoints import Checkpoints

IN_SCOPE = """
import json
import keras, numpy as np, tensorflow as tf
from tasks import config, strategies
strategy = strategies.build(config.Mirrored(kind="mirrored", devices=2))
images = np.load("images.npy")
found = {}
for name in ("final", "best"):
    with strategy.scope():
        model = keras.models.load_model(f"mlruns/runs/first/models/{name}.keras")
    found[name] = model.predict(images, verbose=0).tolist()
    found[name + " devices"] = sorted({copy.device[-5:] for v in model.weights for copy in v.value.values})
print(json.dumps(found))
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_exported_models_predict_as_their_checkpoints_with_and_without_a_scope(tiny, train, run):
    # A learning rate that ruins what the first epoch learned: the best is not the final one.
    overrides = (
        "model.name=convnet2", "model.options={dropout: 0.4, padding: same}",
        "schedule={kind: piecewise, boundaries_epochs: [1], learning_rates: [0.003, 10]}",
        "checkpoint.monitor=validation/loss",
    )  # fmt: skip
    result = train(tiny, *overrides)
    settings = config.load("../small.yaml", overrides)
    images = np.load(tiny.splits["test"].features["image"])
    np.save("images.npy", images)

    expected = {}
    for name, checkpoint in (("final", result.checkpoint), ("best", result.best_checkpoint)):
        with Checkpoints(Path(result.checkpoints)) as saved:
            arrays, _ = saved.restore(int(Path(checkpoint).name))
        model = models.build(settings.model, tiny, settings.input.normalization)
        model_state.assign(model, arrays, ("model",))
        expected[name] = model.predict(images, verbose=0)
    assert result.checkpoint != result.best_checkpoint
    assert np.abs(expected["final"] - expected["best"]).max() > 1

    for name, path in (("final", result.final_model), ("best", result.best_model)):
        loaded = keras.models.load_model(path)  # Safe mode is Keras' default.
        assert loaded.input.dtype == "uint8"
        np.testing.assert_allclose(loaded.predict(images, verbose=0), expected[name], rtol=1e-5, atol=1e-6)

    done = run([sys.executable, "-c", IN_SCOPE])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("final", "best"):
        assert found[f"{name} devices"] == ["CPU:0", "CPU:1"], "each replica holds a copy"
        np.testing.assert_allclose(np.array(found[name], "float32"), expected[name], rtol=1e-4, atol=1e-4)
