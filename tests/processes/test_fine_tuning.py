"""What is frozen keeps its bits under every strategy, in both phases' processes."""

import json

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.slow

HOW = {
    "mirrored": ("strategy={kind: mirrored, devices: 2}", "train.loop=custom"),
    "multi_worker": ("strategy={kind: multi_worker, workers: 2}",),
    "parameter_server": ("strategy={kind: parameter_server, workers: 1}", "train.loop=custom"),
    "data_parallel": ("strategy={kind: data_parallel, devices: 2}",),
}
VGG = ("model={name: vgg, options: {filters: [4, 4]}}", "train.global_batch_size=64", "checkpoint.every_steps=null")


def weights_of(project, file):
    model = keras.saving.load_model(project / file, compile=False)
    return {one.path: keras.ops.convert_to_numpy(one) for one in model.weights}


def done(command):
    assert command.end() == 0, command.err.read_text()
    return json.loads(command.out.read_text())


# Of TensorFlow's with replicas in one process and in several, and of JAX, one is frozen as the others are.
@pytest.mark.parametrize("how", HOW)
@pytest.mark.exhaustive
def test_what_is_frozen_keeps_its_bits_until_it_is_thawed(stratagem, cluster_project, how):
    start = done(stratagem("train", *VGG, "train.epochs=1"))
    initial = f"model.initial={start['run_id']}"
    freeze = "model.freeze=[conv.*, norm.*]"
    frozen = done(stratagem("train", *VGG, *HOW[how], initial, freeze, "train.epochs=2"))
    before = weights_of(cluster_project, start["best_model"])
    after = weights_of(cluster_project, frozen["final_model"])
    assert len(after) == 22
    changed = {path for path in after if not np.array_equal(before[path], after[path])}
    assert changed == {"logits/kernel", "logits/bias"}
    thawed = stratagem("train", *VGG, *HOW[how], initial, freeze, "train.epochs=3", "train.frozen_epochs=2")
    result = done(thawed)
    assert "thawed    conv.*, norm.*" in thawed.err.read_text()
    assert (result["epochs"], len(result["history"]["train/loss"])) == (3, 3)
    rates = result["history"]["train/learning_rate"]
    assert rates == pytest.approx([0.01, 0.01, 0.001])
    after = weights_of(cluster_project, result["final_model"])
    assert not any(np.array_equal(before[path], after[path]) for path in after if not path.endswith("bias"))
