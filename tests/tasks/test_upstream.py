"""Each fault of a dependency that tasks/system/upstream.py works around is still there, shown by its public interface:
a failure with "no longer needed" here means that upstream has fixed it."""

import ast
import inspect
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import keras
import mlflow.pyfunc
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from mlflow.utils import requirements_utils

from tasks.system import upstream

FUNCTIONS = {
    name: function
    for name, function in vars(upstream).items()
    if inspect.isfunction(function) and function.__module__ == upstream.__name__ and not name.startswith("_")
}
# What a process of its own says of Keras on TensorFlow, or on JAX, as it comes.
IMPORTS = "import keras, sys\nprint(*sorted({'sklearn', 'matplotlib', 'jax'} & sys.modules.keys()))"
UNEVEN = """
import keras, numpy as np, tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
with tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensors((np.ones((3, 2), "float32"), np.ones((3, 1), "float32")))
try:
    model.fit(data, verbose=0)
except tf.errors.InvalidArgumentError as error:
    print("AddN" in str(error))
"""
LAST_BATCH = """
import jax, keras, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
try:
    model.fit(np.ones((5, 2), "float32"), np.ones((5, 1), "float32"), batch_size=4, verbose=0)
except ValueError as error:
    print("is partitioned 2 times, but the dimension size is 1" in str(error))
"""
STATE = """
import keras
print([name for name in dir(keras.Model) if "state" in name and "stateless" not in name and name[0] != "_"])
"""
# Modules that a dependency does not promise, in whatever way they are named.
PRIVATE = re.compile(
    r"keras\.src|tensorflow\.(core|python|compiler)|tensorflow_datasets\.core|jaxlib|mlflow\.utils|(\w+\.)+_[a-z]"
)


def assert_needed(name, is_still_so):
    assert is_still_so, f"no longer needed: upstream.{name}. Take it out, and do it the public way"


def said_by(program, backend="tensorflow"):
    """What a program says in a process of its own, whose frameworks are as they come."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("package", upstream.TRIED)
def test_the_versions_are_those_that_were_tried(package):
    tried = upstream.TRIED[package]
    assert f"{version(package)}.".startswith(f"{tried}."), f"try every function of upstream.py, then raise {tried}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_names_its_issue_and_has_a_test_that_says_when_it_is_mended(name):
    meaning = inspect.getdoc(FUNCTIONS[name])
    assert re.search(r"keras#\d+|No\s+issue\s+known", meaning)
    assert f'assert_needed("{name}", ' in Path(__file__).read_text()
    named = re.findall(r"test_\w+\.py", meaning)
    tests = Path(__file__).parent.parent
    assert all(list(tests.rglob(file)) for file in named)


@pytest.mark.exhaustive
def test_keras_and_tensorflow_import_what_nobody_uses_here():
    assert_needed("importing_without", said_by(IMPORTS) == "jax matplotlib sklearn")


def test_keras_numbers_names_on():
    upstream.reset_names()
    assert_needed("reset_names", [keras.layers.Dense(1).name for _ in range(2)] == ["dense", "dense_1"])
    upstream.reset_names()
    assert keras.layers.Dense(1).name == "dense"


def test_keras_has_no_public_class_of_what_fit_reads():
    public = [*dir(keras), *dir(keras.utils)]
    assert_needed("data_adapter", not [name for name in public if "Adapter" in name])
    assert upstream.data_adapter().__name__ == "DataAdapter"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_keras_fails_at_a_first_batch_that_replicas_do_not_share_evenly():
    assert_needed("iterate_in_calls", said_by(UNEVEN) == "True")


def test_keras_reads_on_after_the_last_step_of_an_epoch():
    data = tf.data.Dataset.from_tensors((np.ones((2, 2), "float32"), np.ones((2, 1), "float32"))).repeat()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=2)
    model.fit(data, steps_per_epoch=3, shuffle=False, verbose=0)
    assert_needed("set_calls", int(model.optimizer.iterations) == 4)


def test_layers_of_a_layer_are_not_among_those_of_the_model():
    class Own(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inside = keras.layers.BatchNormalization()

        def call(self, x):
            return self.inside(x)

    model = keras.Sequential([keras.Input((2,)), Own()])
    public = any(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers)
    assert_needed("layers_of", not public)
    assert any(isinstance(layer, keras.layers.BatchNormalization) for layer in upstream.layers_of(model))


def test_an_optimizer_shows_neither_its_schedule_nor_its_count_of_steps():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=2)
    assert_needed("rate_of", optimizer.learning_rate is not schedule)
    assert upstream.rate_of(optimizer) is schedule
    assert_needed("steps_of", not isinstance(optimizer.iterations, keras.Variable))
    assert isinstance(upstream.steps_of(optimizer), keras.Variable)


def test_keras_adam_is_a_dozen_operations():
    variable, adam = keras.Variable(np.zeros(3, "float32")), keras.optimizers.Adam()
    adam.build([variable])

    @tf.function
    def step():
        adam.apply([tf.ones(3)])

    kinds = [operation.type for operation in step.get_concrete_function().graph.get_operations()]
    assert_needed("moments_of", "ResourceApplyAdam" not in kinds)
    assert [moment.path.rpartition("_")[2] for moment in upstream.moments_of(adam, variable)] == [
        "momentum",
        "velocity",
    ]


def is_refused(file, why):
    try:
        keras.models.load_model(file)
    except TypeError as error:
        return why in str(error)
    return False


def test_keras_exports_a_class_of_ours_under_its_own_name(tmp_path):
    class Own(keras.optimizers.SGD):
        pass

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(Own(), "mse")
    model.save(tmp_path / "own.keras")
    assert_needed("export_as", is_refused(tmp_path / "own.keras", "Could not locate class 'Own'"))
    upstream.export_as(Own, keras.optimizers.SGD)
    model.save(tmp_path / "own.keras")
    assert type(keras.models.load_model(tmp_path / "own.keras").optimizer) is keras.optimizers.SGD


def test_keras_exports_the_loss_that_a_model_was_compiled_with(tmp_path):
    class OwnLoss(keras.losses.MeanSquaredError):
        pass

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", OwnLoss())
    model.save(tmp_path / "own.keras")
    assert_needed("forget_compilation", is_refused(tmp_path / "own.keras", "Could not locate class 'OwnLoss'"))
    upstream.forget_compilation(model)
    model.save(tmp_path / "own.keras")
    assert keras.models.load_model(tmp_path / "own.keras").count_params() == 3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_keras_on_jax_fails_at_a_last_batch_that_does_not_divide():
    assert_needed("set_calls", said_by(LAST_BATCH, "jax") == "True")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_keras_on_jax_can_only_be_asked_to_put_a_state_back():
    assert_needed("keeping_state", said_by(STATE, "jax") == "['get_state_tree', 'jax_state_sync', 'set_state_tree']")


def test_jax_has_no_option_for_the_address_of_gloo():
    import jax

    options = [name for name in dir(jax.config) if "gloo" in name or "collectives" in name]
    assert_needed("let_gloo_listen_at", options == ["jax_cpu_collectives_implementation"])


def test_jax_has_no_class_for_a_lost_peer():
    import jax

    public = [name for name in dir(jax.errors) if re.search("Peer|Gloo|Collective|Lost|Distributed", name)]
    assert_needed("is_lost_peer", not public)


def test_keras_sets_tensorflows_seed_whatever_its_backend_is(monkeypatch):
    from keras.src.utils import module_utils

    monkeypatch.setattr(module_utils.tensorflow, "_available", None)
    keras.utils.set_random_seed(0)
    assert_needed("leave_tensorflow_alone", module_utils.tensorflow._available)  # It was asked for TensorFlow.
    upstream.leave_tensorflow_alone()
    assert not module_utils.tensorflow.available


def test_a_cluster_of_workers_takes_no_time_out():
    from tensorflow.python.distribute import collective_all_reduce_strategy

    source = inspect.getsource(collective_all_reduce_strategy)
    assert_needed("set_heartbeat_timeout", "heartbeat_timeout" not in source)
    assert "heartbeat_timeout" in inspect.getsource(upstream.set_heartbeat_timeout)


def test_tensorflow_does_not_tell_how_it_sums():
    strategy = tf.distribute.MirroredStrategy([tf.config.list_logical_devices("CPU")[0].name])
    public = [name for name in dir(strategy.extended) if "cross_device" in name and not name.startswith("_")]
    assert_needed("reduction_of", not public)
    assert upstream.reduction_of(strategy) == "CollectiveAllReduce"
    assert upstream.reduction_of(tf.distribute.OneDeviceStrategy("/cpu:0")) == "none"


def resident_bytes(which):
    (kilobytes,) = re.findall(rf"{which}:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def test_tensorflow_reads_a_whole_file_into_new_memory(tmp_path):
    path, size = str(tmp_path / "holes"), 64_000_000
    Path(path).touch()
    os.truncate(path, size)

    def plainly(path, size):
        return tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=[size], memory_region_name=path)

    def growth(read):
        @tf.function(autograph=False)
        def row(number):
            return read(path, size)[128:][number]

        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # The kernel forgets what there was at most.
        assert row(tf.constant(3)) == 0
        return resident_bytes("VmHWM") - before

    assert growth(upstream.bytes_of_file) < size / 4
    assert_needed("bytes_of_file", growth(plainly) > size / 2)


def test_tfds_leaves_the_order_of_a_record_to_protobuf():
    from tensorflow_datasets.core.example_serializer import ExampleSerializer

    upstream.serialize_the_same_everywhere()
    own = ExampleSerializer.serialize_example.__wrapped__
    assert_needed("serialize_the_same_everywhere", "deterministic" not in inspect.getsource(own))


def test_tfds_trusts_an_archive_in_its_cache(tmp_path):
    """Its public manager returns an archive of another content than the registered one; its names are not public."""
    checksums, resource, _, mismatch = upstream.archive_modules()
    url, right = "http://127.0.0.1:1/archive.gz", checksums.UrlInfo(3, "0" * 64, "archive.gz")
    cached = tmp_path / resource.get_dl_fname(url, right.checksum)
    cached.write_bytes(b"wrong")
    resource.write_info_file(url, cached, "digits", "archive.gz", right)
    manager = tfds.download.DownloadManager(download_dir=tmp_path, url_infos={url: right})
    try:
        returned = Path(manager.download(url)).read_bytes()
    except mismatch:
        returned = b""
    assert_needed("before_each_fetch", returned == b"wrong")
    names = {"get_dl_fname", "get_info_path", "UrlInfo", "compute_url_info", mismatch.__name__}
    assert_needed("archive_modules", not names & set(dir(tfds.download)))


@pytest.mark.slow
def test_diskcache_begins_a_transaction_again_for_ever(tmp_path):
    writes = (
        "import sys\n"
        "from diskcache import Cache\n"
        "from tasks.system import upstream\n"
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
                assert_needed("end_on_a_full_disk", ends)
                assert "diskcache.core.Timeout" in said
            except subprocess.TimeoutExpired:
                process.kill()
                assert not ends


def test_mlflow_looks_at_all_packages_when_it_saves_a_model(tmp_path, monkeypatch):
    def saved(name):
        monkeypatch.setattr(requirements_utils, "_MODULES_TO_PACKAGES", None)
        mlflow.pyfunc.save_model(
            tmp_path / name, loader_module="tasks.tracking.trained_models", pip_requirements=["numpy"]
        )
        return requirements_utils._MODULES_TO_PACKAGES is not None

    assert_needed("without_a_look_at_packages", saved("plainly"))
    with upstream.without_a_look_at_packages():
        assert not saved("mended")


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
            elif isinstance(node, ast.ImportFrom | ast.Import):
                module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                names = [f"{module}{one.name}" for one in node.names]
                found += [
                    f"{path}:{node.lineno} {name}"
                    for name in names
                    if PRIVATE.match(name) and not name.startswith(("tasks.", "flows."))
                ]
    assert found == []
