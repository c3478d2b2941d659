"""A folder of images: FOLDER/<class>/*, or FOLDER/<split>/<class>/*; images in deeper folders belong to the class."""

import json
import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tasks import config
from tasks.data import source_files
from tasks.data.encoding.cells import Values, Wanted
from tasks.data.encoding.inputs import PICTURES, is_by_product
from tasks.data.images import Header, median_size, read_header
from tasks.data.kinds import Examples, missing_words, table, with_class_names
from tasks.data.samples import notes_on_alike
from tasks.data.splits import WORDS
from tasks.records import Target
from tasks.system import units
from tasks.system.errors import UserError, listed, one_of, printable

SPLIT_WORDS = {
    "train": "train|training|trainval|entrenamiento|entra[iî]nement|apprentissage|treino|addestramento|训练集?",
    "validation": "val|valid|validation|dev|validierung|validaci[oó]n|validazione|valida[cç][aã]o|验证集?",
    "test": "test|testing|hold[ _-]?out|prueba|teste|测试集?",
}
"""Regular expressions of the words, in lowercase, that mean a split in a folder's name."""
IMAGES = re.compile("(jpeg)?(images?|imgs?)|annotations", re.IGNORECASE)
TARGETS = re.compile("labels?|masks?|annotations?|segmentation|ground_?truth|gt", re.IGNORECASE)
"""Folders whose names match these next to each other contain parts of the same examples."""
MASK = re.compile(r"(.+?)[ _-]masks?([ _-]?\d+)?", re.IGNORECASE)
"""The path, without its suffix, of a mask of another image."""
NO_TARGETS = "No model here learns boxes or masks (YOLO, COCO, Pascal VOC)."
IF_EXAMPLES = "If all of these images are examples of classes: "
GLUED = "(set|data|s?daten|images|imgs|photos|bilder|files|dir|folder|split)?"
"""Words that may follow one of them without a space: traindata, Testdaten."""
ONLY_A_SPLIT = re.compile(rf"({'|'.join(SPLIT_WORDS.values())})[\W\d_]*{GLUED}[\W\d_]*", re.IGNORECASE)
"""test1 and train_images, which are no classes; but test_tube may be one."""
MOST_SPLITS = 12
"""More folders than this are not splits: cross-validation rarely has more than ten folds."""
ALLOWED = "Allowed: FOLDER/<class>/*, or FOLDER/<split>/<class>/* with the splits train, validation, test"
IF_CLASSES = "If they are classes, including their subfolders: --set dataset.splits={}"


class _Image(NamedTuple):
    split: str
    label: str
    path: str
    """Relative to the source."""


@dataclass(frozen=True)
class _Listing:
    """The images as a table."""

    folder: Path
    columns: dict[str, Values]

    def chunks(self, wanted: Mapping[str, Wanted], names: Collection[str]) -> Iterator[dict[str, Values]]:
        yield {name: self.columns[name] for name in names}


def guess(dataset: config.ImageFolder) -> tuple[config.ImageFolder, list[str]]:
    """Return the dataset with its splits and image size guessed from the folder, and lines that report the guesses.

    Raises:
        UserError: no such folder, no classes, or folders that may be splits or classes.
    """
    images, line, _ = _scan(dataset)
    lines = notes_on_alike(sorted({image.label for image in images}), "class")
    if line and dataset.splits is None:
        lines.append(line)
        dataset = dataset.model_copy(update={"splits": _splits(dataset, _source(dataset))[0]})
    if dataset.image_size is None:
        headers = (read_header(_source(dataset) / image.path) for image in images)
        sizes = [header.size for header in headers if isinstance(header, Header)]
        if len(set(sizes)) > 1:
            size, line = median_size(dataset.name, sizes)
            dataset = dataset.model_copy(update={"image_size": size})
            lines.append(line)
    return dataset, lines


def examples(dataset: config.ImageFolder) -> Examples:
    """Return the images of a folder as a table of paths, class by class, each class in the order of its paths.

    Images are rotated by their EXIF orientation, composed on white if they are transparent, converted to 8 bits, and
    resized (bilinear, antialiased, without keeping the aspect ratio) to ``image_size``, or to the median size if their
    sizes differ. They have one channel if all are grey, else three. Files of ``inputs.is_by_product`` are ignored.

    Raises:
        UserError: no such folder, no classes, a class with one image, classes that differ between splits, folders that
            may be splits or classes, or damaged images.
    """
    images, line, stray = _scan(dataset)
    if line:
        print(line, file=sys.stderr)
    if stray:
        named = f"{units.count(len(stray), 'image')} in no class folder, such as {printable(min(stray))}"
        print(f"left out: {named}", file=sys.stderr)
    names = sorted({image.label for image in images})
    splits, labels, paths = np.array(images, object).T
    described = config.Table(
        **dataset.model_dump(include={"name", "source", "test", "seed", "image_size", "on_broken"}),
        kind="table",
        target=("class",),
        task="classification",
        columns={"image": config.TableColumn(kind="image")},
        images=(".",),
        split_column="split" if set(splits) != {"train"} else None,
        not_missing=missing_words(names),
    )
    listing = _Listing(_source(dataset), {"split": splits, "class": labels, "image": paths})
    scanned = table.ScannedTable(described, listing)
    made = with_class_names(table.of_rows(scanned), names)
    rows_of: Any = made.rows_of
    return replace(
        made,
        features={"image": made.features["image"].model_copy(update={"columns": ()})},
        target=Target.of_classes(names),
        name_of=lambda split, row: images[rows_of(split)[row]].path,
        sizes_of=lambda split: scanned.sizes["image"][rows_of(split)],
    )


def _source(dataset: config.ImageFolder) -> Path:
    source = config.project_root() / dataset.source
    if not source.is_dir():
        raise UserError(f"dataset.source = '{source}': no such folder")
    return source


def _scan(dataset: config.ImageFolder) -> tuple[list[_Image], str | None, list[str]]:
    """Return the images, all in ``train`` if the folder has no splits, sorted by split and class; a line that reports
    which folders were recognized as splits by their names, or left out; and the images beside the folders of classes.
    Refuse splits and classes that no model can be trained on."""
    source = _source(dataset)
    where = f"dataset.source = '{source}'"
    splits, line = _splits(dataset, source)
    outer = [folder for folder in _folders(source) if _name(folder) in splits]
    roots = {_root_of_classes(folder): splits[_name(folder)] for folder in outer} or {source: "train"}
    classes: dict[str, set[str]] = {split: set() for split in roots.values()}
    images: list[_Image] = []
    for root, split in roots.items():
        classes[split] |= {_name(folder) for folder in _folders(root)}
        images += _images(root, split, source)
    for split, own in classes.items():
        named = repr(split) if splits else "it"
        if different := sorted(own ^ classes["train"]):
            others = {name: one for name, one in splits.items() if one != split}
            raise UserError(
                f"{where}: {named} and 'train' have different classes: {listed(different)} "
                f"{'is' if len(different) == 1 else 'are'} in only one of them. Give both the same folders, or leave "
                f"{named} out: {_as_setting(others)}. {IF_CLASSES}"
            )
        if len(own) < 2:
            inner = source
            while len(within := _folders(inner)) == 1:
                (inner,) = within
            hint = f". Perhaps SOURCE is '{inner}'" if within and inner != source else source_files.tables_hint(source)
            raise UserError(
                f"{where}: {named} needs folders for at least two classes, but has "
                f"{listed([repr(name) for name in own]) or 'none'}. {ALLOWED}{hint}"
            )
        if empty := sorted(own - {image.label for image in images if image.split == split}):
            raise UserError(f"{where}: {named} has no files of the class '{empty[0]}'. Add some, or remove its folder")
    stems = {os.path.splitext(image.path)[0] for image in images}
    masks = [stem for stem in stems if (mask := MASK.fullmatch(stem)) and mask[1] in stems]
    if masks and dataset.splits is None:
        raise UserError(
            f"{where}: {len(masks):,} of its files, such as '{min(masks)}', look like masks of other images. "
            f"{NO_TARGETS} Move them elsewhere. {IF_EXAMPLES}{_as_setting(splits)}"
        )
    stray = [os.path.relpath(path, source) for place in {source, *outer, *roots} for path in _pictures(place)]
    return sorted(images, key=lambda image: image[:2]), line, stray


def _images(root: Path, split: str, source: Path) -> Iterator[_Image]:
    """Yield the files of each class, those of a folder before those of its subfolders."""
    for own in _folders(root):
        for path in _files(own, source):
            yield _Image(split, _name(own), path)


def _files(folder: Path, source: Path) -> Iterator[str]:
    """Yield the files of a folder and its subfolders, relative to the source."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_by_product(name))
        inside = os.path.relpath(place, source)
        yield from (os.path.join(inside, name) for name in sorted(names) if not is_by_product(name))


def _splits(dataset: config.ImageFolder, source: Path) -> tuple[dict[str, str], str | None]:
    """Return the splits of those folders that are splits, by folder name, and a line that reports guesses.

    A class may be called train, test_tube or Valley. Two folders with names in ``splits.WORDS`` are splits, others if
    they share classes. A single folder is the split ``train`` if it contains two or more folders. Beside folders of
    classes, folders with only images, such as Kaggle's test1, have no labels.

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
            raise UserError(f"{where}, dataset.splits = {dataset.splits}: no folder is the split train. Choose one")
        others = [name for name in folders if dataset.splits and name not in dataset.splits]
        line = f"left out because dataset.splits does not name it: {listed(others)}" if others else None
        return dict(dataset.splits), line

    inside = {name: _classes_in(folder) for name, folder in folders.items()}
    named = {name: split for name in folders if (split := _split_by_name(name)) is not None}
    for beside in (set(folders), *inside.values()):
        if any(map(TARGETS.fullmatch, beside)) and any(map(IMAGES.fullmatch, beside)):
            raise UserError(
                f"{where}: the folders {listed(sorted(beside), 5)} look like parts of the same examples. {NO_TARGETS} "
                f"Use FOLDER/<class>/*. {IF_EXAMPLES}{_as_setting({} if beside == set(folders) else named)}"
            )
    flat = [name for name, own in inside.items() if not own and any(_pictures(_root_of_classes(folders[name])))]
    labelled = [name for name, own in inside.items() if len(own) > 1]
    are_all = len(flat) + len(labelled) == len(folders) <= MOST_SPLITS
    left_out = ""
    if flat and labelled and named and are_all and "train" not in map(named.get, flat):
        count = sum(path.lower().endswith(PICTURES) for name in flat for path in _files(folders[name], source))
        left_out = f"; left out: {units.count(count, 'image')} in {listed(flat, 3)}, without class folders"
        folders = {name: folders[name] for name in labelled}
        inside = {name: inside[name] for name in labelled}
        named = {name: split for name, split in named.items() if name in folders}
    usual = {name for name in named if name.lower() in WORDS}
    within = [inside[name] for name in named]
    are_flat = len(flat) == len(folders) and all(ONLY_A_SPLIT.fullmatch(name) for name in flat)
    are_alike = len(named) > 1 and (are_flat or (set.intersection(*within) and len(set.union(*within)) > 1))
    is_lone = len(folders) == 1 and "train" in named.values()
    if len(usual) > 1 or are_alike or (is_lone and len(_folders(_root_of_classes(*folders.values()))) > 1):
        found = set(named.values())
        wrong = None
        if others := [name for name in folders if name not in named]:
            wrong = f"'{others[0]}' is not a split, but is next to folders that are"
        elif "train" not in found:
            wrong = "it has splits, but no folder 'train'"
        elif len(found) < len(named):
            wrong = f"two of {', '.join(named)} are the same split. Keep one"
        if wrong:
            chosen = {name: folders[name] for name in (named if "train" in found else folders)}
            raise UserError(
                f"{where}: {wrong}. {ALLOWED}; or set the split of each: {_as_splits(chosen)}. {IF_CLASSES}"
            )
        told = ", ".join(f"{name} is {split}" for name, split in named.items())
        line = f"splits by the names of folders: {told}{left_out} (dataset.splits changes that)"
        return named, line if left_out or len(usual) < len(named) else None
    shared = set.intersection(*inside.values()) if 1 < len(folders) <= MOST_SPLITS else set()
    every = set().union(*inside.values()) if len(folders) > 1 else set()
    if len(meant := {_split_by_name(name) for name in every}) > 1 and None not in meant:
        both = f"{listed(list(folders), 5)} contain the folders {listed(sorted(every))}"
        raise UserError(f"{where}: {both}, which look like splits. {ALLOWED}. {IF_CLASSES}")
    if left_out or (len(shared) > 1 and (named or all(own == shared for own in inside.values()))):
        same = f"{listed(list(folders), 5)} contain the same folders ({listed(sorted(shared), 3)}), and"
        if left_out:
            both = f"{listed(list(folders), 3)} ({listed(sorted(set().union(*inside.values())), 3)})"
            same = f"there are folders in {both}, but only images in {listed(flat, 3)}, so they"
        ways = f"If they are splits, set the split of each: {_as_splits(folders)}. {IF_CLASSES}"
        raise UserError(f"{where}: {same} may be splits or classes. {ways}")
    return {}, None


def _as_splits(folders: Mapping[str, Path]) -> str:
    """Return the setting that assigns folders to splits, for a message; the largest unknown one is the first missing
    split."""
    folders = dict(sorted(folders.items(), key=lambda one: -sum(1 for _ in one[1].rglob("*"))))
    inside = {name: [split for split in SPLIT_WORDS if split[:5] in name.lower()] for name in folders}
    named = {name: _split_by_name(name) or next(iter(own), None) for name, own in inside.items()}
    rest = iter([split for split in ("train", "test", "validation") if split not in named.values()])
    found = {name: split or next(rest, "train") for name, split in named.items()}
    return _as_setting(found if "train" in found.values() else {**found, next(iter(found)): "train"})


def _as_setting(splits: Mapping[str, str]) -> str:
    return f"--set {shlex.quote(f'dataset.splits={json.dumps(splits, ensure_ascii=False)}')}"


def _split_by_name(name: str) -> str | None:
    """Return the split in a folder's name, such as Training, seg_train, val-2024, TestImages; None for other names."""
    words = re.sub("(?<=[a-z])(?=[A-Z])|(?=[A-Z][a-z])", " ", name).lower()
    found = [split for split, own in SPLIT_WORDS.items() if re.search(rf"(?<![a-z])({own}){GLUED}(?![a-z])", words)]
    return found[0] if len(found) == 1 else None


def _name(folder: Path) -> str:
    """Return a folder's name in NFC, because macOS may store é as e and an accent, and without surrounding spaces."""
    return unicodedata.normalize("NFC", folder.name).strip() or folder.name


def _folders(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and not is_by_product(path.name))


def _pictures(folder: Path) -> Iterator[Path]:
    """Yield the images that lie in a folder itself."""
    for path in folder.iterdir():
        if path.name.lower().endswith(PICTURES) and not is_by_product(path.name) and path.is_file():
            yield path


def _root_of_classes(split: Path) -> Path:
    """Return the folder with the classes of a split, because archives unpack as seg_train/seg_train, or Train-001/Train
    from Google Drive."""
    inner = _folders(split)
    is_same = len(inner) == 1 and _split_by_name(inner[0].name) == _split_by_name(split.name) is not None
    return inner[0] if is_same or [_name(one) for one in inner] == [_name(split)] else split


def _classes_in(folder: Path) -> set[str]:
    """Return the classes in a folder as if it were a split; none if it contains images next to folders and its name is
    not that of a split."""
    root = _root_of_classes(folder)
    if _split_by_name(folder.name) is None and any(_pictures(root)):
        return set()
    return {_name(one) for one in _folders(root)}
