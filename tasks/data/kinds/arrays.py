"""NumPy arrays with images or numbers and their targets: a .npz file, or a folder of .npy files."""

import sys
from collections.abc import Generator
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.data.encoding.cells import spelled
from tasks.data.encoding.inputs import BadInput, load_arrays
from tasks.data.kinds import Block, Examples, missing_words
from tasks.data.samples import notes_on_alike
from tasks.data.splits import WORDS, split_rows
from tasks.records import Feature, HeldOut, Target
from tasks.system.errors import UserError, listed

CHUNK_BYTES = 8 * 2**20
MAX_CLASSES = 100_000
MAX_FRACTION_CLASSES = 20
"""The most distinct whole numbers stored as floats (0.0, 1.0) that are classes, as in a table."""
CHANNELS = (1, 3, 4)
Array = npt.NDArray[Any]


def examples(dataset: config.Arrays) -> Examples:
    """Return the examples in `x_train` and `y_train` (and `x_val`, `y_val`, `x_test`, `y_test`), or in `x` and `y`.

    Names may be in upper case (`X`, `X_train`), and `valid` or `validation` may replace `val`.

    `x` contains images, uint8 (n, height, width) or (n, height, width, channels), or k numbers, any real dtype (n, k).
    `y` contains classes (n,), as whole numbers or words; k labels, 0 and 1 (n, k), or one class if each row has a
    single 1; or the numbers of a regression, fractions (n,) or (n, k). ``dataset.task`` overrides this. Objects, which
    NumPy would unpickle, are never read.

    Raises:
        UserError: no such arrays, or a wrong dtype, shape or number of examples.
    """
    try:
        splits = _splits(dataset, load_arrays(config.project_root() / dataset.source))
        # Bytes are UTF-8.
        given = {split: np.char.decode(y, "utf-8") if y.dtype.kind == "S" else y for split, (_, y) in splits.items()}
    except (BadInput, UnicodeDecodeError) as error:
        raise UserError(f"dataset.source = '{dataset.source}': {error}") from None
    name, feature = _feature(dataset, splits["train"][0])
    target, labels = _target(dataset, given)
    rows: dict[str, npt.NDArray[np.int64]] = {}
    held_out = None
    if "test" not in splits:
        if target.task == "classification":
            rows = split_rows(labels["train"], target.class_names, dataset)
        else:
            rows = split_rows(np.zeros(len(labels["train"]), np.int64), ("all",), dataset)
        held_out = HeldOut(num_examples=len(rows["test"]), seed=dataset.seed)
    return Examples(
        version="1",
        features={name: feature},
        target=target,
        splits=tuple({**splits, **rows}),
        blocks=partial(_blocks, dataset, splits, rows, (name, feature), labels),
        held_out=held_out,
        name_of=(lambda split, row: f"row {rows[split][row] if split in rows else row}") if rows else None,
    )


def _splits(dataset: config.Arrays, members: dict[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Return the inputs and targets of each split; refuse arrays that do not match."""
    named: dict[str, dict[str, str]] = {}
    for name in sorted(members):
        role, _, word = name.lower().partition("_")
        if role in ("x", "y") and word in ("", *WORDS):
            own = named.setdefault(WORDS.get(word, "all"), {})
            if role in own:
                raise UserError(f"dataset.source = '{dataset.source}' has {own[role]} and {name}: keep one of them")
            own[role] = name
    if "train" in named:
        named.pop("all", None)
    for there in (next(iter(own.values())) for own in named.values() if len(own) == 1):
        absent = ("y" if there[0] in "xX" else "x") + there[1:]
        raise UserError(f"dataset.source = '{dataset.source}' has {there} but not {absent}: give both or neither")
    if "train" not in named and set(named) != {"all"}:
        raise UserError(
            f"dataset.source = '{dataset.source}' has the arrays {', '.join(sorted(members)) or 'none'}. Allowed: "
            "x_train and y_train (and x_val and y_val, x_test and y_test), or x and y"
        )
    if unused := members.keys() - {name for own in named.values() for name in own.values()}:
        print(f"not used: the {'array' if len(unused) == 1 else 'arrays'} {listed(sorted(unused))}", file=sys.stderr)
    splits = {
        split.replace("all", "train"): (members[named[split]["x"]], members[named[split]["y"]])
        for split in ("all", "train", "validation", "test")
        if split in named
    }
    first, _ = splits["train"]
    for split, (x, y) in splits.items():
        if not x.shape or not x.shape[0] or x.shape[:1] != y.shape[:1]:
            raise UserError(
                f"dataset.source = '{dataset.source}': for {split}, x has the shape {x.shape} and y has the shape "
                f"{y.shape}. Both need one row for each example, and at least one example"
            )
        if x.shape[1:] != first.shape[1:] or x.dtype != first.dtype:
            raise UserError(
                f"dataset.source = '{dataset.source}': x is {x.dtype} {x.shape} for {split}, but {first.dtype} "
                f"{first.shape} for train. All splits need the same dtype and the same shape of an example"
            )
    return splits


def _blocks(
    dataset: config.Arrays,
    splits: dict[str, tuple[Array, Array]],
    rows: dict[str, npt.NDArray[np.int64]],
    named: tuple[str, Feature],
    labels: dict[str, Array],
) -> Generator[Block]:
    """Yield the examples of all splits; ``rows`` divides the training split if the source has no test split."""
    name, feature = named
    for split, (x, _) in splits.items():
        of_split = np.full(x.shape[0], split, object)
        for own, chosen in rows.items() if split == "train" else ():
            of_split[chosen] = own
        rows_a_part = max(1, CHUNK_BYTES // max(1, int(np.prod(x.shape[1:])) * x.dtype.itemsize))
        for first in range(0, x.shape[0], rows_a_part):
            with np.errstate(over="ignore"):
                part = x[first : first + rows_a_part].astype(feature.dtype, copy=False)
            if feature.kind == "number" and not np.isfinite(part).all():
                row = first + int(np.argwhere(~np.isfinite(part))[0, 0])
                raise UserError(
                    f"dataset.source = '{dataset.source}': x has a value in row {row} that is not finite as "
                    f"{feature.dtype}. Replace it, or remove the row"
                )
            to, told = of_split[first : first + len(part)], labels[split][first : first + len(part)]
            for own in sorted(set(to)):
                yield Block(own, {name: part[to == own].reshape(-1, *feature.shape)}, told[to == own])


def _feature(dataset: config.Arrays, x: Array) -> tuple[str, Feature]:
    """Return the only feature and its name."""
    shape = x.shape[1:] if len(x.shape) == 4 else (*x.shape[1:], 1)
    if x.dtype == np.uint8 and len(shape) == 3 and shape[2] in CHANNELS:
        return "image", Feature(kind="image", shape=shape, dtype="uint8")
    if x.dtype.kind in "iufb" and len(x.shape) == 2 and x.shape[1]:
        return "number", Feature(kind="number", shape=x.shape[1:], dtype="float32")
    hint = ""
    if len(x.shape) == 4 and x.shape[1] in CHANNELS:
        hint = ". np.moveaxis(x, 1, -1) puts channels last"
    elif len(x.shape) > 2 and x.dtype != np.uint8 and x.dtype.kind in "iufb" and x.size:
        hint = (
            ". Pixels from 0 to 1 become uint8 by (x * 255).astype('uint8'), up to 255 by x.astype('uint8'), up to "
            "4095 by (x // 16).astype('uint8'), up to 65535 by (x // 257).astype('uint8'); yours range from "
            f"{float(x.min()):g} to {float(x.max()):g}"
        )
    raise UserError(
        f"dataset.source = '{dataset.source}': x is {x.dtype} {x.shape}. Allowed: images, uint8 (n, height, width) or "
        f"(n, height, width, channels) with {' or '.join(map(str, CHANNELS))} channels; or numbers (n, k){hint}"
    )


def _target(dataset: config.Arrays, found: dict[str, Array]) -> tuple[Target, dict[str, Array]]:
    """Return the target, and the labels of each split as in ``records.PreparedSplit``."""
    if len({own.shape[1:] for own in found.values()}) > 1 or found["train"].ndim > 2:
        shapes = ", ".join(str(own.shape) for own in found.values())
        raise UserError(
            f"dataset.source = '{dataset.source}': the labels have the shapes {shapes}. Allowed: (n,) or (n, k), with "
            "the same k for all splits"
        )
    every = np.concatenate([own.reshape(len(own), -1) for own in found.values()])
    width = every.shape[1]
    is_binary = every.dtype.kind in "iufb" and bool(np.isin(every, (0, 1)).all())
    is_one_hot = width > 1 and is_binary and bool((every.sum(1) == 1).all())
    task = dataset.task
    if task == "auto" and width == 1 and every.dtype.kind == "f":
        task = _task_of_fractions(dataset, every)
    elif task == "auto":
        is_of_classes = width == 1 or is_one_hot
        task = "classification" if is_of_classes else "multilabel" if is_binary else "regression"
    refused = f"dataset.source = '{dataset.source}', dataset.task = '{dataset.task}': the labels are {every.dtype}"
    labels: Array
    is_whole = every.dtype.kind in "iub" or (every.dtype.kind == "f" and _are_whole(every))
    if task == "regression" and every.dtype.kind in "iufb" and width:
        if not np.isfinite(every).all():
            row = int(np.argwhere(~np.isfinite(every))[0, 0])
            raise UserError(f"{refused}, and row {row} of them is not finite. Remove the example, or replace the label")
        target, labels = Target(task="regression", num_outputs=width), every.astype(np.float32)
    elif task == "multilabel" and is_binary and width:
        names = tuple(map(str, range(width)))
        target, labels = Target(task="multilabel", num_outputs=width, class_names=names), every.astype(np.uint8)
    elif task == "classification" and is_one_hot:
        target, labels = Target.of_classes(map(str, range(width))), every.argmax(1).astype(np.int64)
    elif task == "classification" and width == 1 and (is_whole or every.dtype.kind == "U"):
        names, labels = _classes(dataset, every)
        if labels.min() == labels.max():
            raise UserError(f"{refused}, and all labels are '{names[labels[0]]}': a classification needs two classes")
        target = Target.of_classes(names)
    else:
        raise UserError(
            f"{refused} (n, {width}). Allowed: classes (n,), whole numbers or words; 0 and 1 (n, labels); or, for a "
            "regression, numbers (n,) or (n, k)"
        )
    ends = np.cumsum([len(own) for own in found.values()])[:-1]
    return target, dict(zip(found, np.split(labels, ends), strict=True))


def _task_of_fractions(dataset: config.Arrays, labels: Array) -> Literal["classification", "regression"]:
    """Return the task for float labels; print it if they are few distinct whole numbers."""
    values = np.unique(labels)
    if len(values) > min(MAX_FRACTION_CLASSES, len(labels) / 2) or not _are_whole(values):
        return "regression"
    print(
        f"the labels of {dataset.name} are {len(values)} whole numbers of the type {labels.dtype}, so they are read as "
        f"classes ({listed([f'{value:.0f}' for value in values], 3)}). For a regression: --set dataset.task=regression",
        file=sys.stderr,
    )
    return "classification"


def _are_whole(numbers: Array) -> bool:
    return bool((np.isfinite(numbers) & (numbers == np.rint(numbers))).all())


def _classes(dataset: config.Arrays, labels: Array) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
    """Return the names of the classes, as for a table, and the class of each example, int64 (n,)."""
    values, places = np.unique(labels, return_inverse=True)
    numbers = places.ravel().astype(np.int64)
    if labels.dtype.kind == "U":
        names, of_value = np.unique([spelled(str(value)) for value in values], return_inverse=True)
        classes = tuple(map(str, names))
        doubtful = [f"'{one}' is a class; if the label is missing there, remove them" for one in missing_words(classes)]
        for note in doubtful + notes_on_alike(classes, "class"):
            print(f"the labels of {dataset.name}: {note}", file=sys.stderr)
        return classes, of_value.astype(np.int64)[numbers]
    lowest, highest = int(values[0]), int(values[-1])
    # -1 often means that an example has no class; only -1 and 1 together are two classes.
    if (lowest < 0 and values.tolist() != [-1, 1]) or len(values) > MAX_CLASSES:
        raise UserError(
            f"dataset.source = '{dataset.source}': the labels range from {lowest} to {highest}, but classes are at "
            f"most {MAX_CLASSES:,} whole numbers from 0 on, or -1 and 1. Remove examples without a class, write "
            "classes as words, or set dataset.task=regression if the numbers are quantities"
        )
    return tuple(str(int(value)) for value in values), numbers
