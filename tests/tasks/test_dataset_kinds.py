"""What each kind of dataset reads, and what it refuses."""

import contextlib
import io
import os
import shlex
import shutil
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tasks import config
from tasks.data import dataset_folder, prepared_data, source_files
from tasks.data.encoding.pictures import decode_picture
from tasks.data.kinds import image_folder
from tasks.data.splits import split_rows
from tasks.operations import dvc_data
from tasks.prepare import prepare
from tasks.system.errors import UserError


def describe(source, kind="image_folder", **values):
    described = config.describe({"kind": kind, "name": "own", "source": str(source), **values}, "test")
    (Path("data") / "own").mkdir(exist_ok=True)
    return described


def message_of(source, **values):
    """What a dataset is refused with; nothing is left behind."""
    with pytest.raises(UserError) as caught:
        prepare(describe(source, **values))
    assert "\n" not in str(caught.value)
    assert not list(Path("data/own").iterdir())
    return str(caught.value)


def grey(shade, size=(6, 4)):
    """A picture of one shade, of (width, height)."""
    return Image.new("L", size, shade)


def save(image, *path):
    place = Path(*path)
    place.parent.mkdir(parents=True, exist_ok=True)
    image.save(place)
    return place


def fill(source, classes=("cat", "dog"), count=5):
    for number, name in enumerate(classes):
        for i in range(count):
            save(grey(100 * number + i), source, name, f"{i}.png")


def plant(source, folders):
    """Make folders with so many pictures each: ``plant(source, "cat:5 dog:5")``."""
    for folder, count in (place.split(":") for place in folders.split()):
        (source / folder).mkdir(parents=True, exist_ok=True)
        for i in range(int(count)):
            save(grey(i), source, folder, f"{i}.png")


def arrays_of(prepared, split):
    found = prepared.splits[split]
    return np.load(found.features["image"]), np.load(found.labels)


def test_classes_are_folders_and_a_test_split_is_taken_of_each(source):
    fill(source)
    save(grey(50), source, "dog", "deeper", "9.png")
    (source / ".DS_Store").write_text("hidden")
    (source / "cat" / ".hidden.png").write_text("hidden")
    prepared = prepare(describe(source))
    assert prepared.target.class_names == ("cat", "dog")
    assert prepared.features["image"].shape == (4, 6, 1)
    assert {name: split.class_counts for name, split in prepared.splits.items()} == {"test": (1, 1), "train": (4, 5)}
    assert prepared.held_out is not None
    assert prepared.validation_by_class
    shades = {}
    for split in prepared.splits:
        images, labels = arrays_of(prepared, split)
        assert (images == images[:, :1, :1]).all(), "each is of one shade"
        shades |= dict(zip(images[:, 0, 0, 0].tolist(), labels.tolist(), strict=True))
    assert shades == {0: 0, 1: 0, 2: 0, 3: 0, 4: 0, 50: 1, 100: 1, 101: 1, 102: 1, 103: 1, 104: 1}
    prepared_data.verify(prepared)
    before = {path.name: path.read_bytes() for path in Path(prepared.folder).iterdir()}
    prepare(describe(source))
    assert {path.name: path.read_bytes() for path in Path(prepared.folder).iterdir()} == before


def test_splits_are_folders_of_classes(source):
    for split, count in (("train", 4), ("val", 2), ("test", 3)):
        fill(source / split, count=count)
    prepared = prepare(describe(source))
    assert {name: split.num_examples for name, split in prepared.splits.items()} == {
        "train": 8, "validation": 4, "test": 6,
    }  # fmt: skip
    assert prepared.held_out is None
    train = prepared.splits["train"]
    assert prepared.features["image"].mean == (np.load(train.features["image"]).mean(),)


def test_a_lone_folder_train_of_several_classes_is_the_split(source):
    fill(source / "Train")
    prepared = prepare(describe(source))
    assert prepared.target.class_names == ("cat", "dog")
    assert {name: split.class_counts for name, split in prepared.splits.items()} == {"train": (4, 4), "test": (1, 1)}
    fill(source, classes=("bus",))
    assert prepare(describe(source, splits={})).target.class_names == ("Train", "bus")


@pytest.mark.parametrize(
    ("folders", "told", "splits"),
    [
        ("train/a:5 train/b:5 test1:3", "train is train; left out: 3 images in test1", {"train"}),
        ("train/a:5 train/b:5 train:1 test:3", "train is train; left out: 3 images in test", {"train"}),
        ("Train/a:5 Train/b:5 extra:2 extra/x:1", "Train is train; left out: 3 images in extra", {"Train"}),
        (
            "train/a:5 train/b:5 val/a:2 val/b:2 test:2 more:2",
            "train is train, val is validation; left out: 4 images in more, test",
            {"train", "val"},
        ),
    ],
)
def test_images_without_class_folders_beside_splits_are_left_out_and_counted(source, folders, told, splits, capsys):
    plant(source, folders)
    described, (line,) = image_folder.guess(describe(source))
    assert line == f"splits by the names of folders: {told}, without class folders (dataset.splits changes that)"
    assert set(described.splits) == splits
    prepared = prepare(described)
    assert prepared.target.class_names == ("a", "b")
    assert set(prepared.splits) >= {"train", "test"}
    assert prepare(describe(source)).splits == prepared.splits, "with params.yaml that leaves it open"
    assert line in capsys.readouterr().err


def test_a_class_may_have_folders_where_another_has_only_images(source):
    plant(source, "cat/tabby:5 cat/siamese:5 dog:5")
    assert image_folder.guess(describe(source))[1] == []
    assert prepare(describe(source)).target.class_names == ("cat", "dog")


@pytest.mark.parametrize(
    ("folders", "given", "told"),
    [
        ("a:5 b:5 :3", None, "3 images in no class folder, such as 0.png"),
        ("a:5 b:5 :1", {}, "1 image in no class folder, such as 0.png"),
        ("train/a:5 train/b:5 train:2 test/a:2 test/b:2 :1", None, "3 images in no class folder, such as 0.png"),
        ("train/train/a:5 train/train/b:5 train:1", None, "1 image in no class folder, such as train/0.png"),
        ("my_train/a:5 my_train/b:5 my_train:2 my_test/a:2 my_test/b:2", None, "2 images in no class folder, such as "),
        ("a:5 b:5", None, None),
    ],
)
def test_images_beside_class_folders_are_counted(source, folders, given, told, capsys):
    plant(source, folders)
    (source / "notes.txt").write_text("bought on Monday")
    prepare(describe(source, splits=given))
    said = capsys.readouterr().err
    assert f"left out: {told}" in said if told else "left out" not in said


NAMED_AS_SPLITS = [
    {"Training": "train", "Testing": "test"},
    {"seg_train": "train", "seg_test": "test"},
    {"train": "train", "dev": "validation"},
    {"train": "train", "holdout": "test"},
    {"TrainImages": "train", "my_val": "validation", "Test-2024": "test"},
    {"trainval": "train", "validdata": "validation", "Testdaten": "test"},
    {"Trainingsdaten": "train", "Validierungsdaten": "validation", "Testdaten": "test"},
    {"Entrenamiento": "train", "validación": "validation", "prueba": "test"},
    {"训练集": "train", "测试": "test"},
]


@pytest.mark.parametrize("splits", NAMED_AS_SPLITS, ids="_".join)
def test_folders_with_the_same_classes_are_splits_by_their_names_and_it_is_said(source, splits, capsys):
    for name in splits:
        fill(source / name)
    described, (line,) = image_folder.guess(describe(source))
    assert described.splits == splits
    told = ", ".join(f"{name} is {split}" for name, split in sorted(splits.items()))
    assert line == f"splits by the names of folders: {told} (dataset.splits changes that)"
    prepared = prepare(described)
    assert prepared.target.class_names == ("cat", "dog")
    assert set(prepared.splits) == {"train", "test", *splits.values()}
    assert line not in capsys.readouterr().err
    assert prepare(describe(source)).splits == prepared.splits, "with params.yaml that leaves it open"
    assert line in capsys.readouterr().err


def test_splits_may_lie_in_the_folders_of_their_archives(source):
    for split in ("Train", "Test"):
        fill(source / f"{split}-20240101T000000Z-001" / split)
    described, (line,) = image_folder.guess(describe(source))
    assert "Test-20240101T000000Z-001 is test, Train-20240101T000000Z-001 is train" in line
    assert prepare(described).target.class_names == ("cat", "dog")


def test_the_splits_that_a_question_offers_are_those_of_the_names(source):
    for name in ("mytest", "mytrain"):
        fill(source / name)
    assert '{"mytest": "test", "mytrain": "train"}' in message_of(source)
    shutil.rmtree(source)
    for number, name in enumerate("abcd", 1):
        fill(source / name, count=number)
    assert '{"d": "train", "c": "test", "b": "validation", "a": "train"}' in message_of(source)


def test_class_names_are_equal_but_for_surrounding_spaces(source):
    fill(source / "train", ("cat ", "dog"))
    fill(source / "test", ("cat", "dog"), 2)
    prepared = prepare(describe(source))
    assert prepared.target.class_names == ("cat", "dog")
    assert prepared.splits["train"].class_counts == (5, 5)


def test_folders_that_may_be_splits_or_classes_are_asked_about(project, source):
    for name in ("batch 1", "batch 2"):
        fill(source / name)
    with pytest.raises(UserError) as caught:
        dvc_data.add(str(source), None, {})
    message = str(caught.value)
    assert message == (
        f"dataset.source = '{source}': batch 1, batch 2 contain the same folders (cat, dog), and may be splits or "
        'classes. If they are splits, set the split of each: --set \'dataset.splits={"batch 1": "train", "batch 2": '
        '"test"}\'. If they are classes, including their subfolders: --set dataset.splits={}'
    )
    assert not (project / "data" / "source").exists()
    said = config.read_texts([shlex.split(message)[shlex.split(message).index("--set") + 1].rstrip(".")])
    for given, names in ((said["dataset.splits"], ("cat", "dog")), ({}, ("batch 1", "batch 2"))):
        described, lines = image_folder.guess(describe(source, splits=given))
        assert (described.splits, lines) == (given, [])
        assert prepare(described).target.class_names == names


def test_folders_are_the_splits_that_they_are_said_to_be(source, capsys):
    for name in ("fold1", "fold2", "fold3"):
        fill(source / name)
    fill(source / "later", ("elk",))
    splits = {"fold1": "train", "fold2": "train", "fold3": "test"}
    assert "unknown folder 'fold9': did you mean 'fold" in message_of(source, splits={**splits, "fold9": "test"})
    assert "no folder is the split train. Choose one" in message_of(source, splits={"fold1": "test"})
    prepared = prepare(describe(source, splits=splits))
    assert {name: split.class_counts for name, split in prepared.splits.items()} == {"train": (10, 10), "test": (5, 5)}
    assert "left out because dataset.splits does not name it: later\n" in capsys.readouterr().err


ORDINARY = [
    ("cat/left:2 dog/left:2", {}),
    (" ".join(f"{number}/left:2 {number}/right:2" for number in range(13)), {}),
    ("cat/tabby:2 cat/siamese:2 dog/corgi:2 dog/boxer:2", {}),
    ("cat:5 dog:5 cat/left:2 cat/right:2 dog/left:2 dog/right:2", {}),
    ("train_station:5 test_tube:5", {}),
    ("train_station/left:2 test_tube/left:2", {}),
    ("valley/left:2 valley/right:2 device/left:2 device/right:2", {"splits": {}}),
    ("trainers/left:2 tester/left:2", {}),
    ("trainers/left:2 trainers/right:2 sandals/left:2 sandals/right:2 sandals/top:2", {}),
    ("cat/train:2 dog/train:2", {}),
    ("mask:5 no_mask:5", {}),
    ("images:5 masks:5", {"splits": {}}),
    ("train_a/train_a:2 train_a/latest:2 b/train_a:2 b/latest:2", {"splits": {}}),
]


@pytest.mark.parametrize(("folders", "values"), ORDINARY)
def test_ordinary_folders_of_classes_are_not_asked_about(source, folders, values):
    plant(source, folders)
    described, lines = image_folder.guess(describe(source, **values))
    assert (described.splits, lines) == (values.get("splits"), [])
    assert prepare(described).target.class_names == tuple(sorted(path.name for path in source.iterdir()))


# Each: how a picture is saved, the pixel that is read of it at the left and the right of its upper row.
def transparent():
    image = Image.new("RGBA", (2, 2), (10, 20, 30, 255))
    image.putpixel((1, 0), (10, 20, 30, 0))
    return image


def turned():
    """Lies on its side; the EXIF tag says how it was held."""
    image = Image.new("RGB", (2, 2), (0, 0, 0))
    image.putpixel((0, 0), (255, 255, 255))
    image.getexif()[0x0112] = 6  # The upper row is at the right.
    return image


PICTURES = [
    ("png", lambda: Image.new("RGB", (2, 2), (10, 20, 30)), [(10, 20, 30), (10, 20, 30)]),
    ("png", transparent, [(10, 20, 30), (255, 255, 255)]),
    ("png", turned, [(0, 0, 0), (255, 255, 255)]),
    ("jpg", turned, [(0, 0, 0), (255, 255, 255)]),
    ("png", lambda: Image.fromarray(np.full((2, 2), 65535, np.uint16)), [(255,) * 3, (255,) * 3]),
    ("png", lambda: Image.fromarray(np.full((2, 2), 257 * 7, np.uint16)), [(7,) * 3, (7,) * 3]),
    ("png", lambda: Image.new("1", (2, 2), 1), [(255,) * 3, (255,) * 3]),
    ("bmp", lambda: Image.new("RGB", (2, 2), (1, 2, 3)), [(1, 2, 3), (1, 2, 3)]),
    ("gif", lambda: Image.new("P", (2, 2), 0), [(0, 0, 0), (0, 0, 0)]),
    ("webp", lambda: Image.new("RGB", (2, 2), (255, 255, 255)), [(255,) * 3, (255,) * 3]),
    ("jpg", lambda: Image.new("CMYK", (2, 2), (0, 0, 0, 0)), [(255,) * 3, (255,) * 3]),
    ("jpg", lambda: Image.new("L", (2, 2), 255), [(255,) * 3, (255,) * 3]),
]


@pytest.mark.parametrize(("suffix", "make", "expected"), PICTURES)
def test_a_picture_of_any_kind_becomes_the_pixels_that_are_seen(source, suffix, make, expected):
    image = make()
    (source / "a").mkdir()
    image.save(source / "a" / f"picture.{suffix}", exif=image.getexif(), quality=100, subsampling=0)
    save(Image.new("RGB", (2, 2), (9, 9, 9)), source, "a", "z.png")
    fill(source, ("b",), 2)
    prepared = prepare(describe(source, image_size=[2, 2]))
    assert prepared.features["image"].shape == (2, 2, 3)
    found = [arrays_of(prepared, split) for split in ("train", "test")]
    rows = [image[0].astype(int) for images, labels in found for image in images[labels == 0]]
    assert min(abs(row - expected).max() for row in rows) <= 1, "JPEG is not exact"


@pytest.mark.filterwarnings("error")
def test_a_picture_whose_exif_data_are_damaged_is_read_without_a_word(source, capfd):
    fill(source)
    grey(7).save(source / "cat" / "damaged.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f\1\2\3")
    assert sum(split.num_examples for split in prepare(describe(source)).splits.values()) == 11
    assert "Corrupt EXIF" not in capfd.readouterr().err


def test_a_turned_photo_is_never_read_smaller_than_it_is_wanted(tmp_path):
    stripes = np.zeros((1000, 256, 3), np.uint8)  # As it lies: what is seen is 256 high and 1,000 wide.
    stripes[:, np.arange(256) % 4 < 2] = 255
    image = Image.fromarray(stripes)
    image.getexif()[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=image.getexif(), quality=95)
    seen = decode_picture(tmp_path / "turned.jpg", (128, 32, 3))
    assert np.abs(np.diff(seen[8:-8].astype(int), axis=0)).min() > 100, "each stripe is a row of its own"


SIZES = [
    ([(6, 4)] * 9 + [(600, 400)], (8, 8), "from 4 x 6 to 400 x 600 (height x width; the median is 4 x 6)"),
    ([(20, 30)] * 9 + [(31, 20)], (32, 24), "from 30 x 20 to 20 x 31"),
    ([(600, 400)] * 9 + [(6, 4)], (152, 224), "from 4 x 6 to 400 x 600"),
]


@pytest.mark.parametrize(("sizes", "expected", "told"), SIZES)
def test_images_of_many_sizes_get_the_median_and_it_is_said(source, sizes, expected, told, capsys):
    for number, size in enumerate(sizes):
        save(grey(number, size), source, "cat" if number % 2 else "dog", f"{number}.png")
    described, (line,) = image_folder.guess(describe(source))
    assert described.image_size == expected
    assert line.startswith(f"the images of own differ in size, {told}")
    assert f": all are resized to {expected[0]} x {expected[1]}. To choose another size, set " in line
    prepared = prepare(described)
    assert prepared.features["image"].shape == (*expected, 1)
    assert line not in capsys.readouterr().err
    assert prepare(describe(source)).splits == prepared.splits, "with params.yaml that leaves it open"
    assert line in capsys.readouterr().err
    assert image_folder.guess(describe(source, image_size=[3, 5])) == (describe(source, image_size=[3, 5]), [])


@pytest.mark.parametrize("width", [224, 225])
def test_large_images_of_one_size_keep_it_and_it_is_said(source, width, capsys):
    for number in range(6):
        save(grey(number, (width, 6)), source, "cat" if number % 2 else "dog", f"{number}.png")
    assert prepare(describe(source)).features["image"].shape == (6, width, 1)
    line = (
        "all images of own are 6 x 225 (height x width) and keep this size. To train on smaller ones, set dataset.image"
    )
    assert (line in capsys.readouterr().err) is (width == 225)
    np.savez(source / "own.npz", x=np.zeros((30, 6, width), np.uint8), y=CLASSES)
    prepare(describe(source / "own.npz", "arrays"))
    line = line.replace("set dataset.image", "resize them first\n")
    assert (line in capsys.readouterr().err) is (width == 225)


def test_what_of_an_image_is_not_used_is_said(source, capsys):
    fill(source)
    Image.fromarray(np.full((4, 6), 1000, np.uint16)).save(source / "cat" / "deep.png")
    grey(1).save(source / "dog" / "moving.gif", save_all=True, append_images=[grey(9)])
    prepare(describe(source))
    said = capsys.readouterr().err
    assert "1 of 12 images of own have 16 bits per channel, of which the upper 8 are used\n" in said
    assert "1 of 12 images of own have several frames, of which the first is used\n" in said


BY_PRODUCTS = (
    "@eaDir/0.jpg/SYNOPHOTO_THUMB_M.jpg", "__MACOSX/._0.png", ".ipynb_checkpoints/0.png", "cat/@eaDir/0.png/M.jpg",
    "cat/.ipynb_checkpoints/0.png", "cat/Thumbs.db", "cat/._0.png", "cat/Desktop.ini", "cat/.DS_Store", "cat/Icon\r",
    "cat/Picasa.ini",
)  # fmt: skip


def test_what_systems_put_beside_images_is_not_read(source):
    fill(source)
    expected = prepare(describe(source)).splits
    for name in BY_PRODUCTS:
        save(grey(9), source, f"{name}.png").rename(source / name)
    assert source_files.kind_of(str(source)) == "image_folder"
    described, lines = image_folder.guess(describe(source))
    assert lines == []
    assert prepare(described).splits == expected


def bomb():
    """A PNG that says that it has 400 million pixels."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def half(image, suffix):
    buffer = io.BytesIO()
    image.save(buffer, suffix)
    return buffer.getvalue()[: len(buffer.getvalue()) // 2]


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60), np.uint8))
BROKEN = {
    "empty.png": (b"", "empty"),
    "notes.txt": (b"bought on Monday", "no image of png, jpeg, bmp, gif, webp"),
    "phone.heic": (
        b"\0\0\0\x18ftypheic" + bytes(40),
        "HEIC, which Pillow cannot read: convert it to JPEG or PNG (heif",
    ),
    "half.png": (half(NOISE, "png"), "image file is truncated"),
    "half.jpg": (half(NOISE, "jpeg"), "image file is truncated"),
    "bomb.png": (bomb(), "Image size ("),
}


def test_files_that_are_no_whole_image_are_all_named_or_left_out(source, capsys):
    fill(source)
    for name, (content, _) in BROKEN.items():
        (source / "cat" / name).write_bytes(content)
    at_once = message_of(source, image_size=[4, 6])
    # Those whose first bytes tell, and those whose pixels do not come, in one message.
    assert at_once.startswith(f"dataset.source = '{source}': 6 of its images cannot be used: ")
    for name, (_, reason) in BROKEN.items():
        assert f"cat/{name} ({reason}" in at_once
    for name in ("empty.png", "notes.txt", "bomb.png", "phone.heic"):
        (source / "cat" / name).unlink()
    decoded = message_of(source, image_size=[4, 6])
    assert "2 of its images cannot be used: " in decoded
    for name in ("half.png", "half.jpg"):
        assert f"cat/{name} ({BROKEN[name][1]}" in decoded
    assert "or leave them out: dataset.on_broken=skip" in decoded
    for name, (content, _) in BROKEN.items():
        (source / "cat" / name).write_bytes(content)
    prepared = prepare(describe(source, image_size=[4, 6], on_broken="skip"))
    assert "left out because they are not whole images (4): cat/bomb.png (Image size (" in (
        said := capsys.readouterr().err
    )
    assert "left out because they are not whole images (2): cat/half.jpg (image file is truncated" in said
    assert prepared.held_out.num_examples == prepared.splits["test"].num_examples
    assert sum(split.num_examples for split in prepared.splits.values()) == 10
    for split in prepared.splits.values():
        assert len(np.load(split.features["image"])) == len(np.load(split.labels)) == split.num_examples


def with_a_mask(source):
    fill(source)
    save(grey(7), source, "cat", "1_mask.png")


def texts(source):
    for name in ("good", "bad"):
        (source / name).mkdir()
        (source / name / "0.txt").write_text("a film")


SPLIT = "train/cat:5 train/dog:5"
FOLDERS = [
    (Path.rmdir, "no such folder"),
    ("", "needs folders for at least two classes, but has none"),
    (":1", "needs folders for at least two classes, but has none"),
    ("train:5 test1:3", "needs folders for at least two classes, but has none"),
    ("train_images:5 Test-data2:3", "needs folders for at least two classes, but has none"),
    ("cat:5", "at least two classes, but has 'cat'. Allowed: FOLDER/<class>/*"),
    ("Pets/cat:5 Pets/dog:5", "source/Pets'"),
    ("cat:5 dog:5 zebra:1", "the class 'zebra' has too few examples (1): it needs one to train on and one to test on"),
    ("cat:5 dog:5 fox:0", "it has no files of the class 'fox'. Add some, or remove its folder"),
    ("a/b/cat:5 a/b/dog:5", "source/a/b'"),
    (
        f"{SPLIT} test/cat:5 test/cow:5",
        "'test' and 'train' have different classes: cow, dog are in only one of them. Give both the",
    ),
    (f"{SPLIT} test/cat:1", """leave 'test' out: --set 'dataset.splits={"train": "train"}'. If they are classes"""),
    (
        "images/cat:5 images/dog:5 test1:5",
        "there are folders in images (cat, dog), but only images in test1, so they may be splits or classes. If "
        """they are splits, set the split of each: --set 'dataset.splits={"images": "train"}'. If they are classes""",
    ),
    ("a_test/cat:5 a_test/dog:5 more:5", """set the split of each: --set 'dataset.splits={"a_test": "train"}'. If"""),
    ("train:5 test/cat:5 test/dog:5", "'test' and 'train' have different classes"),
    (
        "cat/train:5 cat/test:5 dog/train:5 dog/test:5",
        "cat, dog contain the folders test, train, which look like splits. Allowed: F",
    ),
    (
        "a-001/Train/cat:5 a-001/Train/dog:5 a-002/Test/cat:5 a-002/Test/dog:5",
        "a-001, a-002 contain the folders Test, Train, which look like splits. Allowed: F",
    ),
    (
        "train/images:5 train/labels:0",
        "the folders images, labels look like parts of the same examples. No model here learns boxes or masks (YOLO, "
        "COCO, Pascal VOC). Use FOLDER/<class>/*. If all of these images are examples of classes: --set "
        """'dataset.splits={"train": "train"}'""",
    ),
    ("Images:5 masks:5", "the folders Images, masks look like parts"),
    ("annotations:1 train2017:5 val2017:5", "annotations, train2017, val2017 look like parts"),
    (with_a_mask, "1 of its files, such as 'cat/1_mask', look like masks of other images"),
    (texts, "dataset.on_broken=skip. Texts belong in a table"),
    (f"{SPLIT} val/cat:5 val/dog:5 valid/cat:5 valid/dog:5", "two of train, val, valid are the same split. Keep one"),
    (f"{SPLIT} test/cat:5 test/dog:5 other/elk:1", "'other' is not a split, but is next to folders that are"),
    ("test/cat:5 test/dog:5 validation/cat:5 validation/dog:5", "it has splits, but no folder 'train'"),
]


@pytest.mark.parametrize(("made", "message"), FOLDERS)
def test_a_folder_that_cannot_be_trained_on_is_refused(source, made, message):
    plant(source, made) if isinstance(made, str) else made(source)
    assert message in message_of(source)


def test_what_dvc_would_hang_on_or_misread_is_named_before_dvc_is_asked(project, source):
    fill(source)
    (source / "cat" / "same.png").symlink_to(source / "dog" / "1.png")
    (source / "fox").symlink_to(source / "cat")
    (source / "dog" / "nothing.png").symlink_to("gone.png")
    os.mkfifo(source / "cat" / "pipe.png")
    save(grey(1), source, "cat", "\udcff\x1b.png")
    with pytest.raises(UserError) as caught:
        dvc_data.add(str(source), None, {})
    expected = (
        f"dataset.source = '{source}': 4 of its files and folders cannot be used: cat/pipe.png (neither a file nor a "
        "folder), cat/\\udcff\\x1b.png (its name has invalid characters), dog/nothing.png (neither a file nor "
        "a folder), fox (a link to a folder, whose changes DVC would not see). Replace"
    )
    assert str(caught.value).startswith(expected)
    assert not (project / "data" / "source").exists()


def test_a_source_whose_name_dvc_would_change_is_refused(project, source):
    for name, message in (("a ${x}", r"dataset.source = '.+/a \${x}': DVC reads"), ("$a {x}", None)):
        fill(source / name)
        with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
            dvc_data.describe(str(source / name), "a", {})


def test_a_source_that_is_no_file_is_refused(project, source):
    (source / "loop.npz").symlink_to("loop.npz")
    with pytest.raises(UserError, match="no such file or folder"):
        dvc_data.add(str(source / "loop.npz"), None, {"kind": "arrays"})
    with pytest.raises(UserError, match=r"SOURCE = '/xxxxx.+': cannot be read \(File name too long\)"):
        dvc_data.add("/" + "x" * 300, None, {})


def test_a_class_of_which_nothing_whole_is_left_is_refused(source):
    fill(source)
    for file in ("0.png", "1.png"):
        (source / "fox").mkdir(exist_ok=True)
        (source / "fox" / file).write_bytes(half(NOISE, "png"))
    message = message_of(source, image_size=[4, 6], on_broken="skip")
    assert "no example of the class 'fox' is left to train on" in message


def test_classes_of_which_nothing_whole_is_left_to_test_on_are_told(source, capsys):
    for split in ("train", "test"):
        fill(source / split, ("cat", "dog", "elk", "fox"))
    prepare(describe(source, on_broken="skip"))
    assert "no example of" not in capsys.readouterr().err
    for name in ("elk", "fox"):
        for file in (source / "test" / name).iterdir():
            file.write_bytes(b"no image")
    prepared = prepare(describe(source, on_broken="skip"))
    assert prepared.splits["test"].class_counts == (5, 5, 0, 0)
    said = "warning: the test split of own has no example of 2 of 4 classes, so its metrics do not cover "
    assert f"{said}them: 'elk', 'fox'\n" in capsys.readouterr().err


# Arrays.

IMAGES = np.random.default_rng(0).integers(0, 256, (30, 5, 4), np.uint8)
CLASSES = np.arange(30) % 3


@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_of_a_file_are_read_as_they_are(source, compressed):
    path = source / "own.npz"
    (np.savez_compressed if compressed else np.savez)(path, x=IMAGES, y=CLASSES)
    prepared = prepare(describe(path, "arrays", test=6))
    assert prepared.features["image"].shape == (5, 4, 1)
    assert {name: split.class_counts for name, split in prepared.splits.items()} == {
        "test": (2, 2, 2), "train": (8, 8, 8),
    }  # fmt: skip
    read = [arrays_of(prepared, split) for split in prepared.splits]
    found = {image.tobytes(): label for images, labels in read for image, label in zip(images, labels, strict=True)}
    assert found == {image.tobytes(): label for image, label in zip(IMAGES, CLASSES, strict=True)}
    prepared_data.verify(prepared)


@pytest.mark.parametrize("dtype", ["U5", "S5"])
def test_arrays_of_a_folder_have_splits_and_classes_that_are_words(source, dtype):
    words = np.array(["mouse", "cat", "dog"], dtype)[CLASSES]
    for split, rows in (("train", slice(0, 20)), ("val", slice(20, 24)), ("test", slice(24, 30))):
        np.save(source / f"x_{split}.npy", np.stack([IMAGES[rows]] * 3, -1))
        np.save(source / f"y_{split}.npy", words[rows])
    prepared = prepare(describe(source, "arrays"))
    assert prepared.target.class_names == ("cat", "dog", "mouse")
    for split, rows in (("train", slice(0, 20)), ("validation", slice(20, 24)), ("test", slice(24, 30))):
        images, labels = arrays_of(prepared, split)
        np.testing.assert_array_equal(images[..., 2], IMAGES[rows])
        assert [prepared.target.class_names[label] for label in labels] == words[rows].astype(str).tolist()


def test_classes_that_look_alike_or_missing_are_pointed_out(source, capsys):
    fill(source, ("Cat", "cat"))
    assert image_folder.guess(describe(source))[1] == [
        "'Cat' and 'cat' of 'class' may mean the same, and are two values"
    ]
    np.savez(source / "own.npz", x=IMAGES, y=np.array(["Cat", "cat", "nan"])[CLASSES])
    prepare(describe(source / "own.npz", "arrays"))
    said = capsys.readouterr().err
    assert "'Cat' and 'cat' of 'class' may mean the same" in said
    assert "the labels of own: 'nan' is a class; if the label is missing there, remove them\n" in said


def test_arrays_have_the_names_of_keras_or_scikit_learn_and_others_are_named(source, capsys):
    np.savez(source / "own.npz", X_train=IMAGES, y_train=CLASSES, x_valid=IMAGES[:6], y_valid=CLASSES[:6], ids=CLASSES)
    splits = prepare(describe(source / "own.npz", "arrays")).splits
    assert splits["validation"].num_examples == 6
    assert "not used: the array ids\n" in capsys.readouterr().err
    np.savez(source / "own.npz", x_train=IMAGES, y_train=CLASSES, X=IMAGES[:1], y=CLASSES[:1])
    assert sum(split.num_examples for split in prepare(describe(source / "own.npz", "arrays")).splits.values()) == 30
    assert "not used: the arrays X, y\n" in capsys.readouterr().err
    np.savez(source / "own.npz", X=IMAGES, y=CLASSES)
    assert sum(split.num_examples for split in prepare(describe(source / "own.npz", "arrays")).splits.values()) == 30
    assert "not used" not in capsys.readouterr().err


class Harmful:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("harmed",)


def objects(path):
    np.savez(path, x=IMAGES, y=np.array([Harmful()] * 30, object))


def cut_short(path):
    np.savez(path, x=IMAGES, y=CLASSES)
    with zipfile.ZipFile(path) as archive:
        whole = archive.read("x.npy")
        labels = archive.read("y.npy")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", whole[:-7])
        archive.writestr("y.npy", labels)


def flipped(path):
    np.savez_compressed(path, x=IMAGES, y=CLASSES)
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("x.npy").header_offset + 200
    content = bytearray(path.read_bytes())
    content[start : start + 20] = bytes(20)
    path.write_bytes(content)


def saved(**arrays):
    return lambda path: np.savez(path, **arrays)


ARRAYS = [
    (lambda path: None, "no such file"),
    (lambda path: path.write_bytes(b"no archive"), "cannot be read (File is not a zip file)"),
    (objects, "cannot be read (Object arrays cannot be loaded when allow_pickle=False). Save words with .astype(str)"),
    (cut_short, "cannot be read ("),
    (saved(x=np.zeros((30, 0, 4)), y=CLASSES), "x is float64 (30, 0, 4). Allowed: images"),
    (saved(pictures=IMAGES), "has the arrays pictures. Allowed: x_train and y_train"),
    (saved(x=IMAGES, y=CLASSES[:-1]), "x has the shape (30, 5, 4) and y has the shape (29,)"),
    (saved(x=IMAGES / 255, y=CLASSES), "x is float64 (30, 5, 4). Allowed: images, uint8"),
    (
        saved(x=IMAGES / 255, y=CLASSES),
        "Pixels from 0 to 1 become uint8 by (x * 255).astype('uint8')",
    ),
    (
        saved(x=np.arange(600, dtype=np.uint16).reshape(30, 5, 4), y=CLASSES),
        "up to 4095 by (x // 16).astype('uint8'), up to 65535 by (x // 257).astype('uint8'); yours range from 0 to 599",
    ),
    (
        saved(x=np.zeros((30, 3, 5, 5), np.uint8), y=CLASSES),
        "(n, k). np.moveaxis(x, 1, -1) puts channels last",
    ),
    (saved(x=np.full((30, 2), 1e300), y=CLASSES), "x has a value in row 0 that is not finite as float32. Replace it"),
    (
        saved(x=np.ones((30, 2)), y=np.arange(30) * 7),
        "30 of 30 classes have too few. If the labels are quantities: --set",
    ),
    (saved(x=IMAGES, y=CLASSES, X=IMAGES), "has X and x: keep one of them"),
    (
        saved(x=IMAGES, y=CLASSES, x_test=IMAGES, y_test=CLASSES),
        "has the arrays x, x_test, y, y_test. Allowed: x_",
    ),
    (saved(X_train=IMAGES, x_test=IMAGES, y_test=CLASSES), "has X_train but not y_train: give both or neither"),
    (saved(x=np.full((30, 2), np.nan), y=CLASSES), "x has a value in row 0 that is not finite"),
    (saved(x=IMAGES, y=np.where(CLASSES == 2, np.inf, 0.5)), "the labels are float64, and row 2 of them is not finite"),
    (saved(x=IMAGES, y=np.array(["a", "b"] * 15).reshape(15, 2).repeat(2, 0)), "the labels are <U1 (n, 2). Allowed:"),
    (
        saved(x_train=IMAGES, y_train=CLASSES, x_test=IMAGES, y_test=np.eye(3)[CLASSES]),
        "the labels have the shapes (30,), (30, 3). Allowed: (n,) or (n, k), with the same k for all splits",
    ),
    (saved(x=IMAGES, y=IMAGES % 2), "the labels have the shapes (30, 5, 4). Allowed: (n,) or (n, k)"),
    (saved(x=np.stack([IMAGES] * 2, -1), y=CLASSES), "with 1 or 3 or 4 channels"),
    (saved(x=IMAGES, y=CLASSES - 1), "the labels range from -1 to 1"),
    (saved(x=IMAGES[:0], y=CLASSES[:0]), "Both need one row for each example, and at least one example"),
    (saved(x_train=IMAGES, y_train=CLASSES, x_test=IMAGES), "has x_test but not y_test: give both or neither"),
    (flipped, "cannot be read ("),
    (saved(x=IMAGES[:4], y=CLASSES[:4]), "the class '1' has too few examples (1)"),
    (saved(x_train=IMAGES, y_train=CLASSES, x_test=IMAGES[:, :3], y_test=CLASSES), "All splits need the same dtype"),
    (saved(x=IMAGES, y=np.zeros(30, int)), "all labels are '0': a classification needs two classes"),
    (saved(x=IMAGES, y=np.array([b"K\xf6ln"] * 30)), "'utf-8' codec can't decode byte 0xf6"),
    (saved(x=IMAGES, y=np.array(["cat"] * 30)), "all labels are 'cat': a classification"),
    (saved(x=IMAGES, y=np.zeros(30, [("a", "i4")])), "the labels are [('a', '<i4')] (n, 1). Allowed: classes"),
    (saved(x=IMAGES, y=CLASSES.astype("M8[s]")), "the labels are datetime64[s] (n, 1). Allowed: classes"),
]


SCORES = np.linspace(-1, 5, 30)
LABELS = np.stack([CLASSES > 0, CLASSES < 2], 1)


@pytest.mark.parametrize(
    ("labels", "task", "expected", "told"),
    [
        (SCORES, "auto", "regression", SCORES[:, np.newaxis].astype(np.float32)),
        (np.stack([SCORES, -SCORES], 1), "auto", "regression", np.stack([SCORES, -SCORES], 1).astype(np.float32)),
        (CLASSES, "regression", "regression", CLASSES[:, np.newaxis].astype(np.float32)),
        (LABELS, "auto", "multilabel", LABELS.astype(np.uint8)),
        (np.eye(3)[CLASSES], "auto", "classification", CLASSES),
        (np.eye(3, dtype=int)[CLASSES], "multilabel", "multilabel", np.eye(3, dtype=np.uint8)[CLASSES]),
    ],
)
def test_arrays_of_numbers_have_any_task(source, labels, task, expected, told):
    numbers = np.arange(60.0).reshape(30, 2)
    np.savez(source / "own.npz", x=numbers, y=labels)
    prepared = prepare(describe(source / "own.npz", "arrays", task=task, test=6))
    assert (prepared.target.task, prepared.target.num_outputs) == (expected, labels.shape[1] if labels.ndim > 1 else 1)
    assert {name: split.num_examples for name, split in prepared.splits.items()} == {"test": 6, "train": 24}
    for split in prepared.splits.values():
        values, read = np.load(split.features["number"]), np.load(split.labels)
        assert (values.dtype, read.dtype, read.shape[1:]) == (np.float32, told.dtype, prepared.target.label_shape)
        np.testing.assert_array_equal(read, told[values[:, 0].astype(int) // 2])


WRITTEN = [
    (CLASSES + 1, ("1", "2", "3")),
    (np.array([20, 3, 100])[CLASSES], ("3", "20", "100")),
    (CLASSES.astype(np.float32), ("0", "1", "2")),
    (CLASSES + 1.0, ("1", "2", "3")),
    (np.where(CLASSES == 0, -1, 1), ("-1", "1")),
    (CLASSES == 0, ("0", "1")),
]


@pytest.mark.parametrize(("labels", "names"), WRITTEN)
def test_classes_are_the_numbers_that_are_written(source, labels, names, capsys):
    np.savez(source / "own.npz", x=np.arange(30.0)[:, np.newaxis], y=labels)
    prepared = prepare(describe(source / "own.npz", "arrays"))
    assert (prepared.target.task, prepared.target.class_names) == ("classification", names)
    for split in prepared.splits.values():
        rows = np.load(split.features["number"])[:, 0].astype(int)
        assert [int(names[label]) for label in np.load(split.labels)] == labels[rows].tolist()
    told = f"the labels of own are {len(names)} whole numbers of the type {labels.dtype}, so they are read as classes ("
    assert (told in capsys.readouterr().err) == (labels.dtype.kind == "f")


def test_fractions_and_many_whole_numbers_are_a_regression(source):
    for labels in (np.arange(30.0), np.arange(30) % 3 / 2):
        np.savez(source / "own.npz", x=np.arange(30.0)[:, np.newaxis], y=labels)
        assert prepare(describe(source / "own.npz", "arrays")).target.task == "regression"
    np.savez(source / "own.npz", x=np.arange(30.0)[:, np.newaxis], y=CLASSES.astype(float))
    assert prepare(describe(source / "own.npz", "arrays", task="regression")).target.task == "regression"


@pytest.mark.parametrize(("make", "message"), ARRAYS)
def test_arrays_that_cannot_be_trained_on_are_refused(source, make, message):
    make(source / "own.npz")
    assert message in message_of(source / "own.npz", kind="arrays")
    assert not Path("harmed").exists()


# What a source is, and its description.


def test_a_source_says_its_kind(source):
    fill(source / "photos")
    (source / "arrays").mkdir()
    np.save(source / "arrays" / "x.npy", IMAGES)
    np.savez(source / "own.npz", x=IMAGES)
    (source / "letter.doc").touch()
    (source / "photos.tar.gz").touch()
    found = {name: source_files.kind_of(str(source / name)) for name in ("photos", "arrays", "own.npz")}
    assert found == {"photos": "image_folder", "arrays": "arrays", "own.npz": "arrays"}
    assert source_files.kind_of("mnist") == source_files.kind_of("cmaterdb/bangla") == "tfds"
    assert {source_files.kind_of(name) for name in ("my_data:MyPhotos", "my.data:MyPhotos", "mnist:3.0.1")} == {"tfds"}
    for wrong, message in {
        str(source / "letter.doc"): "no kind of dataset reads such a file. Save a table as .csv, arrays as .npz",
        str(source / "photos.tar.gz"): "no kind of dataset reads such a file. Unpack it",
        **dict.fromkeys((str(source / "gone"), "photos.zip", "photos/", "my photos", "C:/photos"), "no such file"),
    }.items():
        with pytest.raises(UserError, match=message):
            source_files.kind_of(wrong)


def test_a_folder_with_a_table_is_no_folder_of_images(source, project):
    (source / "pictures").mkdir()
    save(grey(0), source, "pictures", "0.png")
    (source / "labels.csv").write_text("file,y\npictures/0.png,cat\n")
    table = "For a table, give the file itself as SOURCE: labels.csv"
    assert message_of(source).endswith(f"validation, test. {table}")
    with pytest.raises(UserError, match=rf"--target y: only tables need it; .+Leave --target out. {table}"):
        dvc_data.add(str(source), None, {"target": "y"})
    with pytest.raises(UserError, match=r"--target y: .+ of kind tfds is fixed.+Leave --target out$"):
        dvc_data.add("digits", None, {"target": "y"})


@pytest.mark.parametrize("name", ["../data", "Photos", "a/b", "", "1st", "x" * 101, "a b", "..", "-x", "größe", "a\n"])
def test_a_name_that_is_no_folders_is_refused(name):
    with pytest.raises(UserError, match="cannot be the name of a folder in data/") as caught:
        dataset_folder.check_name(name, asked=True)
    assert "\n" not in str(caught.value)


def test_a_source_gives_its_name():
    assert dataset_folder.check_name("My Photos (2026)", asked=False) == "my_photos_2026"
    assert dataset_folder.check_name("my-photos", asked=True) == "my-photos"
    assert config.load(None, ["dataset.name=my-photos"]).dataset.name == "my-photos"
    with pytest.raises(UserError, match=r"SOURCE = '2026'.+Use --name NAME"):
        dataset_folder.check_name("2026", asked=False)


DESCRIPTIONS = [
    ({"kind": "spreadsheet"}, "unknown dataset.kind 'spreadsheet'"),
    ({"kind": ["arrays"]}, "unknown dataset.kind"),
    ({"tset": 0.1}, "unknown key of a dataset of kind image_folder 'tset': did you mean 'test'"),
    ({"test": True}, "dataset.test = true: true and false have no meaning here"),
    ({"test": 1.5}, r"dataset.test = 1.5: .+Fraction or number of examples for the test split"),
    ({"on_broken": "cry"}, r"dataset.on_broken = 'cry': .+'stop' or 'skip'"),
    ({"image_size": [0, 4]}, r"dataset.image_size = \[0, 4\]: .+greater than 0"),
    (
        {"kind": "table", "columns": {"a": {"kind": "category", "scale": "quantiles"}}},
        "dataset.columns.a.scale = 'quantiles': quantiles need a column of kind number, but this one is category",
    ),
    (
        {"kind": "table", "columns": {"a": {"kind": "number", "scale": "ranks"}}},
        "dataset.columns.a.scale = 'ranks': .+'standardize' or 'quantiles'",
    ),
    (
        {"kind": "table", "columns": {"a": {"kind": "number", "scael": "quantiles"}}},
        "unknown key of dataset.columns.a 'scael': did you mean 'scale'",
    ),
    ({"kind": "table", "columns": {"a": "numbr"}}, "dataset.columns.a.kind = 'numbr': .+'number', 'datetime'"),
    ({"checks": "stop"}, "dataset.checks = 'stop': input should be a valid dictionary. Overrides a check's default"),
    ({"checks": {"duplicate": "stop"}}, "dataset.checks = .+unknown check 'duplicate': did you mean 'duplicates'"),
    ({"checks": {"duplicates": "halt"}}, "dataset.checks = .+'stop', 'warn' or 'off'"),
    ({"checks": {"duplicates": {"threshold": -1}}}, "dataset.checks = .+greater than or equal to 0"),
    ({"checks": {"duplicates": {"limit": 1}}}, "dataset.checks = .+extra inputs are not permitted"),
]


@pytest.mark.parametrize(("values", "message"), DESCRIPTIONS)
def test_a_description_that_is_wrong_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        config.describe({"kind": "image_folder", "name": "own", "source": "x", **values}, "data/own/params.yaml")


def test_a_source_that_dvc_or_the_dataset_itself_would_change_is_refused(project):
    for source, message in (
        ("data", "data/own is inside it"),
        ("data/own", "data/own is inside"),
    ):
        described = config.describe({"kind": "image_folder", "name": "own", "source": source}, "test")
        with pytest.raises(UserError, match=message):
            dataset_folder.add_local(described, project)
    assert not (project / "data" / "own").exists()
    described = config.describe({"kind": "image_folder", "name": "own", "source": "/MANKIND"}, "test")
    assert 'deps:\n      - "/MANKIND"\n    params:' in dataset_folder.local_pipeline(described, project)


def test_a_folder_that_leads_elsewhere_is_refused(project, source):
    (source / "theirs").mkdir()
    (project / "data" / "own").symlink_to(source / "theirs")
    message = "data/own is a link to another folder, in which DVC finds nothing: move it away"
    with pytest.raises(UserError, match=message):
        dataset_folder.add(config.load(None, {"dataset.name": "own"}).dataset, project)
    described = config.describe({"kind": "arrays", "name": "own", "source": str(source)}, "test")
    with pytest.raises(UserError, match=message):
        dataset_folder.add_local(described, project)
    assert not list((source / "theirs").iterdir())


def test_the_pipeline_of_a_users_own_is_left_as_it_is(project, source):
    dataset_folder.add_local(config.describe({"kind": "arrays", "name": "own", "source": str(source)}, "test"), project)
    before = (project / "data" / "own" / "dvc.yaml").read_text()
    assert dataset_folder.add(config.load(None, {"dataset.name": "own"}).dataset, project) == []
    assert (project / "data" / "own" / "dvc.yaml").read_text() == before


def test_a_folder_says_its_own_name(project):
    path = project / "data" / "digits" / "params.yaml"
    path.write_text(path.read_text().replace("name: digits", "name: ../../escaped"))
    with pytest.raises(UserError, match=r"dataset.name = '?../../escaped'?: a dataset has the name of its folder"):
        config.read_description(path.parent)


@pytest.mark.parametrize("labels", [np.arange(20) % 2, np.arange(20) / 2])
def test_arrays_to_validate_on_stay_whole_where_a_test_split_is_taken(source, labels):
    every = np.arange(30.0)[:, np.newaxis]
    path = source / "own.npz"
    np.savez(path, x_train=every[:20], y_train=labels, x_val=every[20:], y_val=labels[:10])
    prepared = prepare(describe(path, kind="arrays", test=4))
    rows = {name: np.load(split.features["number"])[:, 0].tolist() for name, split in prepared.splits.items()}
    assert rows["validation"] == list(range(20, 30))
    assert (len(rows["test"]), prepared.held_out.num_examples) == (4, 4)
    assert prepared.validation_by_class == (prepared.target.task == "classification")
    assert sorted(rows["train"] + rows["test"]) == list(range(20))
    for name, own in rows.items():
        given = np.concatenate([labels, labels[:10]])[np.array(own, int)]
        np.testing.assert_array_equal(np.load(prepared.splits[name].labels).reshape(-1), given)


def test_a_share_of_each_class_is_held_out_the_same_for_ever(project):
    labels = np.array([0] * 50 + [1] * 10 + [2] * 2)
    rows = split_rows(labels, "abc", describe("s"))
    assert np.bincount(labels[rows["test"]]).tolist() == [10, 2, 1]
    assert sorted([*rows["test"], *rows["train"]]) == list(range(62))
    assert rows["test"].tolist() == [6, 14, 17, 18, 20, 25, 28, 34, 42, 48, 56, 57, 60]
    other = split_rows(labels, "abc", describe("s", seed=1))
    assert other["test"].tolist() != rows["test"].tolist()
    for wanted in (4, 7, 20):
        rows = split_rows(np.arange(30) % 3, "abc", describe("s", test=wanted))
        assert len(rows["test"]) == wanted
    with pytest.raises(UserError, match=r"dataset.test = 62: takes 62 of the 62 examples"):
        split_rows(labels, "abc", describe("s", test=62))
