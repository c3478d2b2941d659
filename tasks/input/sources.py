"""Which source reads a run's data, and the batches that it reads for each use of them."""

import logging
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.data import prepared_data, raw_data
from tasks.input.array import ArraySource
from tasks.input.augment import augment_batch
from tasks.input.batches import Batches, Source
from tasks.input.draws import pass_draws, with_partners
from tasks.input.order import Rows, carve
from tasks.input.stream import StreamSource
from tasks.records import PreparedDataset
from tasks.system.errors import UserError, cut

log = logging.getLogger(__name__)


def training_batches(
    settings: config.Settings,
    prepared: PreparedDataset,
    global_batch_size: int,
    num_replicas: int = 1,
    worker: int = 0,
    num_workers: int = 1,
    divisor: int = 1,
) -> Batches:
    """Return the training batches: shuffled anew each pass, augmented if asked, this worker's part of each global
    batch.

    It takes seven: the last four are a strategy's, and most callers leave them out.

    Args:
        settings: ``input``, ``train.seed`` and ``train.steps_per_epoch`` are read.
        prepared: the data.
        global_batch_size: examples in one step of all workers together.
        num_replicas: replicas of this worker; the dataset has one element for each.
        worker: number of this worker, from 0.
        num_workers: number of workers.
        divisor: a batch that does not divide by it is every worker's whole.

    Raises:
        UserError: the batch is larger than the split, or there is no such split.
    """
    section = settings.input
    split, rows = carve(prepared, section.validation, settings.train.seed)["train"]
    check_batch(global_batch_size, len(rows), prepared)
    chosen, megabytes = choose_source(section, prepared), f"{_bytes(prepared, split) / 1e6:,.1f} MB"
    log.info(
        "input     %s source (%s), %s of %s examples a step", chosen, megabytes, global_batch_size, f"{len(rows):,}"
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
        num_replicas=num_replicas,
        worker=worker,
        num_workers=num_workers,
        divisor=divisor,
    )


def ordered_batches(
    settings: config.Settings,
    prepared: PreparedDataset,
    use: str,
    global_batch_size: int,
    num_replicas: int = 1,
    worker: int = 0,
    num_workers: int = 1,
    divisor: int = 1,
) -> Batches:
    """Return the batches of ``validation`` or ``test``: every example once, always in the same order, never
    augmented and all counting the same; this worker's part of each.

    It takes eight: the last four are a strategy's, as in ``training_batches``, and most callers leave them out."""
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
        num_replicas=num_replicas,
        worker=worker,
        num_workers=num_workers,
        divisor=divisor,
    )


def augmented_examples(
    settings: config.Settings, prepared: PreparedDataset, most: int = 4, versions: int = 7
) -> npt.NDArray[np.uint8] | None:
    """Return training images from all over the split, each with versions of it that a training could read: uint8
    (images, 1 + versions, height, width, channels); None where nothing is augmented.

    Of several features with images it is the first one. ``input`` and ``train.seed`` are read.
    """
    section = settings.input.augmentation
    name = next((name for name, feature in prepared.features.items() if feature.kind == "image"), None)
    if name is None or not section.changes:
        return None
    split, rows = carve(prepared, settings.input.validation, settings.train.seed)["train"]
    chosen = rows[np.linspace(0, len(rows) - 1, min(most, len(rows)), dtype=int)]
    # The arrays are there also where a training reads a stream.
    x, *_ = ArraySource(prepared.splits[split], rows).mapped()
    images = (x[name] if isinstance(x, Mapping) else x)[chosen]
    repeated = np.repeat(images, versions, axis=0)
    draws, places = pass_draws(len(repeated), settings.train.seed, 0, section), np.arange(len(repeated))
    if section.mixes:
        places = with_partners(places, draws)
    changed, *_ = augment_batch((repeated[places],), draws[places], section, 0)
    return np.concatenate([images[:, None], changed.reshape(len(images), versions, *images.shape[1:])], axis=1)


def choose_source(section: config.Input, prepared: PreparedDataset) -> str:
    """Return ``array`` or ``stream``: what is asked for, else the array, which need not fit into memory."""
    if section.source == "stream" and prepared.raw_folder is None:
        raise UserError(
            f"input.source = 'stream': {_unlike_a_stream(prepared)}, and only TFDS' shards of an image and a class "
            "label each can be streamed. Give input.source=auto"
        )
    if section.source == "stream" and section.augmentation.mixes:
        key = "mixup" if section.augmentation.mixup else "cutmix"
        raise UserError(
            f"input.source = 'stream': input.augmentation.{key} mixes images of any two places, and a stream has those "
            f"that come next. Give input.source=auto, or input.augmentation.{key}=0"
        )
    return "stream" if section.source == "stream" else "array"


def _unlike_a_stream(prepared: PreparedDataset) -> str:
    """Return what the examples of a dataset are that has nothing to stream."""
    if prepared.kind != "tfds":
        return f"{prepared.name} is of kind {prepared.kind}"
    if names := [column.name for feature in prepared.features.values() for column in feature.columns]:
        return f"each example of {prepared.name} has the columns {cut(', '.join(names), 120)}"
    if prepared.target.task == "classification":
        return f"{prepared.name} has images without a class, which were left out when it was prepared"
    return f"the images of {prepared.name} have a target of the task {prepared.target.task}"


def check_batch(global_batch_size: int, num_examples: int, prepared: PreparedDataset) -> None:
    """Raise ``UserError`` when a global batch is larger than the training split."""
    if global_batch_size > num_examples:
        raise UserError(
            f"the global batch of {global_batch_size} examples is larger than the training split of {prepared.name}, "
            f"which has {num_examples}: lower train.per_replica_batch_size or train.global_batch_size"
        )


def check_division(validation: str | float | int | None, prepared: PreparedDataset) -> None:
    """Raise ``UserError`` when validation examples would be drawn from rows that belong together: a group's, or a
    time's."""
    if validation is None or isinstance(validation, str) or prepared.kind != "table":
        return
    described = config.read_description(config.project_root() / "data" / prepared.name)
    for key in ("group", "time"):
        if (column := getattr(described, key)) is None:
            continue
        place = f"data/{prepared.name}/params.yaml"
        makes_one = "" if "validation" in prepared.splits else f"Write `validation: 0.1` into {place}, then give "
        raise UserError(
            f"input.validation = {validation}: the rows of {prepared.name} belong together by dataset.{key} = "
            f"'{column}', and such a share would be drawn without it. {makes_one or 'Give '}"
            "input.validation=validation, or input.validation=null"
        )


def verify(section: config.Input, prepared: PreparedDataset) -> None:
    """Compare what these settings read with what the data version says.

    Raises:
        UserError: names the file that is missing, damaged or changed, and what makes it again.
    """
    prepared_data.verify(prepared)
    if choose_source(section, prepared) == "stream":
        raw_data.verify(prepared)


def _source(
    section: config.Input,
    prepared: PreparedDataset,
    split: str,
    rows: Rows,
    class_weights: tuple[float, ...] | None = None,
) -> Source:
    if choose_source(section, prepared) == "array":
        fits = _bytes(prepared, split) <= section.memory_budget_bytes
        return ArraySource(prepared.splits[split], rows, class_weights, fits_accelerator=fits)
    return StreamSource(prepared, split, rows, section.cache, section.shuffle_buffer, class_weights)


def check_class_weights(section: config.Train, prepared: PreparedDataset) -> None:
    """Raise ``UserError`` when examples are to count by their classes, and have no single one."""
    if section.class_weights is not None and prepared.target.task != "classification":
        raise UserError(
            f"train.class_weights = '{section.class_weights}': {prepared.name} is a {prepared.target.task}, whose "
            "examples are of no single class. Give train.class_weights=null"
        )


def _class_weights(
    section: config.Train, prepared: PreparedDataset, split: str, rows: Rows
) -> tuple[float, ...] | None:
    """Return how much an example of each class counts: as many examples as classes, divided by how often the class is
    among these rows (scikit-learn's ``balanced``; King and Zeng, "Logistic regression in rare events data", 2001)."""
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
