import functools
import gzip
import hashlib
import http.server
import io
import os
import shutil
import stat
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core import example_serializer
from tensorflow_datasets.core.download import checksums, extractor, resource
from tensorflow_datasets.core.features import TensorInfo

from tasks import config, records
from tasks.download import download
from tasks.system.errors import StratagemError, UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), np.uint8)
ARCHIVE = gzip.compress(PIXELS.tobytes(), mtime=0)
DAMAGED = gzip.compress((255 - PIXELS).tobytes(), mtime=0)  # A valid archive with other images in it.


class TinyImages(tfds.core.GeneratorBasedBuilder):
    """A dataset in one archive, which the test's own server serves."""

    VERSION = tfds.core.Version("1.0.0")
    url_infos: dict = {}

    @property
    def url(self):
        return os.environ["TINY_IMAGES_URL"]

    def _info(self):
        image, label = tfds.features.Image(shape=(4, 5, 3)), tfds.features.ClassLabel(names=["no", "yes"])
        features = tfds.features.FeaturesDict({"image": image, "label": label})
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("image", "label"))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(dl_manager.download_and_extract(self.url))}

    def _generate_examples(self, path):
        for i, image in enumerate(np.frombuffer(Path(path).read_bytes(), np.uint8).reshape(-1, 4, 5, 3)):
            yield i, {"image": image, "label": i % 2}


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A web server on this machine with the archive of tiny_images: its folder, its URL and the requests it got."""
    folder = tmp_path / "server"
    (folder / "files").mkdir(parents=True)
    (folder / "files" / "tiny.gz").write_bytes(ARCHIVE)
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            asked.append(self.path)

        def copyfile(self, source, outputfile):
            outputfile.write(source.read(self.server.sends))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=folder)) as running:
        running.folder, running.asked, running.sends = folder, asked, None
        running.url = f"http://127.0.0.1:{running.server_port}/files/tiny.gz"
        register(monkeypatch, running.url)
        thread = threading.Thread(target=running.serve_forever, args=[0.05])
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def register(monkeypatch, url, content=ARCHIVE):
    info = checksums.UrlInfo(size=len(content), checksum=hashlib.sha256(content).hexdigest(), filename="tiny.gz")
    monkeypatch.setenv("TINY_IMAGES_URL", url)
    monkeypatch.setattr(TinyImages, "url_infos", {url: info})


def dataset(name="tiny_images", **values):
    return config.Dataset(
        **{"name": name, "builder": None, "version": None, "image_size": None, "downloads": None, **values}
    )


def message_of(values, error=UserError):
    with pytest.raises(error) as caught:
        download(values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def files_below(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def cached_archive(root):
    (path,) = (path for path in (root / "data").rglob("downloads/**/*.gz"))
    return path


def test_downloads_verifies_and_describes(root, server):
    manifest = download(dataset())
    assert manifest == records.load(records.DatasetManifest, root / "data/tiny_images/raw/manifest.json")
    assert manifest.model_dump() == {
        "name": "tiny_images",
        "version": "1.0.0",
        "tfds_version": tfds.__version__,
        "folder": "data/tiny_images/raw",
        "image_shape": (4, 5, 3),
        "num_classes": 2,
        "class_names": ("no", "yes"),
        "num_examples": {"train": 6},
        "sources": ({"url": server.url, "sha256": hashlib.sha256(ARCHIVE).hexdigest(), "num_bytes": len(ARCHIVE)},),
        "licence": None,
    }
    assert cached_archive(root).read_bytes() == ARCHIVE
    asked = len(server.asked)
    assert download(dataset()) == manifest
    assert len(server.asked) == asked
    assert sorted(p.name for p in (root / "data/tiny_images").iterdir()) == ["raw"]


def test_brought_archives_are_used_and_nothing_is_fetched(root, server, tmp_path):
    brought = tmp_path / "brought" / "tiny_images" / "tiny.gz"
    brought.parent.mkdir(parents=True)
    brought.write_bytes(ARCHIVE)
    manifest = download(dataset(downloads=os.path.relpath(tmp_path / "brought", root)))  # Relative to the project.
    assert manifest.sources[0].url == server.url
    assert manifest.num_examples == {"train": 6}
    assert server.asked == []


@pytest.mark.parametrize("damaged", [DAMAGED, ARCHIVE[:-1], b""], ids=["other content", "one byte short", "empty"])
def test_damaged_brought_archive_is_named(root, server, tmp_path, damaged):
    brought = tmp_path / "brought" / "tiny_images" / "tiny.gz"
    brought.parent.mkdir(parents=True)
    brought.write_bytes(damaged)
    message = message_of(dataset(downloads=tmp_path / "brought"))
    assert f"{server.url}, downloaded to {brought}, has wrong checksum" in message
    assert not files_below(root / "data")
    assert brought.read_bytes() == damaged


@pytest.mark.parametrize("damaged", [DAMAGED, ARCHIVE[:-1]], ids=["other content", "one byte short"])
def test_damaged_cached_archive_is_moved_aside_and_fetched_again(root, server, damaged, capsys):
    download(dataset())
    cached = cached_archive(root)
    cached.write_bytes(damaged)
    shutil.rmtree(root / "data/tiny_images/raw/tiny_images")
    assert download(dataset()).num_examples == {"train": 6}
    assert cached.read_bytes() == ARCHIVE
    aside = root / "data/tiny_images" / f"{cached.name}.bad"
    assert aside.read_bytes() == damaged
    said = capsys.readouterr().err
    assert f"damaged archive of {server.url} (" in said
    assert f"it is now {aside.relative_to(root)}, and is downloaded again" in said


def test_wrong_content_from_the_server_is_refused(root, server):
    (server.folder / "files" / "tiny.gz").write_bytes(DAMAGED)
    message = message_of(dataset())
    assert server.url in message
    assert "wrong checksum" in message
    assert not (root / "data/tiny_images/raw/manifest.json").exists()
    assert not (root / "data/tiny_images/raw/tiny_images").exists()


def test_archive_without_a_registered_checksum_is_refused(root, server, monkeypatch):
    monkeypatch.setenv("TINY_IMAGES_URL", f"{server.url}?unregistered")
    message = message_of(dataset())
    assert "no checksum is registered" in message
    assert f"{server.url}?unregistered" in message


def test_no_network_is_one_message(root, monkeypatch):
    host = "127.0.0.1:9"
    register(monkeypatch, f"http://{host}/files/tiny.gz")
    message = message_of(dataset())
    assert "dataset tiny_images" in message
    assert f"{host} cannot be reached (ConnectionError)" in message
    assert "--set dataset.downloads=FOLDER and put there " in message
    assert f"http://{host}/files/tiny.gz as FOLDER/tiny_images/tiny.gz" in message
    assert "as brought/tiny_images/tiny.gz" in message_of(dataset(downloads="brought"))
    assert not files_below(root / "data")


def test_server_without_the_archive_is_named(root, server):
    (server.folder / "files" / "tiny.gz").unlink()
    message = message_of(dataset())
    assert "HTTP status 404" in message
    assert server.url in message


def test_proxy_of_the_environment_is_asked(root, server, monkeypatch):
    # The proxy is what answers, with the archive of a host that does not exist: the path that it is asked for is a URL.
    register(monkeypatch, "http://archives.invalid/files/tiny.gz")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
    (server.folder / "http:" / "archives.invalid").mkdir(parents=True)
    (server.folder / "files").rename(server.folder / "http:" / "archives.invalid" / "files")
    assert download(dataset()).num_examples == {"train": 6}


def test_download_that_breaks_off_may_be_tried_again(root, server):
    server.sends = 10  # Of the archive, when the connection is closed.
    assert "was interrupted" in message_of(dataset(), StratagemError)
    server.sends = None
    assert not (root / "data/tiny_images/raw/manifest.json").exists()
    assert download(dataset()).num_examples == {"train": 6}
    assert not list((root / "data").rglob("*.tmp.*"))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"name": "mnits"}, "did you mean 'mnist'?"),
        ({"name": "mnist", "version": "9.9.9"}, "at version 9.9.9, only: 3.0.1"),
        ({"name": "div2k"}, "cannot be trained on"),
    ],
)
def test_wrong_name_leaves_nothing(root, values, expected):
    assert expected in message_of(dataset(**values))
    assert not (root / "data").exists()


def test_archives_behind_a_login_are_asked_for(root):
    message = message_of(dataset("imagenet2012"))
    assert "FOLDER/imagenet2012" in message
    assert "ILSVRC2012_img_train.tar" in message


def test_folder_that_cannot_be_written(root):
    (root / "data").mkdir()
    (root / "data" / "digits").write_text("a file where the folder should be")
    assert "data/digits: cannot be written" in message_of(dataset("digits"))


def test_damaged_shard_is_made_again(root):
    manifest = download(dataset("digits"))
    whole = files_below(root / "data/digits/raw")
    shard = next((root / "data/digits/raw/digits").rglob("*train.tfrecord*"))
    content = shard.read_bytes()
    half = len(content) // 2
    shard.write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
    assert download(dataset("digits")) == manifest
    # Also: made twice, the same bytes.
    assert files_below(root / "data/digits/raw") == whole


def test_a_damaged_description_is_named_with_its_fix(root):
    manifest = download(dataset("digits"))
    described = next((root / "data/digits/raw/digits").rglob("dataset_info.json"))
    described.write_text("{half")
    assert message_of(dataset("digits")) == (
        f"{described} is damaged. Remove it, and TFDS makes it again: rm {described}"
    )
    described.unlink()
    assert download(dataset("digits")) == manifest


def test_another_version_takes_the_place_of_the_old(root, server, monkeypatch):
    download(dataset())
    monkeypatch.setattr(TinyImages, "VERSION", tfds.core.Version("1.0.1"))
    assert download(dataset()).version == "1.0.1"
    made = root / "data/tiny_images/raw/tiny_images"
    assert [p.name for p in made.iterdir()] == ["1.0.1"]
    (made / "notes.md").write_text("mine")
    elsewhere = root.parent / "elsewhere"
    (elsewhere / "other.tmp.1").mkdir(parents=True)  # What another project's TFDS is fetching.
    shutil.rmtree(made.with_name("downloads"))
    made.with_name("downloads").symlink_to(elsewhere)
    monkeypatch.setattr(TinyImages, "VERSION", tfds.core.Version("1.0.2"))
    assert download(dataset()).version == "1.0.2"
    assert [p.name for p in made.iterdir()] == ["1.0.2"]
    assert (root / "data/tiny_images/set_aside/tiny_images/notes.md").read_text() == "mine"
    assert (elsewhere / "other.tmp.1").is_dir()


def test_records_are_written_in_one_order():
    # Protobuf's own order differs from process to process: 1 in 40,320 to pass with it.
    names = [f"feature{i}" for i in range(8)]
    serializer = example_serializer.ExampleSerializer({name: TensorInfo((), np.int64) for name in names})
    record = serializer.serialize_example(dict.fromkeys(names, 1))
    places = [record.index(name.encode()) for name in names]
    assert places == sorted(places)
    assert tf.train.Example.FromString(record).features.feature["feature3"].int64_list.value == [1]


def test_nothing_in_raw_says_where_or_when(root):
    download(dataset("digits"))
    for name, content in files_below(root / "data/digits/raw").items():
        assert str(root).encode() not in content, name
        assert time.strftime("%Y-%m").encode() not in content, name


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_leads_out_of_no_folder(tmp_path, kind):
    """What is unpacked, TFDS unpacks, and only what has the sha256 that is registered."""
    evil, names = tmp_path / f"evil.{kind}", ("../up", "a/../../up", f"{tmp_path}/absolute", "good", "folder/inside")
    if kind == "tar":
        with tarfile.open(evil, "w") as archive:
            for link in ("folder", "link"):
                for what in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                    member = tarfile.TarInfo(link)
                    member.type, member.linkname = what, str(tmp_path / "mine")
                    archive.addfile(member)
            for name in names:
                member = tarfile.TarInfo(name)
                member.size = 4
                archive.addfile(member, io.BytesIO(b"evil"))
    else:
        with zipfile.ZipFile(evil, "w") as archive:
            for name in names:
                archive.writestr(name, "evil")
            link = zipfile.ZipInfo("link")
            link.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(link, str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    found = extractor.get_extractor()
    with found.tqdm():
        found.extract(evil, resource.ExtractMethod[kind.upper()], tmp_path / "out" / "of").get()
    unpacked = {path.relative_to(tmp_path / "out" / "of").as_posix() for path in (tmp_path / "out").rglob("*")}
    assert unpacked == {".", "folder", "folder/inside", "good", *(["link"] if kind == "zip" else [])}
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()], "a link is its name in a file"
    assert {path.name for path in tmp_path.iterdir()} == {evil.name, "mine", "out"}
    assert not list((tmp_path / "mine").iterdir())


MINE = """\
import numpy
import tensorflow_datasets as tfds
class Mine(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    def _info(self):
        features = {"image": tfds.features.Image(shape=(1, 1, 1)), "label": tfds.features.ClassLabel(names=["a", "b"])}
        features = tfds.features.FeaturesDict(features)
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("image", "label"))
    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}
    def _generate_examples(self):
        yield 0, {"image": numpy.zeros((1, 1, 1), "uint8"), "label": 1}
"""


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "yield 0",
            "open('gone.csv')\n        yield 0",
            r"fails \(FileNotFoundError: .+gone.csv', mine\d+.py line 12\)",
        ),
        ('"label": 1', '"label": 2', r"fails \(ValueError: .+Class label 2 greater"),
        (
            '("image", ',
            '("img", ',
            r"its supervised keys \('img', 'label'\) name 'img', but its features are image, label",
        ),
    ],
)
def test_an_own_builder_that_fails_is_named_with_the_reason(root, own_imports, before, after, message):
    name = f"mine{len(after)}"  # TFDS and Python keep what they have imported.
    Path(f"{name}.py").write_text(MINE.replace(before, after).replace("Mine", name.title()))
    own = f"{name}:{name.title()}"
    with pytest.raises(UserError, match=f"dataset.name = '{name}.*'.* {message}"):
        download(config.Dataset(name=name, builder=own, version=None, image_size=None, downloads=None))
