"""Uses of private interfaces of dependencies, and workarounds for their faults.

Each function says what the dependency does, what breaks without the function, and the issue if one is known; some name
the test that fails without them. All were tried with the versions in TRIED. Imports are inside the functions: this
module loads no framework.
"""

import contextlib
import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

TRIED = {
    "keras": "3.15",
    "tensorflow": "2.21",
    "tensorflow-datasets": "4.9.10",
    "jax": "0.10",
    "mlflow": "3.17",
}


# Python's imports.


@contextlib.contextmanager
def importing_without(*packages: str) -> Iterator[None]:
    """Make imports of these packages fail within the block, unless they are already imported.

    A stage process takes 5.3 s of processor time to start. Keras imports scikit-learn, and with it SciPy's statistics,
    for wrappers that this project does not use (0.4 s), and Matplotlib's pyplot for galleries that it does not draw
    (0.3 s). TensorFlow imports JAX for a converter (0.5 s). No issue known. Red without it: test_serve.py.
    """
    left_out = [name for name in packages if name not in sys.modules]
    sys.modules |= dict.fromkeys(left_out)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in left_out:
            del sys.modules[name]


# Keras.


def data_adapter() -> Any:
    """Return the base class of the data sources of ``Model.fit``, for which Keras has no public name.

    Without it, Keras would take an epoch's length from the dataset, where a distributed dataset counts each step once
    per replica; or it would find the end of the data with a step that has already advanced Dropout's seeds. No issue
    known.
    """
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    return DataAdapter


def iterate_in_calls(model: Any, receive: Callable[[Any], None]) -> None:
    """Make a model's ``fit`` pass each iterator to ``receive`` instead of building the model from a first batch.

    Under tf.distribute, Keras averages the first batch over all replicas to learn its shape, and fails: keras#20585.
    The model is already built, and only here does Keras expose the iterator before it reads from it. Red without it:
    test_loops.py, and `fit` in test_parity.py.
    """
    name = "_maybe_symbolic_build" if hasattr(model, "_maybe_symbolic_build") else "_symbolic_build"  # On JAX.
    setattr(model, name, lambda iterator=None, **_: receive(iterator))


def set_calls(iterator: Any, calls: Callable[[], Iterator[tuple[int, int, Any]]]) -> None:
    """Make an iterator of ``Model.fit`` use these calls for an epoch: (first step, last step, source).

    Keras' own calls each run ``steps_per_execution`` steps, and the last call of an epoch reads beyond the end. On JAX,
    Keras determines the layout of a batch once per epoch, and fails if the last batch is not divisible: keras#21167.
    Red without it: test_loops.py, test_jax.py.
    """
    iterator._enumerate_iterator = calls


def keeping_state(model: Any, function: Callable[[Any, Any], Any], trains: bool) -> Callable[[Any], Any]:
    """Return a function of an iterator that keeps the state for ``function`` and returns the metrics' values.

    Between the calls the model has the state, as in ``Model.fit`` on JAX, and ``model.jax_state_sync()`` copies it into
    the variables, where callbacks read it. Keras has no public way to do that in another loop. No issue known. Red
    without it: test_jax.py.
    """
    groups = {f"{name}_variables": True for name in ("trainable", "non_trainable", *["optimizer"] * trains, "metrics")}
    model._jax_state_synced, state = True, ()

    def call(iterator: Any) -> Any:
        nonlocal state
        if model._jax_state_synced:
            state = model._get_jax_state(**groups)
        logs, state = function(state, iterator)
        model._jax_state, model._jax_state_synced = dict(zip(groups, state, strict=True)), False
        return logs

    return call


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a model and of its nested layers, without the model itself. ``Model.layers`` omits the
    layers inside user-defined layers, such as a normalisation. No issue known."""
    found: list[Any] = model._flatten_layers(include_self=False)
    return found


def reset_names() -> None:
    """Make Keras number the names of layers and variables from the beginning again.

    Keras continues to number from model to model: the next model's `dense/kernel` would be `dense_1/kernel`, but a
    variable must have the same path in every model. The public clear_session resets much more. No issue known.
    """
    from keras.src.utils import naming

    naming.reset_uids()


def bytes_of_variables(model_config: dict[str, Any]) -> int:
    """Return the size of a saved model's variables without creating them: an archive of a kilobyte may ask for
    terabytes. The last line prevents Keras from creating the deferred variables in the next stateless scope. No issue
    known."""
    import math

    import keras
    from keras.src.backend.common import global_state

    with keras.StatelessScope(initialize_variables=False):
        model = keras.saving.deserialize_keras_object({**model_config, "compile_config": None}, safe_mode=True)
    bits = {one.dtype: int((re.findall(r"\d+", one.dtype) or ["8"])[0]) for one in model.variables}  # float32: 32.
    size: int = sum(math.prod(one.shape) * bits[one.dtype] // 8 for one in model.variables)
    global_state.set_global_attribute("uninitialized_variables", [])
    return size


def rate_of(optimizer: Any) -> Any:
    """Return an optimizer's learning rate as it was given: a variable or a schedule. The public attribute of a schedule
    is only the rate of the next step, so a resume would overwrite the schedule. No issue known."""
    return optimizer._learning_rate


def steps_of(optimizer: Any) -> Any:
    """Return the variable in which an optimizer counts its steps. The public attribute is a tensor that counts
    accumulated steps as one; without the variable, a schedule cannot be set back. No issue known."""
    return optimizer._iterations


def moments_of(adam: Any, variable: Any) -> tuple[Any, Any]:
    """Return the variables of Adam's two moments for a variable; they have no public name. Without them, its step on
    TensorFlow cannot be one operation. No issue known."""
    index = adam._get_variable_index(variable)
    return adam._momentums[index], adam._velocities[index]


def export_as(own: type, keras_own: type) -> None:
    """Make an exported model name a Keras class instead of one of ours.

    Keras writes the module of a foreign class, so the model could only be loaded where this project is installed.
    Keras' public registration would be necessary wherever the model is loaded. No issue known.
    """
    from keras.src import api_export

    api_export.REGISTERED_OBJS_TO_NAMES[own] = api_export.get_name_from_symbol(keras_own)


def forget_compilation(model: Any) -> None:
    """Remove the arguments of ``compile`` from a model before its export.

    They may name a loss of ours, and then the model could only be loaded where this project is installed; `model.save`
    has no option for it. No issue known. Red without it: test_train.py.
    """
    del model._compile_config


def leave_tensorflow_alone() -> None:
    """Make Keras on JAX behave as if TensorFlow were not installed.

    Otherwise Keras imports TensorFlow when it sets seeds and when it saves a model, which takes 5 s without a benefit.
    keras#18455, closed without a change.
    """
    from keras.src.utils import module_utils

    module_utils.tensorflow._available = False


# JAX.


def let_gloo_listen_at(host: str) -> None:
    """Make Gloo, which sums over processes on CPUs, listen on this address of the machine.

    By default JAX makes Gloo look up the machine's name, which resolves to 127.0.1.1 on Debian and to nothing in an
    isolated network; JAX has no option for it. Call this before JAX uses a device. No issue known. Red without it:
    test_processes_on_jax.py.
    """
    from jax._src.lib import _jax

    _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname=host)


# TensorFlow.


def set_heartbeat_timeout(tasks: list[tuple[str, int]], seconds: float) -> None:
    """Configure the coordination of a cluster's tasks, (job, index), as MultiWorkerMirroredStrategy does, but with this
    timeout.

    The strategy has no option for it, and its default of 10 seconds ends a training if a member is busy for longer. No
    issue known.
    """
    from tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2 import CoordinatedJob
    from tensorflow.python.eager import context

    counts = Counter(job for job, _ in tasks)
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{tasks[0][0]}/replica:0/task:0",
        coordinated_jobs=[CoordinatedJob(name=job, num_tasks=count) for job, count in counts.items()],
        heartbeat_timeout_in_ms=int(seconds * 1000),
    )


def reduction_of(strategy: Any) -> str:
    """Return the name of the class that sums a MirroredStrategy's gradients, "none" for other strategies. TensorFlow's
    choice has no public name; without it, records and logs would only show the setting. No issue known."""
    operations = getattr(strategy.extended, "_cross_device_ops", None)
    return "none" if operations is None else type(operations).__name__


def bytes_of_file(path: str, size: int) -> Any:
    """Return a file's bytes as a tensor (size,) of uint8 whose memory is the mapped file. Call this in a graph.

    While TensorFlow prepares a graph, it folds operations without inputs into constants: it would read the whole file
    into new memory, and discard the result above 10 MB. It does not fold operations with the attribute of a shared
    allocator, which is empty here. No issue known. Red without it:
    test_an_array_larger_than_the_memory_is_read_as_it_lies in test_input.py.
    """
    import tensorflow as tf
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

    content = tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=[size], memory_region_name=path)
    content.op._set_attr("_scoped_allocator", AttrValue(list=AttrValue.ListValue()))
    return content


# TensorFlow Datasets.


def serialize_the_same_everywhere() -> None:
    """Make TFDS write the fields of a record in the order of their names.

    By default protobuf chooses the order, which differs between processes: equal datasets would differ in their md5,
    and every clone would change data/<name>/dvc.lock. No issue known.
    """
    from tensorflow_datasets.core.example_serializer import ExampleSerializer

    def serialize(self: Any, example: Any) -> bytes:
        return bytes(self.get_tf_example(example).SerializeToString(deterministic=True))

    ExampleSerializer.serialize_example = serialize


def before_each_fetch(builder: Any, provide: Callable[[Any], None]) -> None:
    """Call ``provide`` with the URL, or the structure of URLs, that a TFDS builder requests, before TFDS fetches it.

    TFDS does not hash the files in its cache: it silently prepares a valid archive with wrong content. Without a
    network, it tries a download 10 times, which takes 205 s. No issue known. Red without it: test_download.py.
    """

    def seen(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def provide_and_fetch(url_or_urls: Any) -> Any:
            provide(url_or_urls)
            return fetch(url_or_urls)

        return provide_and_fetch

    def make_seeing_manager(**options: Any) -> Any:
        manager = make_manager(**options)
        manager.download = seen(manager.download)
        manager.download_and_extract = seen(manager.download_and_extract)
        return manager

    make_manager, builder._make_download_manager = builder._make_download_manager, make_seeing_manager


def archive_modules() -> tuple[Any, Any, Any, Any]:
    """Return TFDS' ``checksums`` and ``resource``, which name and recognise an archive in its cache; ``tree``; and the
    error for an archive with a wrong checksum.

    None of them is public. They are needed to verify an archive before TFDS trusts it, and to use archives that the
    user provides. No issue known. Red without it: test_download.py.
    """
    from tensorflow_datasets.core.download import checksums, resource
    from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError
    from tensorflow_datasets.core.utils.lazy_imports_utils import tree

    return checksums, resource, tree, NonMatchingChecksumError


# MLflow.


@contextlib.contextmanager
def without_a_look_at_packages() -> Iterator[None]:
    """Make MLflow save a model without comparing its requirements with the installed packages, from which they come.

    For the comparison, MLflow reads the file lists of all installed packages: 0.8 s. It has an option against it only
    for loading. No issue known. Red without it: test_register.py.
    """
    from mlflow.utils import environment

    check = environment.warn_dependency_requirement_mismatches
    environment.warn_dependency_requirement_mismatches = lambda *requirements, **options: None
    try:
        yield
    finally:
        environment.warn_dependency_requirement_mismatches = check
