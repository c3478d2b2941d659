"""A folder of images: FOLDER/<class>/*, or FOLDER/<split>/<class>/*; images in deeper folders belong to the class."""

import json
import mimetypes
import os
import re
import shlex
import sys
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from tasks import config
from tasks.data import source_files
from tasks.data.encoding.pictures import FORMATS, ORIENTATION, decode_picture, open_picture
from tasks.data.kinds import SPLITS, Block, Examples, Metadata, median_size, split_rows
from tasks.records import Feature, HeldOut, Target
from tasks.system import background, machine
from tasks.system.errors import UserError, listed, one_of

SPLIT_WORDS = {
    "train": "train|training",
    "validation": "val|valid|validation|dev",
    "test": "test|testing|hold[ _-]?out",
}
"""Regular expressions of the words that mean a split in a folder's name, in small letters."""
MOST_SPLITS = 12
"""More folders than that are not splits: the folds of a cross-validation are rarely more than ten."""
ALLOWED = "Allowed: FOLDER/<class>/*, or FOLDER/<split>/<class>/* with the splits train, validation, test"
IF_CLASSES = "If they are classes, with all that lies in them: --set dataset.splits={}"
CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Header:
    """What the first bytes of a file say; small, because there is one per image."""

    path: str
    size: tuple[int, int]
    """Height and width, after the EXIF rotation."""
    is_grey: bool


def guess(dataset: config.ImageFolder) -> tuple[config.ImageFolder, list[str]]:
    """Return the dataset with what its folders say of splits and of the size of its images, and lines that tell it.

    Raises:
        UserError: no such folder, no classes, or folders that may be splits or classes.
    """
    # A pipe among the images would be waited for.
    source_files.refuse_unreadable(dataset.source, config.project_root())
    splits, line = _splits(dataset, _source(dataset))
    lines = []
    if line and dataset.splits is None:
        lines.append(line)
        dataset = dataset.model_copy(update={"splits": splits})
    if dataset.image_size is None:
        headers = [header for own in _scan(dataset).images.values() for header in own]
        if len({header.size for header in headers}) > 1:
            size, line = median_size(dataset.name, [header.size for header in headers])
            dataset = dataset.model_copy(update={"image_size": size})
            lines.append(line)
    return dataset, lines


def examples(dataset: config.ImageFolder) -> Examples:
    """Return the images of a folder, class by class, each class in the order of its paths.

    Images are turned as their EXIF says, laid on white where they are transparent, brought to 8 bits, and resized
    (bilinear, antialiased, without keeping the aspect ratio) to ``image_size``, or to the median size where theirs
    differ. They have one channel where all are grey, else three. What ``source_files.is_by_product`` names does not
    count. The folders below a class that ``folders`` names are kept beside the test examples.

    Raises:
        UserError: no such folder, no classes, a class with one image, classes that differ between splits, folders that
            may be splits or classes, fewer folders than ``folders`` names, or damaged images.
    """
    source = _source(dataset)
    scanned = _scan(dataset)
    if scanned.line:
        print(scanned.line, file=sys.stderr)
    names, images, labels, broken = scanned.names, scanned.images, scanned.labels, scanned.broken
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

    def below(header: Header) -> tuple[str, ...]:
        """Return the names of the folders between a class and an image, spelled as those of classes."""
        root = next(root for root in scanned.roots if Path(header.path).is_relative_to(root))
        parts = Path(header.path).relative_to(root).parent.parts[1:]
        return tuple(unicodedata.normalize("NFC", name) for name in parts)

    if dataset.folders and (deepest := max(len(below(header)) for header in every)) < len(dataset.folders):
        raise UserError(
            f"dataset.folders = {list(dataset.folders)}: between a class and its images in dataset.source = "
            f"'{dataset.source}' there are at most {deepest} folders. Name as many, or none"
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
        folders_of = [below(header) for header in whole(split)]
        return {
            name: Metadata("category", [folders[place] if place < len(folders) else None for folders in folders_of])
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


def _source(dataset: config.ImageFolder) -> Path:
    source = config.project_root() / dataset.source
    if not source.is_dir():
        raise UserError(f"dataset.source = '{source}': no such folder")
    return source


@dataclass(frozen=True)
class _Scanned:
    """What a folder holds, of which only the first bytes of each file were read."""

    roots: list[Path]
    """The folders of which each holds the folders of classes."""
    names: tuple[str, ...]
    """Of the classes."""
    images: dict[str, list[Header]]
    labels: dict[str, npt.NDArray[np.int64]]
    """The class of each image of a split."""
    broken: dict[Path, str]
    line: str | None
    """Says which folders were taken for splits by their names, or left out."""


def _scan(dataset: config.ImageFolder) -> _Scanned:
    """Return the images of each split; those of ``train`` alone where the folder has no splits.

    Raises:
        UserError: splits and classes that no model can be trained on.
    """
    source = _source(dataset)
    splits, line = _splits(dataset, source)
    roots = {_root_of_classes(folder): splits[_name(folder)] for folder in _folders(source) if _name(folder) in splits}
    roots = roots or {source: "train"}
    found: dict[str, dict[str, list[str]]] = {}
    for root, split in sorted(roots.items(), key=lambda one: one[1]):
        of_split = found.setdefault(split, {})
        for name, paths in _classes(root).items():
            of_split[name] = of_split.get(name, []) + paths
    for split, classes in found.items():
        if different := sorted(classes.keys() ^ found["train"].keys()):
            others = {name: own for name, own in splits.items() if own != split}
            raise UserError(
                f"dataset.source = '{source}': the classes of '{split}' are not those of 'train': "
                f"{listed(different)} {'is' if len(different) == 1 else 'are'} in one of them only. "
                f"Give both the same folders, or leave '{split}' out: {_as_setting(others)}. {IF_CLASSES}"
            )
        if len(classes) < 2:
            raise UserError(
                f"dataset.source = '{source}': '{split}' needs a folder for each of two classes or more, and has "
                f"{', '.join(classes) or 'none'}. {ALLOWED}{source_files.tables_hint(source)}"
            )
        if empty := [name for name, paths in classes.items() if not paths]:
            raise UserError(f"dataset.source = '{source}': the class '{empty[0]}' of '{split}' has no files")
    names = tuple(sorted(found["train"]))
    broken: dict[Path, str] = {}
    images, labels = {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for split, classes in found.items():
            own = [[header for path in classes[name] if (header := read_header(path, broken))] for name in names]
            images[split] = [header for of_class in own for header in of_class]
            labels[split] = np.repeat(np.arange(len(names)), [len(of_class) for of_class in own])
    return _Scanned(list(roots), names, images, labels, broken, line)


def _splits(dataset: config.ImageFolder, source: Path) -> tuple[dict[str, str], str | None]:
    """Return the split of each folder that is one, by its name, and a line that says what is not obvious of it.

    A class may be called train, test_tube or Valley. Two folders called as splits are (``SPLITS``) are splits, others
    if they have classes in common. A single one is the split ``train`` if two or more folders are in it.

    Raises:
        UserError: ``splits`` names a folder that does not exist, folders may be splits or classes, or only some of them
            are splits.
    """
    folders = {_name(folder): folder for folder in _folders(source)}
    where = f"dataset.source = '{dataset.source}'"
    if dataset.splits is not None:
        if absent := [name for name in dataset.splits if name not in folders]:
            raise UserError(f"{where}, dataset.splits: {one_of('folder', absent[0], folders)}")
        if dataset.splits and "train" not in dataset.splits.values():
            raise UserError(f"{where}, dataset.splits = {dataset.splits}: no folder is train. Say which one is")
        others = [name for name in folders if dataset.splits and name not in dataset.splits]
        line = f"left out, as dataset.splits does not name it: {listed(others)}" if others else None
        return dict(dataset.splits), line

    inside = {name: _classes_in(folder) for name, folder in folders.items()}
    named = {name: split for name in folders if (split := _split_by_name(name)) is not None}
    usual = {name for name in named if name.lower() in SPLITS}
    within = [inside[name] for name in named]
    if len(usual) > 1 or (len(named) > 1 and set.intersection(*within) and len(set.union(*within)) > 1):
        found = set(named.values())
        wrong = None
        if others := [name for name in folders if name not in named]:
            wrong = f"'{others[0]}' is not a split, and lies beside folders that are"
        elif "train" not in found:
            wrong = "it has splits, and no folder 'train'"
        elif len(found) < len(named):
            wrong = f"of {', '.join(named)} two are one split. Keep one"
        if wrong:
            raise UserError(f"{where}: {wrong}. {ALLOWED}; or say what each is: {_as_splits(named)}. {IF_CLASSES}")
        told = ", ".join(f"{name} is {split}" for name, split in named.items())
        line = f"splits by the names of folders: {told} (dataset.splits changes that)"
        return named, None if len(usual) == len(named) else line
    if len(folders) == 1 and "train" in named.values():
        (only,) = folders.values()
        return named if len(_folders(_root_of_classes(only))) > 1 else {}, None
    shared = set.intersection(*inside.values()) if 1 < len(folders) <= MOST_SPLITS else set()
    if len(shared) > 1 and not dataset.folders and (named or all(own == shared for own in inside.values())):
        same = f"{listed(list(folders), 5)} have the same folders in them ({listed(sorted(shared), 3)})"
        if all(map(_split_by_name, shared)):
            raise UserError(f"{where}: {same}, which look like splits of each class. {ALLOWED}. {IF_CLASSES}")
        ways = f"If they are splits, say what each is: {_as_splits(folders)}. {IF_CLASSES}"
        raise UserError(f"{where}: {same}, and may be splits or classes. {ways}")
    return {}, None


def _as_splits(folders: Iterable[str]) -> str:
    """Return a setting that says which folder is which split, for a message."""
    named = {name: _split_by_name(name) for name in folders}
    rest = iter([split for split in ("train", "test", "validation") if split not in named.values()])
    return _as_setting({name: split or next(rest, "train") for name, split in named.items()})


def _as_setting(splits: Mapping[str, str]) -> str:
    return f"--set {shlex.quote(f'dataset.splits={json.dumps(splits, ensure_ascii=False)}')}"


def _split_by_name(name: str) -> str | None:
    """Return the split that a folder's name means: Training, seg_train, val-2024, TestImages; None for any other."""
    words = re.sub("(?<=[a-z])(?=[A-Z])|(?=[A-Z][a-z])", " ", name).lower()
    found = [
        split
        for split, own in SPLIT_WORDS.items()
        if re.search(rf"(?<![a-z])({own})(set|data|images)?(?![a-z])", words)
    ]
    return found[0] if len(found) == 1 else None


def _name(folder: Path) -> str:
    """Return a folder's name. macOS may store é as e and an accent: they are one."""
    return unicodedata.normalize("NFC", folder.name)


def _folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not source_files.is_by_product(path.name))


def _root_of_classes(split: Path) -> Path:
    """Return the folder that holds the classes of a split: archives unpack as seg_train/seg_train."""
    inner = _folders(split)
    return inner[0] if [_name(one) for one in inner] == [_name(split)] else split


def _classes_in(folder: Path) -> set[str]:
    """Return what the classes would be if the folder were a split; none where images lie beside its folders."""
    root = _root_of_classes(folder)
    files = (path.name for path in root.iterdir() if not source_files.is_by_product(path.name))
    if any((mimetypes.guess_type(name, strict=False)[0] or "").startswith("image/") for name in files):
        return set()
    return {_name(one) for one in _folders(root)}


def _classes(folder: Path) -> dict[str, list[str]]:
    """Return the paths of the files of each class, sorted."""
    found: dict[str, list[str]] = {}
    for own in _folders(folder):
        paths = found.setdefault(_name(own), [])
        for place, folders, names in os.walk(own):
            folders[:] = sorted(name for name in folders if not source_files.is_by_product(name))
            paths += [os.path.join(place, name) for name in sorted(names) if not source_files.is_by_product(name)]
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
    """Return why a file is not a whole image.

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
        print(f"left out because they are not whole images ({len(broken)}): {named}", file=sys.stderr)
        return
    raise UserError(
        f"dataset.source = '{dataset.source}': {len(broken)} of its files "
        f"{'is not a whole image' if len(broken) == 1 else 'are not whole images'}: {named}. Mend or remove "
        "them, or leave them out: dataset.on_broken=skip"
    )


def common_size(dataset: config.ImageFolder | config.Table, headers: Sequence[Header]) -> tuple[int, int]:
    """Return height and width that all images of a dataset get; print them where the images say it, and differ."""
    if dataset.image_size is not None:
        return dataset.image_size
    if len(sizes := {header.size for header in headers}) == 1:
        return sizes.pop()
    size, line = median_size(dataset.name, [header.size for header in headers])
    print(line, file=sys.stderr)
    return size


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
