"""A table: CSV, TSV, Parquet or JSON lines, with a target column; the others are numbers, words or images."""

import math
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks import config
from tasks.data.encoding import Encoder, cells
from tasks.data.encoding.cells import BadValue, Values
from tasks.data.kinds import Block, Examples, Metadata
from tasks.data.kinds._columns import Fitted, Statistics
from tasks.data.kinds._table_rows import Rows, ScannedTable
from tasks.data.kinds._table_splits import NAMES, split
from tasks.data.table_columns import LOOKED_AT, fill_in
from tasks.data.table_files import TableFile, num_rows_of
from tasks.data.table_header import doubtful_header, find_header, open_file
from tasks.records import HeldOut
from tasks.system import background, machine
from tasks.system.errors import UserError, cut

BLOCK_BYTES = 8 * 2**20
"""Of the rows that are encoded at once, all features together."""
AHEAD = 4
"""How many blocks are encoded while one is written, however many cores there are: each takes its own memory."""


def guess(dataset: config.Table) -> tuple[config.Table, list[str]]:
    """Return the dataset with what the data say of its columns and its task, and lines that tell it.

    Raises:
        UserError: the file cannot be read, no column has the name of one that the dataset names, none is left to learn
            from, or what is to be learnt may be read in two ways.
    """
    dataset, said = find_header(dataset)
    file = open_file(dataset)
    said += [text for text in [doubtful_header(file)] if text]
    try:
        filled, lines = fill_in(dataset, file, may_guess=True)
    except UserError as error:
        raise UserError("; ".join([*said, str(error)])) from None
    if dataset.task == "auto" and filled.task == "classification":
        _refuse_labels_in_one_text(filled, file)
    if lines and all(column.kind == "ignore" for column in (filled.columns or {}).values()):
        # Here, where it is known why: a stage that reads params.yaml does not know.
        taken = cut("; ".join(" ".join(line.split()) for line in lines[1:]), 300)
        raise UserError(
            f"dataset.source = '{dataset.source}': no column is left to learn from. What they were taken for: {taken}. "
            "Say what one is: --set dataset.columns.NAME=number, datetime, category, text or image"
        )
    return filled, [*said, *lines]


def _refuse_labels_in_one_text(dataset: config.Table, file: TableFile) -> None:
    """Ask what is meant where the values of a target look like labels: hot, wet and hot;wet would be three classes."""
    (target,) = dataset.target
    texts: set[str] = set()
    for chunk in file.first({target: "repeated"}, LOOKED_AT):
        values = list(cells.rows_of(chunk[target]))
        missing = cells.is_missing(values, dataset.not_missing).tolist()
        texts |= {cells.spelled(value) for value, absent in zip(values, missing, strict=True) if not absent}
    for mark in (";", "|", ","):
        several = {text for text in texts if mark in text}
        labels = {part.strip() for text in several for part in text.split(mark)}
        if labels & texts and len(labels | texts - several) < len(texts):
            one = min(several, key=lambda text: (-sum(part.strip() in texts for part in text.split(mark)), text))
            raise UserError(
                f"dataset.target = '{target}': {cut(repr(one), 80)} may be {one.count(mark) + 1} labels or one class, "
                f"for parts of it are values, too. Say --set \"dataset.separator='{mark}'\" if it is labels, or --set "
                f"dataset.task=classification if it is a class (dataset.source = '{dataset.source}')"
            )


def examples(dataset: config.Table, block_bytes: int = BLOCK_BYTES) -> Examples:
    """Return the rows of a table, in their order, in blocks of so many bytes, or of one row where that has more.

    All numbers and datetimes together are the feature ``number``, all categories ``category``; each column of texts and
    each of images is a feature by itself. Vocabularies, what stands for a missing number, and the length of texts are
    taken of the training split alone.

    Raises:
        UserError: no such file or columns, a value that its column cannot hold, rows that no split can have.
    """
    file = open_file(dataset)
    dataset, _ = fill_in(dataset, file, may_guess=False)
    table = ScannedTable(dataset, file)
    splits, made = split(table)
    if table.weights is not None and not table.weights[splits == NAMES.index("train")].any():
        raise table.refuse("weight", "no row of the training split counts: all have 0")
    fitted = _fit(table, splits)
    held_out = None
    if "test" in made and dataset.time is None:
        held_out = HeldOut(num_examples=int((splits == NAMES.index("test")).sum()), seed=dataset.seed)

    return Examples(
        version="1",
        features=fitted.features,
        target=table.target,
        splits=tuple(name for number, name in enumerate(NAMES) if (splits == number).any()),
        blocks=partial(_blocks, table, fitted, splits, made, block_bytes),
        vocabularies=fitted.vocabularies,
        held_out=held_out,
        name_of=lambda split, row: f"row {np.flatnonzero(splits == NAMES.index(split))[row] + 1}",
        metadata_of=partial(_metadata, table, splits) if dataset.metadata else None,
    )


def _metadata(table: ScannedTable, splits: npt.NDArray[np.int8], split: str) -> dict[str, Metadata]:
    """Return the columns of a split that are not features; blocks that were read left out rows in ``splits``."""
    own = splits == NAMES.index(split)
    found = {}
    for name, values in table.metadata.items():
        some = values[own].tolist()
        missing = cells.is_missing(some, table.dataset.not_missing).tolist()
        given = [None if absent else value for value, absent in zip(some, missing, strict=True)]
        found[name] = Metadata(table.dataset.metadata[name], given)
    return found


def _fit(table: ScannedTable, splits: npt.NDArray[np.int8]) -> Fitted:
    """Return the features of a table, with what is taken of its training split."""
    dataset, decimal = table.dataset, table.dataset.decimal or "."
    others = {name: one for name, one in table.kinds.items() if one.kind != "image"}
    columns = {name: Statistics(name, one, decimal, dataset.not_missing) for name, one in others.items()}
    for first, chunk in table.chunks(table.features):
        rows = np.flatnonzero(splits[first : first + num_rows_of(chunk)] == 0)
        for name, statistics in columns.items():
            try:
                statistics.add(chunk[name][rows])
            except BadValue as bad:
                raise table.refused(bad, first + int(rows[bad.row])) from None
    where = f"dataset.source = '{dataset.source}'"
    return Fitted.of(columns.values(), table.shapes, where, dataset.max_vocabulary, dataset.text_length)


def _blocks(
    table: ScannedTable, fitted: Fitted, splits: npt.NDArray[np.int8], made: set[str], block_bytes: int
) -> Iterator[Block]:
    """Yield the examples of all splits; the next ones are encoded while one is written."""
    features = fitted.features.values()
    rows_a_block = max(1, block_bytes // sum(np.dtype(one.dtype).itemsize * math.prod(one.shape) for one in features))

    def some_rows() -> Iterator[tuple[str, Rows, dict[str, Values]]]:
        for first, chunk in table.chunks(table.features):
            of_row = splits[first : first + num_rows_of(chunk)]
            for number, name in enumerate(NAMES):
                rows = np.flatnonzero(of_row == number)
                for place in range(0, len(rows), rows_a_block):
                    some = rows[place : place + rows_a_block]
                    yield name, first + some, {column: values[some] for column, values in chunk.items()}

    # Where there are images, their own threads have enough to do.
    threads = 1 if any(one.kind == "image" for one in features) else min(machine.usable_cores(), AHEAD)
    with ThreadPoolExecutor(machine.usable_cores()) as pictures:
        encoder = _RowEncoder(fitted, table.folder, pictures)

        def encode(given: tuple[str, Rows, dict[str, Values]]) -> Block:
            name, places, own = given
            try:
                encoded, whole = encoder.encode_whole(own)
            except BadValue as bad:
                raise table.refused(bad, int(places[bad.row])) from None
            missing = {column: int(table.is_missing(column, values)[whole].sum()) for column, values in own.items()}
            used = places[whole]
            splits[np.setdiff1d(places, used)] = -1  # Of which an image is not whole.
            weights = None if table.weights is None else table.weights[used]
            return Block(name, encoded, table.labels[used], weights, missing)

        yield from background.in_order(encode, some_rows(), threads, ahead=min(machine.usable_cores(), AHEAD))
    table.refuse_broken({text: reason for (_, text), reason in encoder.broken.items()})
    if "validation" in made:
        _tell_validation(table.dataset, int((splits == NAMES.index("validation")).sum()))


def _tell_validation(dataset: config.Table, count: int) -> None:
    """Say which rows became a validation split; of the test split `prepare` itself says it."""
    drawn = f"drawn with seed {dataset.seed}"
    if dataset.group is not None:
        drawn = f"whole groups of '{dataset.group}' {drawn}"
    elif dataset.time is not None:
        drawn = f"the newest by '{dataset.time}' before those to test on"
    print(
        f"it has no validation split: {count:,} of its rows, {drawn}, are the validation split from now on",
        file=sys.stderr,
    )


class _RowEncoder(Encoder):
    """Encodes rows without those of which an image is not whole, and knows which images those are.

    Attributes:
        broken: why an image is not whole, by its column and its path there.
    """

    def __init__(self, fitted: Fitted, folder: Path, pool: ThreadPoolExecutor) -> None:
        features = {name: one.model_dump() for name, one in fitted.features.items()}
        super().__init__(features, fitted.vocabularies, folder, pool.map)
        self.broken: dict[tuple[str, str], str] = {}
        self._image_columns = [one.columns[0].name for one in fitted.features.values() if one.kind == "image"]

    def encode_whole(self, table: Mapping[str, Values]) -> tuple[dict[str, npt.NDArray[Any]], Rows]:
        """Return what ``encode`` does of the rows that are whole, and which these are, int64 (n,)."""
        encoded = self.encode(table)
        whole = np.ones(num_rows_of(table), bool)
        if self.broken:
            for column in self._image_columns:
                whole &= [(column, str(value)) not in self.broken for value in cells.rows_of(table[column])]
        rows = np.flatnonzero(whole)
        return encoded if whole.all() else {name: one[rows] for name, one in encoded.items()}, rows

    def image(self, column: str, row: int, value: Any, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Return the image of a row; of one that is not whole zeros, and remember it."""
        try:
            return super().image(column, row, value, shape)
        except BadValue as bad:
            self.broken[column, str(value)] = bad.reason.removeprefix("is not a whole image (").removesuffix(")")
            return np.zeros(shape, np.uint8)
