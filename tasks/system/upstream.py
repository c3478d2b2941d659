"""What this project leans on that its dependencies do not promise, and faults of theirs that it works around.

Each function says what upstream does, what breaks without it, and the issue where one is known; some name the test that
is red without them. All were tried with the versions of TRIED. Nothing is imported before it is needed: a process
without a framework stays so.
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
    """Let imports of these packages fail within the block, unless they are there already.

    Keras imports scikit-learn for wrappers that nobody uses here, and with it SciPy's statistics: 0.4 s of the 5.3 s of
    processor time that a stage process takes to start; and Matplotlib's pyplot for galleries that nobody draws: 0.3 s.
    TensorFlow imports JAX for a converter: 0.5 s. No issue known.
    Red without it: test_serve.py.
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
    """Return the class of what ``Model.fit`` reads; Keras asks for subclasses of it, and has no public name for it.

    Without it an epoch's length would be asked of the dataset, and a distributed one counts a step once for each
    replica; or found at the end of the data, by a step that has already advanced Dropout's seeds. No issue known.
    """
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    return DataAdapter


def iterate_in_calls(model: Any, receive: Callable[[Any], None]) -> None:
    """Let a model's ``fit`` hand each of its iterators to ``receive`` instead of building the model from a first batch.

    Under tf.distribute Keras averages the first batch over all replicas to learn its shape, and fails: keras#20585.
    The model is built already, and this is the only place where Keras shows the iterator before it reads it. Red
    without it: test_loops.py, and `fit` in test_parity.py.
    """
    name = "_maybe_symbolic_build" if hasattr(model, "_maybe_symbolic_build") else "_symbolic_build"  # On JAX.
    setattr(model, name, lambda iterator=None, **_: receive(iterator))


def set_calls(iterator: Any, calls: Callable[[], Iterator[tuple[int, int, Any]]]) -> None:
    """Let an iterator of ``Model.fit`` go through an epoch by (first step, last step, source).

    Its own calls do ``steps_per_execution`` steps each, and the last one of an epoch reads beyond the end. On JAX it
    asks the distribution once an epoch how to lay out a batch, and fails at a last one that does not divide:
    keras#21167. Red without it: test_loops.py, test_jax.py.
    """
    iterator._enumerate_iterator = calls


def keeping_state(model: Any, function: Callable[[Any, Any], Any], trains: bool) -> Callable[[Any], Any]:
    """Return a function of (state, iterator) as one of the iterator, which returns the metrics' values.

    Between the calls the model keeps the state as in ``Model.fit`` on JAX, so that callbacks find it in the variables,
    and ``model.jax_state_sync()`` puts it there. Keras has no public way to do that in another loop. No issue known.
    Red without it: test_jax.py.
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
    """Return the layers of a model and of what it contains, without the model; ``Model.layers`` does not look into
    layers of the user's own. Without it a normalisation in one of them is not found. No issue known."""
    found: list[Any] = model._flatten_layers(include_self=False)
    return found


def reset_names() -> None:
    """Let Keras number the names of layers and variables from the beginning again.

    It numbers on from model to model: the next one's `dense/kernel` would be `dense_1/kernel`, and a variable's path
    must be the same in each. The public clear_session forgets much more. No issue known.
    """
    from keras.src.utils import naming

    naming.reset_uids()


def bytes_of_variables(model_config: dict[str, Any]) -> int:
    """Return how many bytes the variables of a saved model would take, without making them: an archive of a kilobyte
    may ask for terabytes. Keras makes what a stateless scope has put off in the next such scope. No issue known.
    """
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
    """Return an optimizer's learning rate as it was given: a variable, or a schedule, of which the public attribute
    shows the next step's rate alone. Without it a resume would overwrite a schedule. No issue known."""
    return optimizer._learning_rate


def steps_of(optimizer: Any) -> Any:
    """Return the variable in which an optimizer counts its steps; the public attribute is a tensor, and counts
    accumulated steps as one. Without it a schedule cannot be set back. No issue known."""
    return optimizer._iterations


def moments_of(adam: Any, variable: Any) -> tuple[Any, Any]:
    """Return Adam's variables of the two moments of a variable; there is no public way to them. Without them its step
    on TensorFlow cannot be one operation. No issue known."""
    index = adam._get_variable_index(variable)
    return adam._momentums[index], adam._velocities[index]


def export_as(own: type, keras_own: type) -> None:
    """Let an exported model name a class of Keras' in the place of one of ours.

    Keras writes the module of a class that is not its own, and the model could not be loaded where this project is not
    installed. Registering a class publicly needs the registration wherever it is loaded. No issue known.
    """
    from keras.src import api_export

    api_export.REGISTERED_OBJS_TO_NAMES[own] = api_export.get_name_from_symbol(keras_own)


def forget_compilation(model: Any) -> None:
    """Let an exported model not say what it was compiled with.

    It would name a loss of ours, and could not be loaded where this project is not installed; `model.save` has no
    option for it. No issue known. Red without it: test_train.py.
    """
    del model._compile_config


def leave_tensorflow_alone() -> None:
    """Let Keras on JAX take TensorFlow for not installed.

    It imports it wherever it is installed, when it sets seeds and when it saves a model: 5 s for nothing. keras#18455,
    which was closed with no change.
    """
    from keras.src.utils import module_utils

    module_utils.tensorflow._available = False


# JAX.


def let_gloo_listen_at(host: str) -> None:
    """Let the sums over processes on CPUs go through this host's address of this machine.

    JAX lets Gloo look up the machine's name, which on Debian is 127.0.1.1, and in a network of its own nothing at all;
    it has no option for another one. To be called before JAX uses a device. No issue known. Red without it:
    test_processes_on_jax.py.
    """
    from jax._src.lib import _jax

    _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname=host)


# TensorFlow.


def set_heartbeat_timeout(tasks: list[tuple[str, int]], seconds: float) -> None:
    """Configure the coordination of a cluster's tasks, (job, index), as MultiWorkerMirroredStrategy would, with a
    time-out of our own.

    The strategy takes none, and the default of 10 seconds ends a training whose member is busy with something else for
    longer. No issue known.
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
    """Return the name of what sums a MirroredStrategy's gradients, "none" for a strategy that has no such thing;
    TensorFlow has no public name for what it chose. Without it records and logs would say what was asked for. No issue
    known."""
    operations = getattr(strategy.extended, "_cross_device_ops", None)
    return "none" if operations is None else type(operations).__name__


def bytes_of_file(path: str, size: int) -> Any:
    """Return a file's bytes as a tensor (size,) of uint8 whose memory is the file itself; to be called in a graph.

    TensorFlow folds what depends on no input into a constant, while it gets a graph ready: it would read the whole file
    into new memory, and throw that away where it is more than 10 MB. It leaves alone what an allocator shared between
    operations serves; the attribute here is of such ones, and names none. No issue known.
    Red without it: test_an_array_larger_than_the_memory_is_read_as_it_lies in test_input.py.
    """
    import tensorflow as tf
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

    content = tf.raw_ops.ImmutableConst(dtype=tf.uint8, shape=[size], memory_region_name=path)
    content.op._set_attr("_scoped_allocator", AttrValue(list=AttrValue.ListValue()))
    return content


# TensorFlow Datasets.


def serialize_the_same_everywhere() -> None:
    """Let TFDS write the fields of a record in the order of their names.

    It leaves the order to protobuf, where it differs from process to process: equal datasets would differ in their
    md5, and every clone would change data/<name>/dvc.lock. No issue known.
    """
    from tensorflow_datasets.core.example_serializer import ExampleSerializer

    def serialize(self: Any, example: Any) -> bytes:
        return bytes(self.get_tf_example(example).SerializeToString(deterministic=True))

    ExampleSerializer.serialize_example = serialize


def before_each_fetch(builder: Any, provide: Callable[[Any], None]) -> None:
    """Let ``provide`` see what a TFDS builder asks for, a URL or a structure of them, before TFDS fetches it.

    TFDS does not hash what lies in its cache: a valid archive with wrong content is prepared silently. And it asks for
    what is missing 10 times, 205 s, where there is no network. No issue known. Red without it: test_download.py.
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
    """Return TFDS' ``checksums`` and ``resource``, by which an archive is named and known in its cache; ``tree``; and
    the error of one that is not what it must be.

    None of them is public. Without them no archive can be verified before TFDS trusts it, or be brought by hand. No
    issue known. Red without it: test_download.py.
    """
    from tensorflow_datasets.core.download import checksums, resource
    from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError
    from tensorflow_datasets.core.utils.lazy_imports_utils import tree

    return checksums, resource, tree, NonMatchingChecksumError


# MLflow.


@contextlib.contextmanager
def without_a_look_at_packages() -> Iterator[None]:
    """Let MLflow save a model without comparing its requirements with the installed packages, which they were made of.

    For it MLflow reads the lists of files of all installed packages: 0.8 s. Only to load a model has an option without
    it. No issue known. Red without it: test_register.py.
    """
    from mlflow.utils import environment

    check = environment.warn_dependency_requirement_mismatches
    environment.warn_dependency_requirement_mismatches = lambda *requirements, **options: None
    try:
        yield
    finally:
        environment.warn_dependency_requirement_mismatches = check
