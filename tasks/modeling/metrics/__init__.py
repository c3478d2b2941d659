"""Metrics by name: each file is named after its metric, and its ``METRIC`` defines how training and evaluation compute
it. ``top_<k>_accuracy`` exists for every k; a custom metric is named as ``module:function``.

An evaluation reports metric ``NAME`` as ``test/NAME``, which the registry's gate can use. A training measures the
headline metric of its task, and the metrics that ``train.metrics``, early stopping or ``checkpoint.monitor`` name.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.modeling import own_code
from tasks.records import HEADLINES, PreparedDataset, Target, Task
from tasks.system.errors import UserError

Labels: TypeAlias = npt.NDArray[Any]
"""As in ``records.PreparedSplit``: (n,) or (n, labels or numbers)."""
Predictions: TypeAlias = npt.NDArray[np.float64]
"""(n, num_outputs): logits, or a regression's numbers."""

Better: TypeAlias = Literal["higher", "lower"]


@dataclass(frozen=True)
class Metric:
    """A measure of the quality of predictions."""

    better: Better
    tasks: tuple[Task, ...]
    """Tasks that the metric applies to."""
    of_predictions: Callable[[Labels, Predictions], float | None]
    """Takes all labels and outputs of a split; returns None if the metric is undefined for them."""
    in_training: Callable[[str, Target], Any] | None = None
    """Makes a ``keras.metrics.Metric`` with a given name, inside the strategy's scope. Summed over batches and workers,
    its variables give the value of ``of_predictions``, exactly or with the error that the file states. None if no such
    metric exists."""
    more_outputs_than: int = 0
    """The metric is only defined for models with more outputs than this."""
    most_outputs_in_training: int | None = None
    """A training does not measure the metric for models with more outputs."""


def find_metric(name: str, key: str = "the name of a metric") -> Metric:
    """Return a metric: a file of this folder, a ``top_<k>_accuracy``, or a custom ``module:function``.

    Args:
        name: the metric's name.
        key: the setting that names it, for the message.

    Raises:
        UserError: a custom metric does not exist.
    """
    if ":" in name:
        return _own_metric(name, key)
    if name not in config.names_of("modeling/metrics") and (k := config.top_k_of(name)):
        return top_k(k)
    metric: Metric = importlib.import_module(f"tasks.modeling.metrics.{name}").METRIC
    return metric


def of_keras(kind: str, **options: Any) -> Callable[[str, Target], Any]:
    """Return an ``in_training`` function that makes a Keras metric; it imports Keras only when it is called.

    Args:
        kind: a class of ``keras.metrics``, such as ``MeanAbsoluteError``.
        options: arguments of that class.
    """

    def in_training(name: str, target: Target) -> Any:
        import keras

        return getattr(keras.metrics, kind)(name=name, **options)

    return in_training


def top_k(k: int) -> Metric:
    """Return ``top_<k>_accuracy``; it is undefined for k classes or fewer, where every prediction would be right."""

    def of_predictions(labels: Labels, logits: Predictions) -> float | None:
        if logits.shape[1] <= k:
            return None
        best = np.argsort(logits, axis=1, kind="stable")[:, -k:]
        return float((best == labels[:, None]).any(axis=1).mean())

    def in_training(name: str, target: Target) -> Any:
        import keras

        metric = keras.metrics.SparseTopKCategoricalAccuracy(k=k, name=name)
        update = metric.update_state

        def update_state(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            # TensorFlow's operation supports only float32.
            return update(y_true, keras.ops.cast(y_pred, "float32"), sample_weight)

        metric.update_state = update_state
        return metric

    return Metric(
        better="higher",
        tasks=("classification",),
        of_predictions=of_predictions,
        in_training=in_training,
        more_outputs_than=k,
    )


def without_file(settings: config.Settings) -> dict[str, str]:
    """Return the metrics that the settings name and that are not files of this folder, each with the first key that
    names it."""
    files = ("loss", *config.names_of("modeling/metrics"))
    return {name: key for name, key in settings.named_metrics.items() if name not in files}


def of_task(task: Task, others: Mapping[str, str] | None = None) -> dict[str, Metric]:
    """Return the metrics of a task by name: first those with a file, then ``others``, see ``without_file``."""
    found = {name: find_metric(name) for name in config.names_of("modeling/metrics")}
    found |= {name: find_metric(name, key) for name, key in (others or {}).items()}
    return {name: metric for name, metric in found.items() if task in metric.tasks}


def _own_metric(name: str, key: str) -> Metric:
    """Return a custom metric. Its function maps tensors (labels, outputs), classes as int32 and numbers in the target's
    unit, to one number per example, (n,); the metric is their mean. The function's attribute ``better`` is ``"higher"``
    or ``"lower"``; the default is ``"higher"``."""
    function = own_code.load(name, key)
    which: Any = getattr(function, "better", "higher")
    if which not in get_args(Better):
        raise UserError(f"{key} = '{name}': its attribute `better` is {which!r}. Allowed: 'higher' or 'lower'")
    if name.startswith("val_"):
        raise UserError(f"{key} = '{name}': Keras reads val_ as the prefix of a validation metric. Rename the module")

    def each(labels: Any, outputs: Any) -> Any:
        import keras

        if len(labels.shape) == 1:  # TensorFlow trains with int64.
            labels = keras.ops.cast(labels, "int32")
        return keras.ops.cast(function(labels, outputs), keras.config.floatx())

    def of_predictions(labels: Labels, outputs: Predictions) -> float | None:
        import keras

        tensors = keras.ops.convert_to_tensor(labels), keras.ops.convert_to_tensor(outputs, keras.config.floatx())
        mean = float(np.mean(keras.ops.convert_to_numpy(each(*tensors)), dtype=np.float64))
        return mean if np.isfinite(mean) else None

    def in_training(name: str, target: Target) -> Any:
        import keras

        class OwnMetric(keras.metrics.MeanMetricWrapper):
            """A class of this project, so that an exported model refers neither to it nor to the function."""

        return OwnMetric(each, name=name)

    return Metric(which, get_args(Task), of_predictions, in_training)


def check(settings: config.Settings, prepared: PreparedDataset, example: tuple[Any, Any]) -> None:
    """Refuse metrics that cannot be measured.

    Args:
        settings: all settings that name a metric are read.
        prepared: determines the task.
        example: labels and outputs of two examples, as in a training.

    Raises:
        UserError: a named metric does not apply to the task, or a training cannot measure it; or a custom metric does
            not exist, cannot be computed, or does not return one number per example.
    """
    for name, key in own_code.metrics_of(settings).items():
        own_code.load_measure(name, key, example, "the metric is their mean over all examples")
    in_training(settings, prepared)


def check_gate(settings: config.Settings, prepared: PreparedDataset) -> None:
    """Raise ``UserError`` if no evaluation measures ``register.metric``."""
    gate, known = settings.register_.metric, of_task(prepared.target.task, without_file(settings))
    if not settings.register_.enabled:
        return
    measured, name = ["loss", *known], gate.partition("/")[2]
    if name in known:
        _check_outputs(f"register.metric = '{gate}'", known[name], prepared)
    elif name not in measured:
        raise UserError(
            f"register.metric = '{gate}': {prepared.name} is a {prepared.target.task}, for which an evaluation "
            f"computes {', '.join(measured)}. Set register.metric to test/ and one of these"
        )


def in_training(settings: config.Settings, prepared: PreparedDataset) -> dict[str, Metric]:
    """Return the metrics that a training measures, by name.

    Args:
        settings: ``train.metrics``, ``train.early_stopping`` and ``checkpoint.monitor`` are read.
        prepared: determines the task.

    Raises:
        UserError: a named metric does not apply to the task or to this number of outputs, or a training cannot measure
            it.
    """
    target = prepared.target
    known = of_task(target.task, without_file(settings))
    measured = [name for name, metric in known.items() if metric.in_training is not None]
    asked = {f"train.metrics = {name}": name for name in settings.train.metrics}
    asked |= {f"{key} = '{monitor}'": monitor.partition("/")[2] for key, monitor in settings.monitors.items()}
    for what, name in asked.items():
        if name != "loss" and name not in measured:
            why = "only an evaluation computes it" if name in known else f"{prepared.name} is a {target.task}"
            raise UserError(f"{what}: {why}. A training computes loss, {', '.join(measured)}: choose one of these")
        if name in known:
            _check_outputs(what, known[name], prepared)
            most = known[name].most_outputs_in_training
            if most is not None and target.num_outputs > most:
                many = "classes" if target.task == "classification" else "labels"
                raise UserError(
                    f"{what}: {prepared.name} has {target.num_outputs:,} {many}, but a training can compute {name} for "
                    f"at most {most:,}, because its counts take memory. Choose another metric; the evaluation has "
                    f"test/{name}"
                )
    wanted = {HEADLINES[target.task], *asked.values()}
    return {name: metric for name, metric in known.items() if name in wanted}


def _check_outputs(what: str, metric: Metric, prepared: PreparedDataset) -> None:
    """Refuse a metric that is always 1."""
    if (count := prepared.target.num_outputs) <= metric.more_outputs_than:
        raise UserError(
            f"{what}: {prepared.name} has {count} classes, so the right class is always among the "
            f"{metric.more_outputs_than} most probable ones. Use accuracy, or a K below {count}"
        )


def compute(
    task: Task, labels: Labels, outputs: Predictions, others: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Return the defined metrics of a task and of ``others`` (see ``of_task``) by name."""
    found = {name: metric.of_predictions(labels, outputs) for name, metric in of_task(task, others).items()}
    return {name: float(value) for name, value in found.items() if value is not None}


class ClassCounts(NamedTuple):
    """Numbers of examples by class or label, (classes,)."""

    right: npt.NDArray[np.int64]
    """Examples of the class that are predicted as this class."""
    taken: npt.NDArray[np.int64]
    """Examples that are predicted as the class."""
    support: npt.NDArray[np.int64]
    """Examples of the class."""

    @property
    def precision(self) -> npt.NDArray[np.float64]:
        """The share of correct examples among those predicted as a class; 0 if none is."""
        return self.right / np.maximum(self.taken, 1)

    @property
    def recall(self) -> npt.NDArray[np.float64]:
        """The share of a class's examples that are predicted as the class; 0 if the class has no examples."""
        return self.right / np.maximum(self.support, 1)

    @property
    def f1(self) -> npt.NDArray[np.float64]:
        """The harmonic mean of precision and recall; 0 instead of 0 / 0."""
        harmonic: npt.NDArray[np.float64] = 2 * self.right / np.maximum(self.taken + self.support, 1)
        return harmonic


# Computed without scikit-learn, whose import takes 0.4 s of processor time.


def count_classes(labels: Labels, logits: Predictions) -> ClassCounts:
    """Return the numbers of correct, predicted and actual examples of each class.

    The prediction is the class with the largest logit, or, for a multi-label task, each label with a logit above 0.
    """
    if labels.ndim == 1:
        matrix = confusion(labels, logits)
        return ClassCounts(np.diag(matrix), matrix.sum(axis=0), matrix.sum(axis=1))
    taken, own = logits > 0, labels == 1
    return ClassCounts((taken & own).sum(axis=0), taken.sum(axis=0), own.sum(axis=0))


def confusion(labels: Labels, logits: Predictions) -> npt.NDArray[np.int64]:
    """Return the confusion matrix, int64 (classes, classes): rows are actual, columns predicted classes."""
    num_classes = logits.shape[1]
    counts = np.bincount(labels * num_classes + logits.argmax(axis=1), minlength=num_classes**2)
    return counts.reshape(num_classes, num_classes)


def f1_in_training(average: Literal["macro", "micro"]) -> Callable[[str, Target], Any]:
    """Return an ``in_training`` function that makes an F1 metric of the labels and logits of a training."""

    def in_training(name: str, target: Target) -> Any:
        import keras

        class F1(keras.metrics.F1Score):
            def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
                if target.task == "classification":
                    taken = keras.ops.one_hot(keras.ops.argmax(y_pred, axis=-1), target.num_outputs)
                    y_true = keras.ops.one_hot(keras.ops.reshape(y_true, [-1]), target.num_outputs)
                else:
                    taken = keras.ops.cast(y_pred > 0, "float32")
                return super().update_state(y_true, taken, sample_weight)

        return F1(average=average, threshold=0.5, name=name)

    return in_training


def of_largest_share(metric: Any, task: Task) -> Any:
    """Let a ``keras.metrics.Metric`` also accept shares, float (n, outputs), as labels of mixed images: it uses the
    class with the largest share, or each label with a share of at least one half."""
    import keras

    update = metric.update_state

    def update_state(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if task == "classification" and len(y_true.shape) == 2:
            y_true = keras.ops.argmax(y_true, axis=-1)
        elif task == "multilabel":
            y_true = keras.ops.cast(y_true >= 0.5, "float32")
        return update(y_true, y_pred, sample_weight)

    metric.update_state = update_state
    return metric


def better(name: str) -> Better:
    """Return whether higher or lower values of a metric such as ``validation/loss`` or ``test/accuracy`` are better."""
    kind = name.partition("/")[2]
    return "lower" if kind == "loss" else find_metric(kind).better


def by_split(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return Keras' logs under our names: ``loss`` becomes ``train/loss``, ``val_loss`` becomes ``validation/loss``."""
    return {
        f"validation/{name.removeprefix('val_')}" if name.startswith("val_") else f"train/{name}": float(value)
        for name, value in logs.items()
    }


def keras_log_name(name: str) -> str:
    """Return the name of ``train/NAME`` or ``validation/NAME`` in Keras' logs."""
    return name.replace("train/", "").replace("validation/", "val_")
