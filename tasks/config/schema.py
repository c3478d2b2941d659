"""Every section and key of the settings: its type, its bounds and what it means.

params.yaml holds the values. Only keys of a ``kind`` that it does not select have their defaults in these files.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from tasks.config.input import Input
from tasks.config.optimizers import AnyOptimizer
from tasks.config.schedules import AnySchedule
from tasks.config.section import (
    ALIAS,
    DATASET_NAME,
    EXPERIMENT,
    MAX_FLOAT32,
    MODEL_NAME,
    WEIGHTS,
    Bookkeeping,
    Count,
    Course,
    Options,
    OwnCode,
    Pixels,
    Result,
    Section,
    Speed,
    TestMetric,
    Text,
    TrainingMetric,
    What,
    by_kind,
    flat,
    kinds_in,
    leaves,
    marks_of,
)
from tasks.config.strategies import AnyStrategy, strategy_kinds
from tasks.config.train import Train


def _remote_address(text: str) -> str:
    scheme, _, place = text.partition("://")
    first, *others = place.strip("/").split("/")
    # fsspec gives these a meaning: a chain of protocols, parameters, the folder above.
    odd = [sign for sign in ("::", "?", "#", "*", "@", " ", "\\") if sign in place] or {"..", "."} & {first, *others}
    known = ("abfs", "file", "gs", "s3")
    if scheme not in known or not first or odd or place.startswith("/") != (scheme == "file"):
        raise ValueError(
            f"'{text}': write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, abfs://CONTAINER/FOLDER or file:///FOLDER; "
            "credentials are not part of it: they come from the environment"
        )
    return text.rstrip("/")


CHAMPION = "champion"
"""The alias of the best version by the evidence so far."""


def folder_name(name: str) -> str:
    """Return the folder of a dataset in data/. A point separates the dataset from its configuration: neither names in
    TFDS nor those of a user's own data have one.

    >>> folder_name("cmaterdb/bangla"), folder_name("my_data:BlackOrWhite")
    ('cmaterdb.bangla', 'black_or_white')
    """
    first, slash, configuration = name.partition("/")
    if ":" in first:  # As TFDS names a builder after its class.
        first = re.sub("(.)([A-Z][a-z0-9]+)", r"\1_\2", first.partition(":")[2])
        first = re.sub("([a-z0-9])([A-Z])", r"\1_\2", first).lower()
    return f"{first}{slash and '.'}{configuration}"


def split_folder_name(folder: str) -> tuple[str, str]:
    """Return the name in TFDS and the configuration (possibly empty) of a dataset's folder.

    >>> split_folder_name("cmaterdb.bangla"), split_folder_name("my-photos")
    (('cmaterdb', 'bangla'), ('my-photos', ''))
    """
    name, _, configuration = folder.partition(".")
    return name, configuration


class Dataset(Section):
    name: Result[
        Annotated[
            str,
            Field(pattern=DATASET_NAME, max_length=100),
            AfterValidator(folder_name),
        ]
    ]
    """A TFDS dataset of images, texts or numbers, NAME or NAME/CONFIG, or a builder in tasks/data/builders/. It is also
    the name of the folder: data/NAME or data/NAME.CONFIG. MODULE:CLASS, your own TFDS builder, becomes the name that
    TFDS gives this class."""
    builder: Bookkeeping[OwnCode | None]
    """MODULE:CLASS of your own builder; dataset.name=MODULE:CLASS sets it."""
    version: Result[Text | None]
    """TFDS version; null uses the version in data/<name>/params.yaml, at first the builder's newest."""
    image_size: Result[tuple[Pixels, Pixels] | None]
    """Height and width to which `prepare` resizes images; null keeps their size, or uses the median if they differ,
    rounded to a multiple of 8, at most 224."""
    downloads: Bookkeeping[Path | None]
    """Folder with source archives that you downloaded yourself, under the names that TFDS registers: FOLDER/NAME/*,
    NAME without a configuration, as in TFDS' own folders."""

    @model_validator(mode="before")
    @classmethod
    def own_builder(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, Mapping) else None
        if not isinstance(name, str) or ":" not in name:
            return values
        return {**values, "name": folder_name(name), "builder": name.partition("/")[0]}


class Model(Section):
    name: Result[Text]
    """A file in tasks/modeling/models/, or your own `module:function` with the same signature as their `build`."""
    options: Result[Options]
    """Keyword arguments of the model's `build`."""
    initial: Result[Annotated[str, Field(pattern=WEIGHTS, max_length=250)] | None]
    """Initial weights of a new run: the id of a run of the same model, on any dataset (its best checkpoint),
    FILE.keras, models:/NAME@ALIAS or models:/NAME/VERSION in MLflow, or, for model.name=keras_applications, FILE.h5
    with the weights of its architecture without the top. Null: random weights."""
    new_head: Result[bool]
    """Give the last layer that has weights new random ones, for example because the classes differ."""
    freeze: Result[list[re.Pattern[str]]]
    """Regular expressions: layers whose whole name matches, and all layers inside them, are not trained (Keras'
    `layer.trainable = False`; a BatchNormalization then uses its moving averages and does not change them)."""


class Checkpoint(Section):
    every_epochs: Course[Count | None]
    """Save a checkpoint after this many epochs, and always after the last one; null is off."""
    every_steps: Course[Count | None]
    """Save a checkpoint after this many steps, also in the middle of an epoch; null is off."""
    every_seconds: Course[Annotated[float, Field(gt=0, le=1e9)] | None]
    """Save a checkpoint at the next step after this many seconds without one; null is off."""
    keep: Bookkeeping[Count]
    """Number of newest checkpoints to keep, in addition to the best one."""
    monitor: Course[TrainingMetric]
    """The metric that defines the best checkpoint, such as validation/loss (lowest) or validation/accuracy (highest);
    or your own metric, validation/module:function."""
    remote: Bookkeeping[Annotated[Text, AfterValidator(_remote_address)] | None] = None
    """Address to which the run copies its checkpoints, records and models while it trains, and where --resume finds
    them in a fresh clone: s3://BUCKET/FOLDER, gs://, abfs:// or file:///FOLDER; null is off."""


class Evaluate(Section):
    checkpoint: Course[Literal["latest", "best"] | Count]
    """`latest`, `best`, or the step of a checkpoint."""
    global_batch_size: Speed[Count]
    """Number of examples per batch on all devices together."""
    strategy: Speed[Literal["run", "one_device"]]
    """`run`: on the devices of the run's strategy, or on one device if this machine lacks them or the strategy is
    `parameter_server`. `one_device`: always on one device, without a cluster. The metrics are the same."""


class Register(Section):
    enabled: Bookkeeping[bool]
    """Register the model of each run that passes the gate."""
    model_name: Bookkeeping[Annotated[str, Field(pattern=MODEL_NAME, max_length=250)] | None]
    """Name in MLflow's model registry; null is <dataset>-<model>."""
    alias: Bookkeeping[Annotated[str, Field(pattern=ALIAS, max_length=250)]]
    """The alias that every new version gets, whether it is better or not."""
    metric: Bookkeeping[TestMetric]
    """The metric of the gate."""
    minimum: Bookkeeping[float | None]
    """The gate: a model whose metric is worse than this is not registered; null is off."""
    min_improvement: Bookkeeping[Annotated[float, Field(ge=0, le=MAX_FLOAT32)]]
    """How much better than the current champion's, on the same test rows, the metric must be for a version to become
    `champion`: 0.01 is one point of accuracy. 0 accepts any improvement that is not due to chance."""
    confidence: Bookkeeping[Annotated[float, Field(ge=0.5, lt=1)]]
    """Required confidence that the improvement is not due to chance: with 0.95, 1 in 20 models that are no better
    becomes champion."""
    floors: Bookkeeping[dict[str, Annotated[float, Field(ge=0, le=1)]]]
    """The minimum that parts of the test split must reach for a version to become `champion`: the recall of a class or
    label, such as {"3": 0.8} for class 3, or the share of correct answers in another slice, by its name in the run's
    report, such as {"colour: red": 0.7}. {} is off. For a regression, see `register.ceilings`."""
    ceilings: Bookkeeping[dict[str, Annotated[float, Field(ge=0, le=MAX_FLOAT32)]]]
    """For a regression: the largest mean absolute error, in the target's unit, that a slice of the test split may have
    for a version to become `champion`, by its name in the run's report: {"colour: red": 12.5}. {} is off."""

    @field_validator("alias")
    @classmethod
    def free(cls, alias: str) -> str:
        if alias == CHAMPION:
            raise ValueError(
                f"Stratagem moves '{CHAMPION}' itself, to a model that is shown to be better. Use --set "
                "register.alias=VALUE, such as challenger"
            )
        # MLflow would refuse these only after the training.
        if alias == "latest" or re.fullmatch(r"v\d+", alias):
            raise ValueError(f"MLflow reserves '{alias}'. Use --set register.alias=VALUE, such as challenger")
        return alias


class Tracking(Section):
    experiment: Bookkeeping[Annotated[str, Field(pattern=EXPERIMENT, max_length=250)] | None]
    """MLflow experiment; null is the dataset's name."""
    system_metrics: Bookkeeping[bool]
    """Log the use of CPU, memory and GPU during training."""
    metric_names: Bookkeeping[Literal["stratagem", "keras"]] = "stratagem"
    """Names of an epoch's metrics in MLflow: `validation/loss` and `train/loss`, or `val_loss` and `loss` as in Keras'
    logs."""


class Settings(Section):
    """Everything a run depends on besides the data and the code."""

    dataset: Dataset
    input: Input
    model: Model
    if TYPE_CHECKING:
        optimizer: AnyOptimizer
        schedule: AnySchedule
        strategy: AnyStrategy
    else:
        optimizer: by_kind(AnyOptimizer)
        schedule: by_kind(AnySchedule)
        strategy: by_kind(AnyStrategy)
    train: Train
    checkpoint: Checkpoint
    evaluate: Evaluate
    register_: Annotated[Register, Field(alias="register")]
    tracking: Tracking

    @model_validator(mode="after")
    def sections_agree(self) -> Self:
        if self.input.validation is None:
            for key, monitor in self.monitors.items():
                if monitor.startswith("validation/"):
                    raise ValueError(
                        f"{key} = '{monitor}' needs a validation split, and input.validation is null: "
                        f"set {key}={monitor.replace('validation', 'train')} or set input.validation"
                    )
        if (frozen := self.train.frozen_epochs) is not None:
            if not self.model.freeze:
                raise ValueError(
                    f"train.frozen_epochs = {frozen}: model.freeze = [] freezes nothing. Name layers there, or set "
                    "train.frozen_epochs=null"
                )
            if frozen >= self.train.epochs:
                raise ValueError(
                    f"train.frozen_epochs = {frozen} leaves none of train.epochs = {self.train.epochs} for training "
                    "all layers: use fewer, or train.frozen_epochs=null, which keeps them frozen"
                )
        cluster = self.strategy.cluster
        if cluster is not None and cluster.min_workers is not None:
            if self.train.global_batch_size is None:
                raise ValueError(
                    f"strategy.min_workers = {cluster.min_workers} needs a batch that does not depend on the number "
                    "of workers. Set train.global_batch_size, and train.per_replica_batch_size=null"
                )
            if cluster.workers not in (counts := self.worker_counts) or counts[-1] != cluster.min_workers:
                raise ValueError(
                    f"train.global_batch_size = {self.train.global_batch_size} must be divisible by the number of "
                    f"replicas of strategy.workers = {cluster.workers} and of strategy.min_workers = "
                    f"{cluster.min_workers}"
                )
        kind, loop = self.strategy.kind, self.train.loop
        if loop not in self.strategy.loops:
            allowed = " or ".join(self.strategy.loops)
            raise ValueError(
                f"train.loop = '{loop}': strategy.kind={kind} works only with {allowed}; set train.loop={allowed}, or "
                f"strategy.kind to one of {', '.join(k for k, s in strategy_kinds().items() if loop in s.loops)}"
            )
        given = self.flat()
        for feature, reason in self.strategy.refuses.items():
            if asks_for(feature, given):
                key, _, value = feature.partition("=")
                value = value or json.dumps(given[key])
                without = json.dumps(FEATURES[feature]).strip('"')
                instead = "" if ": set " in reason else f": set {key}={without}"
                raise ValueError(f"{key} = {value} does not work with strategy.kind={kind}, because {reason}{instead}")
        return self

    @property
    def evaluates_on_all_devices(self) -> bool:
        """Whether the evaluation uses the devices of the run's strategy, if this machine has them."""
        chief_gives_work = self.strategy.cluster is not None and self.strategy.cluster.chief_gives_work
        return self.evaluate.strategy == "run" and not chief_gives_work

    @property
    def worker_counts(self) -> tuple[int, ...]:
        """The numbers of workers that a training may have, the largest first: from `strategy.workers` down to
        `strategy.min_workers`, if their replicas divide the global batch."""
        cluster, size = self.strategy.cluster, self.train.global_batch_size or 0
        if cluster is None or cluster.min_workers is None:
            return (cluster.workers,) if cluster is not None else ()
        numbers = range(cluster.workers, cluster.min_workers - 1, -1)
        return tuple(number for number in numbers if size % cluster.num_replicas_of(number) == 0)

    @property
    def monitors(self) -> dict[str, str]:
        """The metrics that a training watches, by key."""
        watched = {"checkpoint.monitor": self.checkpoint.monitor}
        if (stopping := self.train.early_stopping) is not None:
            watched["train.early_stopping.monitor"] = stopping.monitor
        return watched

    @property
    def named_metrics(self) -> dict[str, str]:
        """The first key that names each metric, including ``loss``, by the metric's name."""
        named = [(name, "train.metrics") for name in self.train.metrics]
        watched = {**self.monitors, "register.metric": self.register_.metric}
        named += [(name.partition("/")[2], key) for key, name in watched.items()]
        return dict(sorted(dict(reversed(named)).items()))

    def to_json(self) -> dict[str, Any]:
        """Return the settings as nested JSON values, in the spelling of params.yaml."""
        return self.model_dump(mode="json", by_alias=True)

    def flat(self) -> dict[str, Any]:
        """Return the settings as ``{"section.key": value}``, in the spelling of ``--set``."""
        return flat(self.to_json())

    def digest(self, *affects: What) -> str:
        """Return the sha256 of the settings that affect these, by default the result."""
        marks = marks_of(Settings)
        chosen = {
            key: value
            for key, value in leaves(self.to_json(), whole=marks)
            if marks[key].what in (affects or ("result",))
        }
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


FEATURES: dict[str, Any] = {
    "train.jit_compile": False,
    "train.gradient_accumulation_steps": 1,
    "train.dtype_policy=mixed_bfloat16": "float32",
    "train.dtype_policy=mixed_float16": "float32",
    "train.dtype_policy=float64": "float32",
    "train.deterministic": False,
    "input.source=stream": "array",
}
"""What not every strategy can do: a key, or a key with a value, and the value that avoids it."""


def asks_for(feature: str, flat: Mapping[str, Any]) -> bool:
    """Return whether flat settings use one of ``FEATURES``; ``auto`` does not."""
    key, equals, value = feature.partition("=")
    return bool(flat[key] == value if equals else flat[key] not in (FEATURES[feature], "auto"))


def kinds_of(section: str) -> dict[str, type[Section]]:
    """Return the classes of a section that has a ``kind``, by kind, see ``kind_of``; nothing for other sections."""
    field = Settings.model_fields.get(section)
    return kinds_in(field.annotation) if field is not None and get_args(field.annotation) else {}
