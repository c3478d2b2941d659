"""Each fault of a dependency that tasks/upstream.py works around is still there: a test that fails here says that the
function is no longer needed."""

import ast
import inspect
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from tasks import upstream

FUNCTIONS = {
    name: function
    for name, function in vars(upstream).items()
    if inspect.isfunction(function) and function.__module__ == upstream.__name__ and not name.startswith("_")
}
PRIVATE = re.compile(r"keras\.src|tensorflow\.(python|compiler)|tensorflow_datasets\.core")


@pytest.mark.parametrize("package", upstream.TRIED)
def test_the_versions_are_those_that_were_tried(package):
    tried = upstream.TRIED[package]
    assert f"{version(package)}.".startswith(f"{tried}."), f"try every function of upstream.py, then raise {tried}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_names_its_issue_and_the_test_that_is_red_without_it(name):
    meaning = inspect.getdoc(FUNCTIONS[name])
    assert re.search(r"keras#\d+|No\s+issue\s+known", meaning)
    here = f"upstream.{name}" in Path(__file__).read_text()
    named = re.findall(r"test_\w+\.py", meaning)
    assert here or named
    tests = Path(__file__).parent.parent
    assert all(list(tests.rglob(file)) for file in named)


def test_keras_numbers_names_on():
    upstream.reset_names()
    assert [keras.layers.Dense(1).name for _ in range(2)] == ["dense", "dense_1"]
    upstream.reset_names()
    assert keras.layers.Dense(1).name == "dense"


def test_keras_has_no_public_class_of_what_fit_reads():
    assert not [name for name in dir(keras.utils) if "Adapter" in name]
    assert upstream.data_adapter().__name__ == "DataAdapter"


def test_layers_of_a_layer_are_not_among_those_of_the_model():
    class Own(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inside = keras.layers.BatchNormalization()

        def call(self, x):
            return self.inside(x)

    model = keras.Sequential([keras.Input((2,)), Own()])
    assert not any(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers)
    assert any(isinstance(layer, keras.layers.BatchNormalization) for layer in upstream.layers_of(model))


def test_an_optimizer_shows_neither_its_schedule_nor_its_count_of_steps():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=2)
    assert not isinstance(optimizer.learning_rate, keras.optimizers.schedules.LearningRateSchedule)
    assert upstream.rate_of(optimizer) is schedule
    assert not isinstance(optimizer.iterations, keras.Variable)
    assert isinstance(upstream.steps_of(optimizer), keras.Variable)


def test_keras_adam_is_a_dozen_operations():
    variable, adam = keras.Variable(np.zeros(3, "float32")), keras.optimizers.Adam()
    adam.build([variable])

    @tf.function
    def step():
        adam.apply([tf.ones(3)])

    kinds = [operation.type for operation in step.get_concrete_function().graph.get_operations()]
    assert "ResourceApplyAdam" not in kinds
    assert [moment.path.rpartition("_")[2] for moment in upstream.moments_of(adam, variable)] == [
        "momentum",
        "velocity",
    ]


def test_keras_exports_a_class_of_ours_under_its_own_name(tmp_path):
    class Own(keras.optimizers.SGD):
        pass

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(Own(), "mse")
    model.save(tmp_path / "own.keras")
    with pytest.raises(TypeError, match="Could not locate class 'Own'"):
        keras.models.load_model(tmp_path / "own.keras")
    upstream.export_as(Own, keras.optimizers.SGD)
    model.save(tmp_path / "own.keras")
    assert type(keras.models.load_model(tmp_path / "own.keras").optimizer) is keras.optimizers.SGD


def test_keras_sets_tensorflows_seed_whatever_its_backend_is(monkeypatch):
    from keras.src.utils import module_utils

    monkeypatch.setattr(module_utils.tensorflow, "_available", None)
    keras.utils.set_random_seed(0)
    assert module_utils.tensorflow._available, "it was asked for TensorFlow"
    upstream.leave_tensorflow_alone()
    assert not module_utils.tensorflow.available


def test_a_cluster_of_workers_takes_no_time_out():
    from tensorflow.python.distribute import collective_all_reduce_strategy

    assert "heartbeat_timeout" not in inspect.getsource(collective_all_reduce_strategy)
    assert "heartbeat_timeout" in inspect.getsource(upstream.set_heartbeat_timeout)


def test_tensorflow_does_not_tell_how_it_sums():
    strategy = tf.distribute.MirroredStrategy([tf.config.list_logical_devices("CPU")[0].name])
    assert not [name for name in dir(strategy.extended) if "cross_device" in name and not name.startswith("_")]
    assert upstream.reduction_of(strategy) == "CollectiveAllReduce"
    assert upstream.reduction_of(tf.distribute.OneDeviceStrategy("/cpu:0")) == "none"


def test_tfds_leaves_the_order_of_a_record_to_protobuf():
    from tensorflow_datasets.core.example_serializer import ExampleSerializer

    upstream.serialize_the_same_everywhere()
    own = ExampleSerializer.serialize_example.__wrapped__
    assert "deterministic" not in inspect.getsource(own)


def test_tfds_leaves_a_folder_for_each_look_into_its_bucket(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    upstream.leave_bucket_alone()
    look = tfds.core.DatasetInfo.initialize_from_bucket
    info = type("Info", (), {"full_name": "mnist/3.0.1"})()
    look(info)
    assert not list(tmp_path.iterdir())
    look.__wrapped__(info)
    assert list(tmp_path.iterdir())


@pytest.mark.slow
def test_diskcache_begins_a_transaction_again_for_ever(tmp_path):
    writes = (
        "import sys\n"
        "from diskcache import Cache\n"
        "from tasks import upstream\n"
        "upstream.end_on_a_full_disk() if sys.argv[2] == 'mended' else None\n"
        "cache, other = Cache(sys.argv[1], timeout=0.1), Cache(sys.argv[1])\n"
        "other._sql('BEGIN IMMEDIATE')\n"
        "cache.set('key', 1, retry=True)\n"
    )
    for whether, ends in (("mended", True), ("as it is", False)):
        command = [sys.executable, "-c", writes, tmp_path / whether, whether]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                said = process.communicate(timeout=60 if ends else 5)[1]
                assert ends
                assert "diskcache.core.Timeout" in said
            except subprocess.TimeoutExpired:
                process.kill()
                assert not ends


def test_what_is_not_public_is_used_in_one_room():
    """Names after an underscore, of other things than ``self``, and modules that a dependency does not promise."""
    own = {"os._exit", "entry._replace", "Entry._fields"}  # Public, in spite of the underscore.
    found = []
    for path in sorted(file for folder in ("tasks", "flows") for file in Path(folder).rglob("*.py")):
        if path.name == "upstream.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                name = ast.unparse(node)
                if name not in own and ast.unparse(node.value) not in ("self", "cls"):
                    found.append(f"{path}:{node.lineno} {name}")
            elif isinstance(node, ast.ImportFrom) and PRIVATE.match(node.module or ""):
                found.append(f"{path}:{node.lineno} {node.module}")
    assert found == []
