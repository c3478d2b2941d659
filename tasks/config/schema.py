"""Every section and key of the settings: its type, its bounds and what it means.

Values live in params.yaml; this file, ``input``, ``train`` and those of the kinds beside it give them meaning and
bounds. Only keys that params.yaml cannot hold, because they belong to a ``kind`` that it does not select, have their
default there.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from tasks.config.input import Input
from tasks.config.optimizers import AnyOptimizer
from tasks.config.schedules import AnySchedule
from tasks.config.section import (
    MAX_FLOAT32,
    Bookkeeping,
    Count,
    Course,
    OwnCode,
    Pixels,
    Result,
    Section,
    Speed,
    TestMetric,
    Text,
    TrainingMetric,
    What,
    flat,
    leaves,
    marks_of,
)
from tasks.config.strategies import AnyStrategy, strategy_kinds
from tasks.config.train import Train


def _regular_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(
            f"'{text}' is not a regular expression ({error}): write a layer's name, or such as conv.*"
        ) from None
    return text


def _weights_source(text: str) -> str:
    # A path may hold anything; what is not a path is told apart here.
    if not re.fullmatch(r"[0-9a-f]{32}|models:/[^/@]+(@[^/@]+|/\d+)|(?!models:).+\.(keras|h5)", text):
        raise ValueError(f"'{text}': write a run's id, FILE.keras, FILE.h5, models:/NAME@ALIAS or models:/NAME/VERSION")
    return text


def _remote_address(text: str) -> str:
    scheme, _, place = text.partition("://")
    first, *others = place.strip("/").split("/")
    # What fsspec would read otherwise: protocols in a chain, parameters, a way out of the folder.
    odd = [sign for sign in ("::", "?", "#", "*", "@", " ", "\\") if sign in place] or {"..", "."} & {first, *others}
    if scheme not in REMOTE_SCHEMES or not first or odd or place.startswith("/") != (scheme == "file"):
        raise ValueError(
            f"'{text}': write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, abfs://CONTAINER/FOLDER or file:///FOLDER; "
            "credentials are not part of it: they come from the environment"
        )
    return text.rstrip("/")


LayerNames = Annotated[Text, AfterValidator(_regular_expression)]
"""A regular expression of names of layers."""
CHAMPION = "champion"
"""The alias of the version that no other one was shown to be better than."""
REMOTE_SCHEMES = ("abfs", "file", "gs", "s3")
"""How the addresses begin that runs are copied to."""


def folder_name(name: str) -> str:
    """Return the folder of data/ that a dataset's name stands for. Neither TFDS' names nor those of a user's own data
    have a point, so it says which dataset and which configuration it is.

    >>> folder_name("cmaterdb/bangla"), folder_name("my_data:BlackOrWhite")
    ('cmaterdb.bangla', 'black_or_white')
    """
    first, slash, configuration = name.partition("/")
    if ":" in first:  # As TFDS names a builder after its class.
        first = re.sub("(.)([A-Z][a-z0-9]+)", r"\1_\2", first.partition(":")[2])
        first = re.sub("([a-z0-9])([A-Z])", r"\1_\2", first).lower()
    return f"{first}{slash and '.'}{configuration}"


def split_folder_name(folder: str) -> tuple[str, str]:
    """Return the name in TFDS and the configuration, or an empty text, of a dataset's folder.

    >>> split_folder_name("cmaterdb.bangla"), split_folder_name("my-photos")
    (('cmaterdb', 'bangla'), ('my-photos', ''))
    """
    name, _, configuration = folder.partition(".")
    return name, configuration


class Dataset(Section):
    name: Result[
        Annotated[
            str,
            Field(pattern=r"^[a-z][a-z0-9_-]*([/.][A-Za-z0-9][A-Za-z0-9_.-]*)?$", max_length=100),
            AfterValidator(folder_name),
        ]
    ]
    """A TFDS dataset of images, texts or numbers, NAME or NAME/CONFIG, or one embedded in tasks/data/builders/. It is
    also the folder: data/NAME or data/NAME.CONFIG. MODULE:CLASS, a TFDS builder of your own, is that class' name in
    TFDS."""
    builder: Bookkeeping[OwnCode | None]
    """MODULE:CLASS of a builder of your own; dataset.name=MODULE:CLASS sets it."""
    version: Result[Text | None]
    """TFDS version; null takes what data/<name>/params.yaml says, at first the builder's newest."""
    image_size: Result[tuple[Pixels, Pixels] | None]
    """Height and width that `prepare` resizes to; null keeps the images' own size, or takes the median where sizes
    differ, rounded to a multiple of 8, at most 224."""
    downloads: Bookkeeping[Path | None]
    """Folder of source archives that you fetched yourself: FOLDER/NAME/<last one or two parts of the URL>, NAME without
    a configuration, as in TFDS' own folders."""

    @model_validator(mode="before")
    @classmethod
    def own_builder(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, Mapping) else None
        if not isinstance(name, str) or ":" not in name:
            return values
        return {**values, "name": folder_name(name), "builder": name.partition("/")[0]}


class Model(Section):
    name: Result[Text]
    """A file of tasks/modeling/models/, or your own `module:function` with the signature of their `build`."""
    options: Result[dict[str, Any]]
    """Keyword arguments of the model's `build`."""
    initial: Result[Annotated[Text, AfterValidator(_weights_source)] | None]
    """What a new run takes its first weights from: the id of a run of the same model, also on another dataset (those of
    its best checkpoint), FILE.keras, models:/NAME@ALIAS or models:/NAME/VERSION in MLflow, or for
    model.name=keras_applications FILE.h5, weights of its architecture without the top. Null: random ones."""
    new_head: Result[bool]
    """The last layer with weights begins with random ones all the same, such as for other classes."""
    freeze: Result[list[LayerNames]]
    """Regular expressions: a layer whose whole name one of them matches, with all layers inside it, is not trained
    (Keras' `layer.trainable = False`; a BatchNormalization then keeps its moving averages and goes by them)."""

    @field_validator("options")
    @classmethod
    def finite(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(options, allow_nan=False)
        except ValueError:
            raise ValueError("options holds a number that is not finite: JSON and Keras cannot keep it") from None
        except TypeError as error:
            raise ValueError(f"options holds what JSON cannot keep: {error}") from None
        return options


class Checkpoint(Section):
    every_epochs: Course[Count | None]
    """After so many epochs, and after the last one in any case; null is off."""
    every_steps: Course[Count | None]
    """After so many steps, also in the middle of an epoch; null is off."""
    every_seconds: Course[Annotated[float, Field(gt=0, le=1e9)] | None]
    """At the next step after so many seconds without a checkpoint; null is off."""
    keep: Bookkeeping[Count]
    """Newest checkpoints kept; the best one is kept beside them."""
    monitor: Course[TrainingMetric]
    """What "best" means, such as the lowest validation/loss or the highest validation/accuracy; or by a metric of your
    own, validation/module:function."""
    remote: Bookkeeping[Annotated[Text, AfterValidator(_remote_address)] | None] = None
    """Where the run's checkpoints, records and models are copied to while it trains, and a fresh clone finds them for
    --resume: s3://BUCKET/FOLDER, gs://, abfs:// or file:///FOLDER; null is nowhere."""


class Evaluate(Section):
    checkpoint: Course[Literal["latest", "best"] | Count]
    """`latest`, `best`, or the step of a checkpoint."""
    global_batch_size: Speed[Count]
    """Examples that all devices compute together at once."""
    strategy: Speed[Literal["run", "one_device"]]
    """`run`: on the devices of the run's strategy, or on one where this machine has not those. `one_device`: always on
    one, without a cluster. The metrics are the same."""

    @property
    def has_runs_devices(self) -> bool:
        """Whether it is to have the devices of the run's strategy, as far as they are there."""
        return self.strategy == "run"


class Register(Section):
    enabled: Bookkeeping[bool]
    """False: no version is made of any model."""
    model_name: Bookkeeping[Annotated[str, Field(pattern=r"^[\w.-]+$", max_length=250)] | None]
    """Name in MLflow's model registry; null is <dataset>-<model>."""
    alias: Bookkeeping[Annotated[str, Field(pattern=r"^[a-z][\w-]*$", max_length=250)]]
    """The alias that each new version gets, better or not."""
    metric: Bookkeeping[TestMetric]
    """What the gate goes by."""
    minimum: Bookkeeping[float | None]
    """The gate: no version is registered when the metric is worse than this; null is off."""
    min_improvement: Bookkeeping[Annotated[float, Field(ge=0, le=MAX_FLOAT32)]]
    """By how much the metric must be better than that of the version with the alias `champion`, on the same test rows,
    before this alias moves: 0.01 is one point of accuracy. 0 takes any gain that chance does not explain."""
    confidence: Bookkeeping[Annotated[float, Field(ge=0.5, lt=1)]]
    """How sure it must be that the gain is no chance: 0.95 promotes 1 in 20 of the models that are no better."""
    floors: Bookkeeping[dict[str, Annotated[float, Field(ge=0, le=1)]]]
    """What a part of the test split must have before `champion` moves: a class, or a label, the recall, {"3": 0.8} is
    0.8 of class 3; any other slice the share that is right, by the name that a run's report shows, {"colour: red":
    0.7}. {} is off. A regression has `register.ceilings`."""
    ceilings: Bookkeeping[dict[str, Annotated[float, Field(ge=0, le=MAX_FLOAT32)]]]
    """Of a regression: the greatest mean absolute error, in the target's own unit, that a slice of the test split may
    have before `champion` moves, by the name that a run's report shows: {"colour: red": 12.5}. {} is off."""

    @field_validator("alias")
    @classmethod
    def free(cls, alias: str) -> str:
        if alias == CHAMPION:
            raise ValueError(
                f"'{CHAMPION}' moves by itself, to a model that is shown to be better. Give --set "
                "register.alias=VALUE, such as challenger"
            )
        # MLflow would say so after the training.
        if alias == "latest" or re.fullmatch(r"v\d+", alias):
            raise ValueError(f"MLflow keeps '{alias}' for itself. Give --set register.alias=VALUE, such as challenger")
        return alias


class Tracking(Section):
    experiment: Bookkeeping[Annotated[str, Field(pattern=r"^\w[\w .-]*$", max_length=250)] | None]
    """MLflow experiment; null is the dataset's name."""
    system_metrics: Bookkeeping[bool]
    """Log processor, memory and GPU use while training."""


class Settings(Section):
    """Everything a run depends on besides the data and the code."""

    dataset: Dataset
    input: Input
    model: Model
    optimizer: Annotated[AnyOptimizer, Field(discriminator="kind")]
    schedule: Annotated[AnySchedule, Field(discriminator="kind")]
    strategy: Annotated[AnyStrategy, Field(discriminator="kind")]
    train: Train
    checkpoint: Checkpoint
    evaluate: Evaluate
    register_: Annotated[Register, Field(alias="register")]
    tracking: Tracking

    @model_validator(mode="after")
    def sections_agree(self) -> Self:
        if self.input.validation is None:
            stopping = self.train.early_stopping
            watched = {"checkpoint.monitor": self.checkpoint.monitor}
            if stopping:
                watched["train.early_stopping.monitor"] = stopping.monitor
            for key, monitor in watched.items():
                if monitor.startswith("validation/"):
                    raise ValueError(
                        f"{key} = '{monitor}' needs a validation split, and input.validation is null: "
                        f"set {key}={monitor.replace('validation', 'train')} or give input.validation"
                    )
        if (frozen := self.train.frozen_epochs) is not None:
            if not self.model.freeze:
                raise ValueError(
                    f"train.frozen_epochs = {frozen}: model.freeze = [] freezes nothing. Name layers there, or set "
                    "train.frozen_epochs=null"
                )
            if frozen >= self.train.epochs:
                raise ValueError(
                    f"train.frozen_epochs = {frozen} leaves none of train.epochs = {self.train.epochs} to train all "
                    "layers in: give fewer, or train.frozen_epochs=null, which keeps them frozen"
                )
        cluster = self.strategy.cluster
        if cluster is not None and cluster.min_workers is not None:
            if self.train.global_batch_size is None:
                raise ValueError(
                    f"strategy.min_workers = {cluster.min_workers}: a step keeps its examples, whoever is left. "
                    "Give train.global_batch_size, and train.per_replica_batch_size=null"
                )
            if cluster.workers not in (counts := self.worker_counts) or counts[-1] != cluster.min_workers:
                raise ValueError(
                    f"train.global_batch_size = {self.train.global_batch_size} must divide by the replicas of "
                    f"strategy.workers = {cluster.workers} and of strategy.min_workers = {cluster.min_workers}"
                )
        kind, loop = self.strategy.kind, self.train.loop
        if loop not in self.strategy.loops:
            allowed = " or ".join(self.strategy.loops)
            raise ValueError(
                f"train.loop = '{loop}': strategy.kind={kind} is driven by {allowed}; set train.loop={allowed}, or "
                f"strategy.kind to one of {', '.join(k for k, s in strategy_kinds().items() if loop in s.loops)}"
            )
        for feature, reason in self.strategy.refuses.items():
            if FEATURES[feature].asked(self):
                key, _, value = feature.partition("=")
                value = value or json.dumps(self.flat()[key])
                instead = "" if "give " in reason else f": give {key}={FEATURES[feature].without}"
                raise ValueError(f"{key} = {value}: not under strategy.kind={kind}, because {reason}{instead}")
        return self

    @property
    def worker_counts(self) -> tuple[int, ...]:
        """The numbers of workers that a training may have, the most first: those of `strategy.min_workers` to
        `strategy.workers` whose replicas the global batch divides by."""
        cluster, size = self.strategy.cluster, self.train.global_batch_size or 0
        if cluster is None or cluster.min_workers is None:
            return (cluster.workers,) if cluster is not None else ()
        numbers = range(cluster.workers, cluster.min_workers - 1, -1)
        return tuple(number for number in numbers if size % cluster.num_replicas_of(number) == 0)

    @property
    def named_metrics(self) -> dict[str, str]:
        """Each metric that a key names, ``loss`` too, and the first key that does."""
        named = [(name, "train.metrics") for name in self.train.metrics]
        watched = {"checkpoint.monitor": self.checkpoint.monitor}
        if (stopping := self.train.early_stopping) is not None:
            watched["train.early_stopping.monitor"] = stopping.monitor
        watched["register.metric"] = self.register_.metric
        named += [(name.partition("/")[2], key) for key, name in watched.items()]
        return dict(sorted(dict(reversed(named)).items()))

    def to_json(self) -> dict[str, Any]:
        """Return the settings as nested JSON values, in the spelling of params.yaml."""
        return self.model_dump(mode="json", by_alias=True)

    def flat(self) -> dict[str, Any]:
        """Return the settings as ``{"section.key": value}``, in the spelling of ``--set``."""
        return flat(self.to_json())

    def digest(self, *affects: What) -> str:
        """Return the sha256 of every setting that affects the result; or of those that affect what is named."""
        marks = marks_of(Settings)
        chosen = {
            key: value
            for key, value in leaves(self.to_json(), whole=marks)
            if marks[key].what in (affects or ("result",))
        }
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


class Capability(NamedTuple):
    """What not every strategy can do."""

    asked: Callable[[Settings], bool]
    without: str
    """The value of its key that does not ask for it."""


# By the key (and value) that asks for it.
FEATURES = {
    "train.jit_compile": Capability(lambda s: s.train.jit_compile is True, "false"),
    "train.gradient_accumulation_steps": Capability(lambda s: s.train.gradient_accumulation_steps > 1, "1"),
    "train.dtype_policy=mixed_bfloat16": Capability(lambda s: s.train.dtype_policy == "mixed_bfloat16", "float32"),
    "train.dtype_policy=mixed_float16": Capability(lambda s: s.train.dtype_policy == "mixed_float16", "float32"),
    "train.dtype_policy=float64": Capability(lambda s: s.train.dtype_policy == "float64", "float32"),
    "train.deterministic": Capability(lambda s: s.train.deterministic, "false"),
    "train.profile_steps": Capability(lambda s: s.train.profile_steps is not None, "null"),
    "input.source=stream": Capability(lambda s: s.input.source == "stream", "array"),
}


def kinds_of(section: str) -> dict[str, type[Section]]:
    """Return the classes of a section that has a ``kind``, by kind; nothing for other sections."""
    field = Settings.model_fields.get(section)
    variants = get_args(field.annotation) if field is not None else ()
    return {get_args(v.model_fields["kind"].annotation)[0]: v for v in variants}
