"""The source of a run's data, and its batches for training, validation and test."""

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.input.array import ArraySource
from tasks.input.augment import augment_batch
from tasks.input.batches import WHOLE, Batches, InputShare
from tasks.input.draws import pass_draws, with_partners
from tasks.input.order import Rows, carve
from tasks.records import PreparedDataset
from tasks.system import units
from tasks.system.errors import UserError

log = logging.getLogger(__name__)


def training_batches(
    settings: config.Settings,
    prepared: PreparedDataset,
    global_batch_size: int,
    share: InputShare = WHOLE,
) -> Batches:
    """Return this worker's part of the training batches, reshuffled in each pass, and augmented if set.

    ``input``, ``train.seed`` and ``train.steps_per_epoch`` are read. The global batch is that of all workers together.

    Raises:
        UserError: the batch is larger than the split, or the split does not exist.
    """
    section = settings.input
    split, rows = carve(prepared, section.validation, settings.train.seed)["train"]
    check_batch(global_batch_size, len(rows), prepared)
    chosen, length = choose_source(section, prepared), units.size(_bytes(prepared, split))
    log.info(
        "input     %s source (%s), %s of %s examples per step", chosen, length, global_batch_size, f"{len(rows):,}"
    )
    source = _source(section, prepared, split, rows, _class_weights(settings.train, prepared, split, rows))
    return Batches(
        len(rows),
        global_batch_size,
        section.drop_remainder,
        settings.train.steps_per_epoch,
        source=source,
        seed=settings.train.seed,
        shuffle=section.shuffle,
        augmentation=section.augmentation if section.augmentation.changes else None,
        num_classes=prepared.target.num_outputs if prepared.target.task == "classification" else 0,
        prefetch=section.prefetch,
        share=share,
    )


def ordered_batches(
    settings: config.Settings,
    prepared: PreparedDataset,
    use: str,
    global_batch_size: int,
    share: InputShare = WHOLE,
) -> Batches:
    """Return this worker's part of the batches of ``validation`` or ``test``: every example once, always in the same
    order, without augmentation or weights."""
    section = settings.input
    split, rows = carve(prepared, section.validation, settings.train.seed)[use]
    alike = prepared.splits[split].model_copy(update={"weights": None})
    prepared = prepared.model_copy(update={"splits": {**prepared.splits, split: alike}})
    return Batches(
        len(rows),
        min(global_batch_size, len(rows)),
        drop_remainder=False,
        source=_source(section, prepared, split, rows),
        prefetch=section.prefetch,
        share=share,
    )


def augmented_examples(settings: config.Settings, prepared: PreparedDataset) -> npt.NDArray[np.uint8] | None:
    """Return four training images, evenly spread over the split, each with seven augmented versions: uint8
    (4, 8, height, width, channels); None without augmentation.

    Of several image features, only the first is used. ``input`` and ``train.seed`` are read.
    """
    section = settings.input.augmentation
    name = next((name for name, feature in prepared.features.items() if feature.kind == "image"), None)
    if name is None or not section.changes:
        return None
    split, rows = carve(prepared, settings.input.validation, settings.train.seed)["train"]
    versions, chosen = 7, rows[np.linspace(0, len(rows) - 1, min(4, len(rows)), dtype=int)]
    # The arrays exist even if training reads a stream.
    x, *_ = ArraySource(prepared.splits[split], rows).mapped()
    images = (x[name] if isinstance(x, Mapping) else x)[chosen]
    repeated = np.repeat(images, versions, axis=0)
    draws, places = pass_draws(len(repeated), settings.train.seed, 0, section), np.arange(len(repeated))
    if section.mixes:
        places = with_partners(places, draws)
    changed, *_ = augment_batch((repeated[places],), draws[places], section, 0)
    return np.concatenate([images[:, None], changed.reshape(len(images), versions, *images.shape[1:])], axis=1)


def choose_source(section: config.Input, prepared: PreparedDataset) -> str:
    """Return the chosen source, ``array`` or ``stream``; ``auto`` is the array, which need not fit into memory."""
    if section.source == "stream" and prepared.raw_folder is None:
        raise UserError(
            f"input.source = 'stream': {prepared.name} cannot be streamed. Only TFDS datasets can, if each "
            "example is an image with a class. Set input.source=auto"
        )
    if section.source == "stream" and section.augmentation.mixes:
        key = "mixup" if section.augmentation.mixup else "cutmix"
        raise UserError(
            f"input.source = 'stream': input.augmentation.{key} mixes any two images, but a stream has only the "
            f"next ones. Set input.source=auto, or input.augmentation.{key}=0"
        )
    return "stream" if section.source == "stream" else "array"


def check_batch(global_batch_size: int, num_examples: int, prepared: PreparedDataset) -> None:
    """Raise ``UserError`` if a global batch is larger than the training split."""
    if global_batch_size > num_examples:
        raise UserError(
            f"the global batch of {global_batch_size} examples is larger than the training split of {prepared.name}, "
            f"which has {num_examples}: lower train.per_replica_batch_size or train.global_batch_size"
        )


def check_division(validation: str | float | int | None, prepared: PreparedDataset) -> None:
    """Raise ``UserError`` if a random validation split would ignore the groups or times of rows."""
    if validation is None or isinstance(validation, str) or prepared.kind != "table":
        return
    described = config.read_description(config.project_root() / "data" / prepared.name)
    for key in ("group", "time"):
        if (column := getattr(described, key)) is None:
            continue
        place = f"data/{prepared.name}/params.yaml"
        makes_one = "" if "validation" in prepared.splits else f"Write `validation: 0.1` into {place}, then set "
        raise UserError(
            f"input.validation = {validation}: the rows of {prepared.name} belong together by dataset.{key} = "
            f"'{column}', but a random validation split would ignore it. {makes_one or 'Set '}"
            "input.validation=validation, or input.validation=null"
        )


def _source(
    section: config.Input,
    prepared: PreparedDataset,
    split: str,
    rows: Rows,
    class_weights: tuple[float, ...] | None = None,
) -> Any:
    if choose_source(section, prepared) == "array":
        fits = _bytes(prepared, split) <= section.memory_budget_bytes
        return ArraySource(prepared.splits[split], rows, class_weights, fits_accelerator=fits)
    from tasks.input.stream import StreamSource  # Imports the builders of TFDS.

    return StreamSource(prepared, split, rows, section.cache, section.shuffle_buffer, class_weights)


def check_class_weights(section: config.Train, prepared: PreparedDataset) -> None:
    """Raise ``UserError`` if examples are weighted by class but do not have a single class each."""
    if section.class_weights is not None and prepared.target.task != "classification":
        raise UserError(
            f"train.class_weights = '{section.class_weights}': {prepared.name} is a {prepared.target.task}, whose "
            "examples do not have exactly one class each. Set train.class_weights=null"
        )


def _class_weights(
    section: config.Train, prepared: PreparedDataset, split: str, rows: Rows
) -> tuple[float, ...] | None:
    """Return the weight of each class: the number of rows, divided by the number of classes and the count of the class
    (scikit-learn's ``balanced``; King and Zeng, "Logistic regression in rare events data", 2001)."""
    if section.class_weights is None:
        return None
    target = prepared.target
    labels = np.load(config.project_root() / prepared.splits[split].labels, mmap_mode="r")[rows]
    counts = np.bincount(labels, minlength=target.num_outputs)
    weights: list[float] = (len(rows) / (target.num_outputs * np.maximum(counts, 1))).tolist()
    return tuple(weights)


def _bytes(prepared: PreparedDataset, split: str) -> int:
    row_bytes = sum(
        math.prod(feature.shape) * np.dtype(feature.dtype).itemsize for feature in prepared.features.values()
    )
    return prepared.splits[split].num_examples * row_bytes
