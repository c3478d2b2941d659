"""Mistakes that libraries complain of in their own words: each is made for real, with the library as it is installed.

A function takes an empty folder, and ends with the library's exception. Its name is that of the entry in
tasks/system/messages.yaml which translates it.
"""

from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import tensorflow as tf

# Keras.


def keras_input_axis(folder: Path) -> None:
    layer = keras.layers.Dense(2)
    layer(np.zeros((1, 3)))
    layer(np.zeros((1, 4)))


def keras_rank(folder: Path) -> None:
    keras.layers.Conv2D(2, 3)(np.zeros((2, 3)))


def keras_model_input(folder: Path) -> None:
    given = keras.Input((4,))
    keras.Model(given, keras.layers.Dense(1)(given))(np.zeros((2, 3)))


def keras_image_too_small(folder: Path) -> None:
    keras.layers.Conv2D(2, 7)(keras.Input((4, 4, 1)))


def keras_unknown_class(folder: Path) -> None:
    class Doubled(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x * 2

    given = keras.Input((4,))
    keras.Model(given, Doubled()(given)).save(folder / "own.keras")
    keras.saving.load_model(folder / "own.keras")


def keras_lambda(folder: Path) -> None:
    given = keras.Input((4,))
    keras.Model(given, keras.layers.Lambda(lambda x: x * 2)(given)).save(folder / "lambda.keras")
    keras.saving.load_model(folder / "lambda.keras")


def keras_other_weights(folder: Path) -> None:
    def model(units: int) -> Any:
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])

    model(2).save_weights(folder / "w.weights.h5")
    model(3).load_weights(folder / "w.weights.h5")


def keras_targets_shape(folder: Path) -> None:
    keras.losses.CategoricalCrossentropy()(np.zeros((2,)), np.zeros((2, 3)))


# TensorFlow.


def tensorflow_label_range(folder: Path) -> None:
    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[9], logits=[[0.0, 1.0, 2.0]])


def tensorflow_ragged_batch(folder: Path) -> None:
    data = tf.data.Dataset.from_generator(lambda: ([0] * n for n in (1, 2)), output_signature=tf.TensorSpec((None,)))
    next(iter(data.batch(2)))


def tensorflow_damaged_record(folder: Path) -> None:
    (folder / "broken.tfrecord").write_bytes(b"\xff" * 64)
    next(iter(tf.data.TFRecordDataset(str(folder / "broken.tfrecord"))))


def tensorflow_no_image(folder: Path) -> None:
    tf.io.decode_image(b"these bytes are not an image")


def tensorflow_nan(folder: Path) -> None:
    tf.debugging.check_numerics(tf.constant([float("nan")]), "the loss")


def tensorflow_if_on_tensor(folder: Path) -> None:
    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        return 1 if x > 0 else 2

    step(tf.constant(1))


# JAX.


def jax_if_on_tracer(folder: Path) -> None:
    jax.jit(lambda x: 1 if x > 0 else 2)(1.0)


def jax_numpy_on_tracer(folder: Path) -> None:
    jax.jit(lambda x: np.sum(np.asarray(x)))(np.zeros(3))


# MLflow.


def mlflow_no_server(folder: Path) -> None:
    from mlflow import MlflowClient

    MlflowClient("http://127.0.0.1:9").get_run("0" * 32)


# Prefect.


def prefect_no_server(folder: Path) -> None:
    from prefect.client.orchestration import SyncPrefectClient

    SyncPrefectClient("http://127.0.0.1:9/api").read_flows()


# DVC.


def _dvc(folder: Path, text: str) -> Any:
    from dvc.repo import Repo

    repo = Repo.init(str(folder), no_scm=True)
    (folder / "dvc.yaml").write_text(text)
    return repo


def dvc_not_in_cache(folder: Path) -> None:
    repo = _dvc(folder, "stages: {a: {cmd: 'echo a > x', outs: [x]}}\n")
    lock = "schema: '2.0'\nstages: {a: {cmd: 'echo a > x', outs: [{path: x, md5: 0123456789abcdef0123456789abcdef}]}}\n"
    (folder / "dvc.lock").write_text(lock)
    repo.checkout()


def dvc_ignored(folder: Path) -> None:
    repo = _dvc(folder, "stages: {a: {cmd: 'true'}}\n")
    (folder / ".dvcignore").write_text("dvc.yaml\n")
    repo.reproduce("dvc.yaml:a")
