"""Mistakes that libraries complain of in their own words: each is made for real, with the library as it is installed.

A function takes an empty folder, and ends with the library's exception. Its name is that of the entry in
tasks/system/messages.yaml which translates it.
"""

from pathlib import Path
from typing import Any

import numpy as np

# Keras.


def keras_input_axis(folder: Path) -> None:
    import keras

    layer = keras.layers.Dense(2)
    layer(np.zeros((1, 3)))
    layer(np.zeros((1, 4)))


def keras_rank(folder: Path) -> None:
    import keras

    keras.layers.Conv2D(2, 3)(np.zeros((2, 3)))


def keras_model_input(folder: Path) -> None:
    import keras

    given = keras.Input((4,))
    keras.Model(given, keras.layers.Dense(1)(given))(np.zeros((2, 3)))


def keras_image_too_small(folder: Path) -> None:
    import keras

    keras.layers.Conv2D(2, 7)(keras.Input((4, 4, 1)))


def keras_unknown_loss(folder: Path) -> None:
    import keras

    keras.losses.get("crossentropi")


def keras_unknown_optimizer(folder: Path) -> None:
    import keras

    keras.optimizers.get("adamm")


def keras_unknown_activation(folder: Path) -> None:
    import keras

    keras.layers.Dense(1, activation="rellu")


def keras_unknown_metric(folder: Path) -> None:
    import keras

    keras.metrics.get("acuracy")


def keras_unknown_initializer(folder: Path) -> None:
    import keras

    keras.initializers.get("he_norml")


def keras_no_such_file(folder: Path) -> None:
    import keras

    keras.saving.load_model(folder / "gone.keras")


def keras_unknown_class(folder: Path) -> None:
    import keras

    class Doubled(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x * 2

    given = keras.Input((4,))
    keras.Model(given, Doubled()(given)).save(folder / "own.keras")
    keras.saving.load_model(folder / "own.keras")


def keras_lambda(folder: Path) -> None:
    import keras

    given = keras.Input((4,))
    keras.Model(given, keras.layers.Lambda(lambda x: x * 2)(given)).save(folder / "lambda.keras")
    keras.saving.load_model(folder / "lambda.keras")


def keras_other_weights(folder: Path) -> None:
    import keras

    def model(units: int) -> Any:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])

    model(2).save_weights(folder / "w.weights.h5")
    model(3).load_weights(folder / "w.weights.h5")


def keras_not_compiled(folder: Path) -> None:
    import keras

    keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]).fit(np.zeros((2, 4)), np.zeros((2, 1)), verbose=0)


def keras_targets_shape(folder: Path) -> None:
    import keras

    keras.losses.CategoricalCrossentropy()(np.zeros((2,)), np.zeros((2, 3)))


def keras_not_built(folder: Path) -> None:
    import keras

    keras.Sequential([keras.layers.Dense(1)]).count_params()


def keras_lengths(folder: Path) -> None:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    model.fit(np.zeros((3, 4)), np.zeros((2, 1)), verbose=0)


def keras_same_names(folder: Path) -> None:
    import keras

    given = keras.Input((4,))
    hidden = keras.layers.Dense(4, name="same")(given)
    keras.Model(given, keras.layers.Dense(4, name="same")(hidden))


def keras_pretrained_name(folder: Path) -> None:
    import keras

    keras.applications.MobileNetV2(weights="imagenett")


def keras_pretrained_size(folder: Path) -> None:
    import keras

    keras.applications.VGG16(weights=None, include_top=False, input_shape=(8, 8, 3))


# TensorFlow.


def tensorflow_label_range(folder: Path) -> None:
    import tensorflow as tf

    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[9], logits=[[0.0, 1.0, 2.0]])


def tensorflow_matrix_sizes(folder: Path) -> None:
    import tensorflow as tf

    tf.matmul(tf.zeros((2, 3)), tf.zeros((4, 5)))


def tensorflow_dtypes(folder: Path) -> None:
    import tensorflow as tf

    tf.add(tf.zeros(2), tf.zeros(2, tf.int32))


def tensorflow_ragged_batch(folder: Path) -> None:
    import tensorflow as tf

    data = tf.data.Dataset.from_generator(lambda: ([0] * n for n in (1, 2)), output_signature=tf.TensorSpec((None,)))
    next(iter(data.batch(2)))


def tensorflow_damaged_record(folder: Path) -> None:
    import tensorflow as tf

    (folder / "broken.tfrecord").write_bytes(b"\xff" * 64)
    next(iter(tf.data.TFRecordDataset(str(folder / "broken.tfrecord"))))


def tensorflow_no_such_file(folder: Path) -> None:
    import tensorflow as tf

    next(iter(tf.data.TFRecordDataset(str(folder / "gone.tfrecord"))))


def tensorflow_no_image(folder: Path) -> None:
    import tensorflow as tf

    tf.io.decode_image(b"these bytes are not an image")


def tensorflow_index_range(folder: Path) -> None:
    import tensorflow as tf

    tf.gather(tf.zeros(3), [9])


def tensorflow_reshape(folder: Path) -> None:
    import tensorflow as tf

    tf.reshape(tf.zeros(3), (2, 2))


def tensorflow_devices_late(folder: Path) -> None:
    import tensorflow as tf

    tf.zeros(1)
    tf.config.set_visible_devices([], "CPU")


def tensorflow_nan(folder: Path) -> None:
    import tensorflow as tf

    tf.debugging.check_numerics(tf.constant([float("nan")]), "the loss")


def tensorflow_variable_in_function(folder: Path) -> None:
    import tensorflow as tf

    @tf.function
    def step() -> Any:
        return tf.Variable(1.0) + 1

    step()


def tensorflow_if_on_tensor(folder: Path) -> None:
    import tensorflow as tf

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        return 1 if x > 0 else 2

    step(tf.constant(1))


def tensorflow_leaked_tensor(folder: Path) -> None:
    import tensorflow as tf

    kept = []

    @tf.function
    def step(x: Any) -> Any:
        kept.append(x * 2)
        return x

    step(tf.constant(1.0))
    tf.print(tf.function(lambda: kept[0] + 1)())


def tensorflow_broadcast(folder: Path) -> None:
    import tensorflow as tf

    tf.zeros((2, 3)) + tf.zeros((2, 4))


# JAX.


def jax_if_on_tracer(folder: Path) -> None:
    import jax

    jax.jit(lambda x: 1 if x > 0 else 2)(1.0)


def jax_numpy_on_tracer(folder: Path) -> None:
    import jax

    jax.jit(lambda x: np.sum(np.asarray(x)))(np.zeros(3))


def jax_leaked_tracer(folder: Path) -> None:
    import jax

    kept: list[Any] = []
    jax.jit(lambda x: kept.append(x * 2))(1.0)
    kept[0] + 1


def jax_matrix_sizes(folder: Path) -> None:
    import jax.numpy as jnp

    jnp.zeros((2, 3)) @ jnp.zeros((4, 5))


def jax_reshape(folder: Path) -> None:
    import jax.numpy as jnp

    jnp.zeros(3).reshape(2, 2)


def jax_broadcast(folder: Path) -> None:
    import jax.numpy as jnp

    jnp.zeros((2, 3)) + jnp.zeros((2, 4))


def jax_no_such_backend(folder: Path) -> None:
    import jax

    jax.devices("tpu")


def jax_grad_of_vector(folder: Path) -> None:
    import jax

    jax.grad(lambda x: x * 2)(np.zeros(3))


def jax_int_of_tracer(folder: Path) -> None:
    import jax
    import jax.numpy as jnp

    jax.jit(lambda n: jnp.zeros(int(n)))(3)


def jax_write_in_place(folder: Path) -> None:
    import jax.numpy as jnp

    jnp.zeros(3)[0] = 1


# MLflow.


def _mlflow(folder: Path) -> Any:
    """A client of a new store."""
    import shutil

    from mlflow import MlflowClient

    folder = folder.absolute()
    shutil.copy(folder.parent / "empty.db", folder / "mlflow.db")
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    return MlflowClient(uri, registry_uri=uri)


def mlflow_no_such_run(folder: Path) -> None:
    _mlflow(folder).get_run("0" * 32)


def mlflow_param_twice(folder: Path) -> None:
    client = _mlflow(folder)
    run_id = client.create_run("0").info.run_id
    client.log_param(run_id, "rate", 1)
    client.log_param(run_id, "rate", 2)


def mlflow_no_such_experiment(folder: Path) -> None:
    _mlflow(folder).get_experiment("77")


def mlflow_experiment_exists(folder: Path) -> None:
    client = _mlflow(folder)
    client.create_experiment("same")
    client.create_experiment("same")


def mlflow_no_such_model(folder: Path) -> None:
    _mlflow(folder).get_registered_model("gone")


def mlflow_no_such_alias(folder: Path) -> None:
    client = _mlflow(folder)
    client.create_registered_model("mine")
    client.get_model_version_by_alias("mine", "champion")


def mlflow_bad_name(folder: Path) -> None:
    client = _mlflow(folder)
    client.log_metric(client.create_run("0").info.run_id, "loss%$", 1.0)


def mlflow_no_server(folder: Path) -> None:
    from mlflow import MlflowClient

    MlflowClient("http://127.0.0.1:9").get_run("0" * 32)


# Prefect.


def prefect_parameters(folder: Path) -> None:
    from prefect import flow

    @flow
    def training(epochs: int) -> None: ...

    training.validate_parameters({"epochs": "many"})


def prefect_no_such_flow(folder: Path) -> None:
    from prefect.flows import load_flow_from_entrypoint

    (folder / "empty.py").write_text("")
    load_flow_from_entrypoint(f"{folder / 'empty.py'}:training")


def prefect_cron(folder: Path) -> None:
    from prefect.client.schemas.schedules import CronSchedule

    CronSchedule(cron="every night")


def prefect_no_server(folder: Path) -> None:
    from prefect.client.orchestration import SyncPrefectClient

    SyncPrefectClient("http://127.0.0.1:9/api").read_flows()


# DVC.


def _dvc(folder: Path, text: str) -> Any:
    from dvc.repo import Repo

    repo = Repo.init(str(folder), no_scm=True)
    (folder / "dvc.yaml").write_text(text)
    return repo


def dvc_no_repository(folder: Path) -> None:
    from dvc.repo import Repo

    Repo(str(folder))


def dvc_bad_yaml(folder: Path) -> None:
    _dvc(folder, "stages: {a: {comand: true}}\n").reproduce()


def dvc_broken_yaml(folder: Path) -> None:
    _dvc(folder, "stages: [\n").reproduce()


def dvc_no_such_stage(folder: Path) -> None:
    _dvc(folder, "stages: {a: {cmd: 'true'}}\n").reproduce("b")


def dvc_two_stages_one_output(folder: Path) -> None:
    _dvc(folder, "stages: {a: {cmd: 'true', outs: [x]}, b: {cmd: 'true', outs: [x]}}\n").reproduce()


def dvc_circle(folder: Path) -> None:
    stages = "{a: {cmd: 'true', deps: [y], outs: [x]}, b: {cmd: 'true', deps: [x], outs: [y]}}"
    _dvc(folder, f"stages: {stages}\n").reproduce()


def dvc_not_in_cache(folder: Path) -> None:
    repo = _dvc(folder, "stages: {a: {cmd: 'echo a > x', outs: [x]}}\n")
    lock = "schema: '2.0'\nstages: {a: {cmd: 'echo a > x', outs: [{path: x, md5: 0123456789abcdef0123456789abcdef}]}}\n"
    (folder / "dvc.lock").write_text(lock)
    repo.checkout()


def dvc_ignored(folder: Path) -> None:
    repo = _dvc(folder, "stages: {a: {cmd: 'true'}}\n")
    (folder / ".dvcignore").write_text("dvc.yaml\n")
    repo.reproduce("dvc.yaml:a")


def dvc_no_such_dependency(folder: Path) -> None:
    _dvc(folder, "stages: {a: {cmd: 'true', deps: [gone]}}\n").reproduce()
