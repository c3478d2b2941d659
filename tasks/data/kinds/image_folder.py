"""A folder of images: FOLDER/<class>/*, or FOLDER/<split>/<class>/*; images in deeper folders belong to the class."""

import os
import statistics
import sys
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from tasks import config
from tasks.data.encoding import FORMATS, ORIENTATION, decode_picture, open_picture
from tasks.data.kinds import SPLITS, Block, Examples, Metadata, split_rows
from tasks.data.source_files import tables_hint
from tasks.records import Feature, HeldOut, Target
from tasks.system import background, machine
from tasks.system.errors import UserError, listed

MAX_SIDE = 224
"""The larger side of the size that a message proposes where sizes differ: that of most pretrained models."""
CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Header:
    """What the first bytes of a file say; small, because there is one per image."""

    path: str
    size: tuple[int, int]
    """Height and width, after the EXIF rotation."""
    is_grey: bool


def examples(dataset: config.ImageFolder) -> Examples:
    """Return the images of a folder, class by class, each class in the order of its paths.

    Images are turned as their EXIF says, laid on white where they are transparent, brought to 8 bits, and resized
    (bilinear, antialiased, without keeping the aspect ratio) where ``image_size`` says so. They have one channel where
    all are grey, else three. Hidden files and Windows' Thumbs.db do not count.
    The folders below a class that ``folders`` names are kept beside the test examples.

    Raises:
        UserError: no such folder, no classes, a class with one image, classes that differ between splits, images of
            different sizes and no ``image_size``, fewer folders than ``folders`` names, or damaged images.
    """
    source = config.project_root() / dataset.source
    by_split = _find(source)
    names = tuple(sorted(next(iter(by_split.values()))))
    broken: dict[Path, str] = {}
    images: dict[str, list[Header]] = {}
    labels: dict[str, npt.NDArray[np.int64]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for split, classes in by_split.items():
            own = [[header for path in classes[name] if (header := read_header(path, broken))] for name in names]
            images[split] = [header for of_class in own for header in of_class]
            labels[split] = np.repeat(np.arange(len(names)), [len(of_class) for of_class in own])
    every = [header for split in images.values() for header in split]
    if broken and dataset.on_broken == "stop":
        decode_rest(every, dataset.image_size, broken)
    _refuse_broken(dataset, broken)
    if not every:
        raise UserError(f"dataset.source = '{dataset.source}': none of its files is an image")
    shape = (*common_size(dataset, every), 1 if all(header.is_grey for header in every) else 3)
    held_out = None
    if "test" not in images:
        rows = split_rows(labels["train"], names, dataset)
        images |= {split: [images["train"][row] for row in chosen] for split, chosen in rows.items()}
        labels |= {split: labels["train"][chosen] for split, chosen in rows.items()}
        held_out = HeldOut(num_examples=len(rows["test"]), seed=dataset.seed)

    depth = 0
    if dataset.folders:
        depth = _depth(
            dataset,
            {one.path: names[at] for split in images for one, at in zip(images[split], labels[split], strict=True)},
        )
    left_out: dict[Path, str] = {}

    def blocks() -> Iterator[Block]:
        left_out.clear()
        for split, own in images.items():
            yield from _blocks(split, own, labels[split], shape, left_out)
        _refuse_broken(dataset, left_out)

    def whole(split: str) -> list[Header]:
        own = images[split]
        return [header for header in own if Path(header.path) not in left_out] if left_out else own

    def name_of(split: str, row: int) -> str:
        return Path(whole(split)[row].path).relative_to(source).as_posix()

    def metadata_of(split: str) -> dict[str, Metadata]:
        below = [_folders_of(header.path, source)[depth:] for header in whole(split)]
        return {
            name: Metadata("category", [folders[place] if place < len(folders) else None for folders in below])
            for place, name in enumerate(dataset.folders)
        }

    target = Target.of_classes(names)
    return Examples(
        version="1",
        features={"image": Feature(kind="image", shape=shape, dtype="uint8")},
        target=target,
        splits=tuple(images),
        blocks=blocks,
        held_out=held_out,
        name_of=name_of,
        sizes_of=lambda split: np.array([header.size for header in whole(split)], np.int32).reshape(-1, 2),
        metadata_of=metadata_of if dataset.folders else None,
    )


def _folders_of(path: str, source: Path) -> tuple[str, ...]:
    """Return the names of the folders of an image, from the source down, spelled as those of classes."""
    return tuple(unicodedata.normalize("NFC", name) for name in Path(path).relative_to(source).parent.parts)


def _depth(dataset: config.ImageFolder, classes: Mapping[str, str]) -> int:
    """Return the depth of the folders of classes: 1, or 2 below splits.

    Args:
        dataset: ``folders`` names the folders below.
        classes: the class of each image, by its path.

    Raises:
        UserError: no image lies that many folders below its class.
    """
    source = config.project_root() / dataset.source
    folders = {path: _folders_of(path, source) for path in classes}
    # A split has two classes or more, of which one at least is not called as the split is.
    depth = 1 if all(folders[path][0] == name for path, name in classes.items()) else 2
    deepest = max(map(len, folders.values())) - depth
    if deepest < len(dataset.folders):
        raise UserError(
            f"dataset.folders = {list(dataset.folders)}: between a class and its images in dataset.source = "
            f"'{dataset.source}' there are at most {deepest} folders. Name as many, or none"
        )
    return depth


def _find(source: Path) -> dict[str, dict[str, list[str]]]:
    """Return the files of each class of each split; one split, ``train``, where the folder has none.

    A single folder may be a class (bus, car, train). It is the split ``train`` if it has that name and two or more
    folders in it.
    """
    if not source.is_dir():
        raise UserError(f"dataset.source = '{source}': no such folder")
    folders = _folders(source)
    as_splits = {folder: SPLITS[folder.name.lower()] for folder in folders if folder.name.lower() in SPLITS}
    if len(as_splits) == len(folders) == 1 and "train" in as_splits.values() and len(_folders(folders[0])) > 1:
        found = {"train": _classes(folders[0])}
    elif len(as_splits) > 1:
        allowed = "Allowed: FOLDER/<class>/*, or FOLDER/<split>/<class>/* with the splits train, validation, test"
        if others := [folder.name for folder in folders if folder not in as_splits]:
            raise UserError(
                f"dataset.source = '{source}': '{others[0]}' is no split, and lies beside folders that are. {allowed}"
            )
        if "train" not in as_splits.values():
            raise UserError(f"dataset.source = '{source}': it has splits, and no folder 'train'. {allowed}")
        if len(set(as_splits.values())) < len(folders):
            names = ", ".join(folder.name for folder in folders)
            raise UserError(f"dataset.source = '{source}': of {names} two are one split. Keep one. {allowed}")
        found = {split: _classes(folder) for folder, split in as_splits.items()}
        for split, classes in found.items():
            if different := sorted(classes.keys() ^ found["train"].keys()):
                raise UserError(
                    f"dataset.source = '{source}': the classes of '{split}' are not those of 'train': "
                    f"{listed(different)} {'is' if len(different) == 1 else 'are'} in one of them only. "
                    "Give both the same folders"
                )
    else:
        found = {"train": _classes(source)}
    for split, classes in found.items():
        if len(classes) < 2:
            has = ", ".join(classes) or "none"
            raise UserError(
                f"dataset.source = '{source}': '{split}' needs a folder for each of two classes or more, and has "
                f"{has}. Allowed: FOLDER/<class>/*, or FOLDER/<split>/<class>/* with the splits train, validation, test"
                f"{tables_hint(source)}"
            )
        for name, paths in classes.items():
            if not paths:
                raise UserError(f"dataset.source = '{source}': the class '{name}' of '{split}' has no files")
    return dict(sorted(found.items()))


def _folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted; without hidden ones, and without those that macOS puts into archives."""
    found = (path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__MACOSX")))
    return sorted(found)


def _classes(folder: Path) -> dict[str, list[str]]:
    """Return the paths of the files of each class, sorted.

    macOS may store é as e and an accent: names are normalised, so it is the same class.
    """
    found: dict[str, list[str]] = {}
    for own in _folders(folder):
        name = unicodedata.normalize("NFC", own.name)
        found.setdefault(name, [])
        for place, folders, names in os.walk(own):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            wanted = (name for name in sorted(names) if not name.startswith(".") and name != "Thumbs.db")
            found[name] += [os.path.join(place, name) for name in wanted]
    return found


def read_header(path: Path | str, broken: dict[Path, str]) -> Header | None:
    """Return the header of an image; None for a file that is none, with the reason in ``broken``."""
    try:
        with open_picture(path) as image:
            width, height = image.size
            # Pillow would decode a whole PNG to look for EXIF behind its pixels.
            exif = image.getexif() if image.format != "PNG" or "exif" in image.info else {}
            if exif.get(ORIENTATION, 1) >= 5:
                width, height = height, width
            return Header(str(path), (height, width), image.mode in ("1", "L", "LA") or image.mode.startswith("I"))
    except Exception as error:  # Pillow's readers raise anything on a broken file.
        broken[Path(path)] = _reason(Path(path), error)
        return None


def _reason(path: Path, error: Exception) -> str:
    """Return why a file is no whole image.

    Raises:
        UserError: the file cannot be read, which says nothing about the image.
    """
    if isinstance(error, OSError) and error.errno is not None:
        raise UserError(f"{path} cannot be read ({error.strerror}): make it readable, or remove it") from None
    if path.exists() and path.stat().st_size == 0:
        return "empty"
    if isinstance(error, Image.DecompressionBombWarning | Image.DecompressionBombError):
        return f"more than {Image.MAX_IMAGE_PIXELS:,} pixels"
    if isinstance(error, UnidentifiedImageError):
        return f"no image of {', '.join(FORMATS).lower()}"
    return " ".join(str(error).split())[:100] or type(error).__name__


def _refuse_broken(dataset: config.ImageFolder, broken: dict[Path, str]) -> None:
    """Raise ``UserError`` with the names of damaged images; or with ``on_broken=skip`` print which are left out."""
    if not broken:
        return
    source = config.project_root() / dataset.source
    named = listed([f"{path.relative_to(source)} ({reason})" for path, reason in sorted(broken.items())])
    if dataset.on_broken == "skip":
        print(f"left out, as no whole image ({len(broken)}): {named}", file=sys.stderr)
        return
    raise UserError(
        f"dataset.source = '{dataset.source}': {len(broken)} of its files "
        f"{'is' if len(broken) == 1 else 'are'} no whole image: {named}. Mend or remove "
        "them, or leave them out: dataset.on_broken=skip"
    )


def common_size(dataset: config.ImageFolder | config.Table, headers: Sequence[Header]) -> tuple[int, int]:
    """Return height and width of the images of a dataset.

    Raises:
        UserError: sizes differ, and ``image_size`` is not given.
    """
    if dataset.image_size is not None:
        return dataset.image_size
    sizes = {header.size for header in headers}
    if len(sizes) == 1:
        return sizes.pop()
    height, width = (statistics.median_low(header.size[side] for header in headers) for side in (0, 1))
    smaller = min(1.0, MAX_SIDE / max(height, width))
    proposed = [max(1, round(side * smaller)) for side in (height, width)]
    (low, high) = (min(sizes, key=lambda size: size[0] * size[1]), max(sizes, key=lambda size: size[0] * size[1]))
    raise UserError(
        f"dataset.image_size = null: the images of {dataset.name} differ in size, from {low[0]} x {low[1]} to "
        f"{high[0]} x {high[1]} (height x width; the median is {height} x {width}). Give "
        f"--set dataset.image_size=[{proposed[0]},{proposed[1]}], or another size"
    )


def _blocks(
    split: str, headers: list[Header], labels: npt.NDArray[np.int64], shape: tuple[int, ...], broken: dict[Path, str]
) -> Iterator[Block]:
    """Yield the images of a split without damaged ones, whose reasons go into ``broken``."""
    rows_a_block = min(max(CHUNK_BYTES // (shape[0] * shape[1] * shape[2]), 1), 1024)

    def decode(first: int) -> Block:
        own = headers[first : first + rows_a_block]
        # Each is written to its row: a list that is stacked later takes twice the memory.
        images, whole = np.empty((len(own), *shape), np.uint8), np.ones(len(own), bool)
        for row, header in enumerate(own):
            if (image := _decode(header.path, shape, broken)) is None:
                whole[row] = False
            else:
                images[row] = image
        told = labels[first : first + len(own)]
        return Block(split, {"image": images if whole.all() else images[whole]}, told[whole])

    cores = machine.usable_cores()
    yield from background.in_order(decode, range(0, len(headers), rows_a_block), threads=cores, ahead=cores)


def decode_rest(headers: Sequence[Header], size: tuple[int, int] | None, broken: dict[Path, str]) -> None:
    """Decode images without keeping them; the reasons of damaged ones go into ``broken``.

    Files whose headers are damaged and files whose pixels are damaged are then named in one message, not two.

    Args:
        headers: of the images.
        size: height and width that all are resized to; None keeps each as it is.
        broken: reasons by path.
    """

    def decode(header: Header) -> None:
        _decode(header.path, (*(size or header.size), 1 if header.is_grey else 3), broken)

    cores = machine.usable_cores()
    for _ in background.in_order(decode, headers, threads=cores, ahead=cores):
        pass


def _decode(path: str, shape: tuple[int, ...], broken: dict[Path, str]) -> npt.NDArray[np.uint8] | None:
    try:
        return decode_picture(path, shape)
    except Exception as error:  # As in `read_header`.
        broken[Path(path)] = _reason(Path(path), error)
        return None
