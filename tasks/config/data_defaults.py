"""Chooses settings for a dataset without a recipe by its task, features and size, and gives the reasons.

The values in params.yaml are for the dataset that it names. The numbers here are rules of thumb that were tried on the
datasets of docs/data.md; ``--set`` overrides them.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

MOST_STAGES = 6
PHOTOGRAPH_PIXELS = 64
SMALL = 1000
"""Training examples; a regression on fewer has a lower learning rate."""


class Choice(NamedTuple):
    """Some settings, and the reason for them."""

    values: dict[str, Any]
    """By ``section.key``."""
    reason: str


def choose(manifest: Mapping[str, Any]) -> list[Choice]:
    """Return the settings that suit a prepared dataset.

    Args:
        manifest: ``records.PreparedDataset`` as JSON.
    """
    features, target, splits = manifest["features"], manifest["target"], manifest["splits"]
    num_examples = splits["train"]["num_examples"]
    kinds = {feature["kind"] for feature in features.values()}
    if kinds == {"image"} and len(features) == 1:
        chosen = [_of_images(next(iter(features.values()))["shape"])]
    elif kinds == {"text"}:
        values = {"model.name": "text_cnn", "model.options": {}, "schedule.learning_rate": 0.001}
        chosen = [Choice({**values, **NO_AUGMENTATION}, "only texts: convolutions over words")]
    else:
        # R2 of three small tables, three seeds: 0.329, 0.636, 0.927 with 0.002; 0.361, 0.691, 0.951 with 0.0005.
        is_small = target["task"] == "regression" and num_examples < SMALL
        values = {"model.name": "mixed", "model.options": {}, "schedule.learning_rate": 0.0005 if is_small else 0.002}
        shown = f"{_listed(kinds)}: a perceptron on all of them together"
        if is_small:
            shown += ", with a learning rate of 0.0005 because there are few rows"
        chosen = [Choice({**values, **NO_AUGMENTATION}, shown)]
    return [*chosen, _of_size(num_examples), _of_task(target, splits)]


FACTORS = "translation", "rotation", "zoom", "brightness", "contrast", "erasing", "mixup", "cutmix"
NO_AUGMENTATION: dict[str, Any] = {
    "input.augmentation.flip": False,
    "input.augmentation.crop_padding": 0,
    "input.augmentation.rand_augment": None,
    "input.augmentation.custom": None,
    "input.augmentation.options": {},
    **{f"input.augmentation.{factor}": 0.0 for factor in FACTORS},
}

CHOSEN = (
    "model.name", "model.options", "schedule.learning_rate", *NO_AUGMENTATION, "train.per_replica_batch_size",
    "train.global_batch_size", "train.epochs", "train.loss", "input.validation", "evaluate.checkpoint",
    "checkpoint.monitor", "register.metric", "register.minimum", "register.floors", "register.ceilings",
)  # fmt: skip
"""All settings that may be chosen."""


def _of_images(shape: list[int]) -> Choice:
    height, width, channels = shape
    side = min(height, width)
    # Each stage halves the image; the last one should see 4 to 7 pixels a side.
    stages = min(MOST_STAGES, max(2, round(math.log2(side / 5))))
    coloured = channels == 3
    photographs = coloured and side >= PHOTOGRAPH_PIXELS
    # Accuracy with 300 drawn shapes in random colours: 0.33, as by guessing, with 0.003, and 1.00 with 0.001. With 300
    # grey images of MNIST, after as many steps: 0.93 with 0.003 and 0.82 with 0.00075.
    learning_rate = 0.001 if coloured else 0.003
    values = {
        "model.name": "vgg",
        "model.options": {"filters": [24 + 16 * stage for stage in range(stages)], "dropout": 0.2},
        "schedule.learning_rate": learning_rate,
        **NO_AUGMENTATION,
        "input.augmentation.flip": photographs,
        "input.augmentation.crop_padding": max(1, side // 10),
    }
    colour = "coloured" if coloured else "grey"
    shown = (
        f"{colour} images of {height} x {width} pixels: a learning rate of {learning_rate}, {stages} stages that halve "
        "them, crops moved by a tenth"
    )
    return Choice(values, f"{shown}{', flipped because photographs may be' if photographs else ''}")


def _of_size(num_examples: int) -> Choice:
    # About 50 steps an epoch, and at least 1,200 in all.
    batch_size = min(128, max(8, 2 ** round(math.log2(max(num_examples / 50, 1)))))
    batch_size = min(batch_size, num_examples)
    steps = math.ceil(num_examples / batch_size)
    epochs = min(40, max(10, math.ceil(1200 / steps)))
    values = {
        "train.per_replica_batch_size": batch_size,
        "train.global_batch_size": None,
        "train.epochs": epochs,
        "evaluate.checkpoint": "best",
    }
    return Choice(values, f"{num_examples:,} examples to train on: {epochs} epochs of about {steps} steps")


def _of_task(target: Mapping[str, Any], splits: Mapping[str, Any]) -> Choice:
    values: dict[str, Any] = {"train.loss": "auto", "register.floors": {}, "register.ceilings": {}}
    if "validation" in splits:
        values["input.validation"] = "validation"
    if target["task"] == "regression":
        values |= {"checkpoint.monitor": "validation/loss", "register.metric": "test/r2", "register.minimum": 0.0}
        return Choice(values, "a regression: registered if it is not worse than the mean of its target")
    if target["task"] == "multilabel":
        values |= {"checkpoint.monitor": "validation/micro_f1", "register.metric": "test/micro_f1"}
        return Choice({**values, "register.minimum": None}, "several labels per example: measured by their F1")
    counts = splits["test" if "test" in splits else "train"]["class_counts"]
    guess = round(max(counts) / max(sum(counts), 1), 4)
    values |= {"checkpoint.monitor": "validation/accuracy", "register.metric": "test/accuracy"}
    reason = f"{target['num_outputs']} classes: registered if it is not worse than the most frequent one, {guess:.1%}"
    return Choice({**values, "register.minimum": guess}, reason)


def _listed(kinds: set[str]) -> str:
    names = {"image": "images", "number": "numbers", "category": "categories", "text": "texts"}
    *others, last = sorted(names[kind] for kind in kinds)
    return f"{', '.join(others)} and {last}" if others else last
