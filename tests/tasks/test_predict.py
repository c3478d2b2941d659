"""What a trained model says of raw inputs: the same as Keras, whatever is broken beside them, in each kind of file."""

import csv
import importlib.util
import io
import json
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pandas
import pytest
from PIL import Image

from tasks import records
from tasks.data import encoding
from tasks.data.encoding import cells
from tasks.data.encoding.pictures import MORE_FORMATS, ORIENTATION
from tasks.runs.lineage import version_in
from tasks.serving import raw_model
from tasks.serving.predict import predict
from tasks.serving.raw_model import RawModel, meaning
from tasks.system.errors import UserError
from tasks.tracking import trained_models
from tasks.tracking.models import fetch_model
from tasks.tracking.store import open_store
from tests.tasks.registering import IMAGES, VERSION, Trained, save_model


def ask(model, *inputs, **given):
    values = {"to": None, "format": "jsonl", "top_k": 1, "probabilities": False, "batch_size": 2, "encoding": "utf-8"}
    return predict(records.PredictionRequest(model=model, inputs=inputs, folder=os.getcwd(), **(values | given)))


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture
def registered(store):
    trained = Trained()
    records.save(trained.training, Path(trained.run.folder, "records", "training.json"))
    folder = Path("data/digits")
    records.save(trained.prepared, folder / "prepared" / "manifest.json")
    lock = (folder / "dvc.lock").read_text()
    (folder / "dvc.lock").write_text(lock.replace(version_in(lock, "digits"), VERSION))
    return trained, trained.register()


@pytest.fixture
def pictures(project):
    """The five images as files, and two that are none."""
    Path("photos/more").mkdir(parents=True)
    for number, image in enumerate(IMAGES):
        Image.fromarray(image[..., 0]).save(f"photos/{number}.png")
    Path("photos/2a.png").write_bytes(b"no image")
    Path("photos/more/cut.png").write_bytes(Path("photos/0.png").read_bytes()[:60])
    return Path("photos")


def expected(trained):
    logits = keras.saving.load_model(trained.training.final_model)(IMAGES).numpy().astype(float)
    shares = np.exp(logits - logits.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


def test_a_folder_of_images_is_told_as_keras_tells_it_and_what_is_broken_has_its_reason(registered, pictures):
    trained, result = registered
    address = f"models:/{result.model_name}@champion"
    found = ask(address, "photos", to="out.jsonl", top_k=5, probabilities=True)
    assert (found.num_examples, found.num_failed, found.model) == (7, 2, f"{result.model_name}/1")
    rows = lines("out.jsonl")
    assert tuple(rows) == found.first
    names = [f"photos/{name}.png" for name in ("0", "1", "2", "2a", "3", "4", "more/cut")]
    assert [row["source"] for row in rows] == names
    formats = "PNG, JPEG, BMP, GIF, WEBP, TIFF, JPEG2000, AVIF, PPM, ICO"
    formats += ", HEIF" * (importlib.util.find_spec("pi_heif") is not None)
    assert rows[3]["error"] == f"is not a whole image (allowed: {formats})"
    assert rows[6]["error"].startswith("is not a whole image (")
    assert {row["prediction"] for row in (rows[3], rows[6])} == {None}
    whole, shares = [row for row in rows if row["error"] is None], expected(trained)
    told = np.array([[row[f"probability:{name}"] for name in "abc"] for row in whole])
    np.testing.assert_allclose(told, shares, rtol=1e-5)
    best = np.argsort(-shares, 1)
    for place, end in enumerate(("", "_2", "_3")):
        assert [row[f"prediction{end}"] for row in whole] == ["abc"[one] for one in best[:, place]]
    assert sum(found.counts.values()) == 5
    # Of pixels, of the run by its id, and of its file: the same.
    np.save("pixels.npy", IMAGES[..., 0])  # Grey images without the axis of channels, as `data add` takes them.
    for model in (address, trained.run.run_id[:8], trained.training.final_model):
        again = ask(model, "pixels.npy", probabilities=True)
        # Keras' last digit depends on how many examples a batch has.
        expected_shares = [row["probability:b"] for row in whole]
        assert [row["probability:b"] for row in again.first] == pytest.approx(expected_shares, rel=1e-5), model


@pytest.mark.slow
def test_each_kind_of_file_has_the_same(registered, pictures):
    _, result = registered
    rows = {}
    for kind in ("jsonl", "csv", "parquet", "html"):
        ask(f"models:/{result.model_name}/1", "photos", to=f"out.{kind}", format=kind)
    rows["jsonl"] = lines("out.jsonl")
    with open("out.csv", newline="") as file:
        rows["csv"] = list(csv.DictReader(file))
    rows["parquet"] = pandas.read_parquet("out.parquet").to_dict("records")
    for kind, found in rows.items():
        assert [row["source"] for row in found] == [row["source"] for row in rows["jsonl"]], kind
        assert [
            None if row["prediction"] in ("", None) or pandas.isna(row["prediction"]) else row["prediction"]
            for row in found
        ] == [row["prediction"] for row in rows["jsonl"]], kind
        shares = [float(row["probability"] or "nan") for row in found]
        assert [one for one in shares if one == one] == [
            row["probability"] for row in rows["jsonl"] if row["probability"]
        ], kind
    page = Path("out.html").read_text()
    assert page.count("data:image/png;base64,") == 5
    assert page.count("is not a whole image") == 2
    assert "<script" not in page


def test_what_there_is_nothing_of(project):
    inputs = keras.Input((2,), name="number")
    keras.Model(inputs, keras.layers.Dense(1)(inputs)).save("sum.keras")
    np.save("none.npy", np.zeros((0, 2), np.float32))
    for kind in ("jsonl", "csv", "parquet"):
        assert ask("sum.keras", "none.npy", to=f"out.{kind}", format=kind).num_examples == 0
    assert Path("out.csv").read_text() == "source,row,prediction:output 0,error\n".replace(":output 0", "")
    assert len(pandas.read_parquet("out.parquet")) == 0
    with pytest.raises(UserError, match=r"--format html needs images, but .*sum\.keras takes arrays"):
        ask("sum.keras", "none.npy", to="out.html", format="html")


@pytest.mark.slow
def test_a_sheet_of_pictures_escapes_what_files_are_called(registered, project):
    _, result = registered
    Image.fromarray(IMAGES[0, ..., 0]).save("<b>&.png")
    ask(f"models:/{result.model_name}/1", "<b>&.png", to="out.html", format="html")
    page = Path("out.html").read_text()
    assert "&lt;b&gt;&amp;.png" in page
    assert "<b>&.png" not in page


@pytest.mark.slow
def test_a_file_that_is_damaged_or_is_not_there_is_one_message(registered, store):
    trained, result = registered
    name = result.model_name
    for model, message in {
        f"models:/{name}@champoin": f"unknown model 'models:/{name}@champoin': did you mean 'models:/{name}@champion'",
        f"models:/{name}/7": f"unknown model 'models:/{name}/7'",
        f"models:/{name}": "is not the address of a model: write models:/NAME@ALIAS or models:/NAME/VERSION",
        "none.keras": "model 'none.keras': no such file",
        "0" * 32: f"unknown run '{'0' * 32}'",
    }.items():
        with pytest.raises(UserError, match=message):
            raw_model.load(model)
    shutil.copy(trained.training.final_model, "copy.keras")
    Path("copy.keras").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"copy\.keras: Keras cannot load"):
        raw_model.load("copy.keras")


@pytest.mark.slow
def test_a_file_of_anywhere_takes_images_and_gives_numbers(registered, pictures):
    trained, _ = registered
    shutil.copy(trained.training.final_model, "../copy.keras")
    found = ask("../copy.keras", "photos/0.png")
    logits = keras.saving.load_model("../copy.keras").predict(IMAGES[:1], verbose=0)[0]
    assert [found.first[0][f"prediction:output {place}"] for place in range(3)] == pytest.approx(logits, rel=1e-5)


def swap_classes(file: Path) -> None:
    target = json.loads(file.read_text())
    file.write_text(json.dumps(target | {"class_names": target["class_names"][::-1]}))


# What is valid by itself, and gives other predictions: of a run's model, and of a version's.
CHANGED = {
    "models/final.keras": save_model,
    "models/target.json": swap_classes,
    "models/encoding.json": lambda file: file.write_text(file.read_text().replace("[4, 4, 1]", "[4, 4, 3]")),
    "models/manifest.json": Path.unlink,
    "data/model.keras": save_model,
    "data/target.json": swap_classes,
    "code/{package}/__init__.py": lambda file: file.write_text(file.read_text() + "\n"),
    "MLmodel": lambda file: file.write_text(file.read_text() + "\n"),
    "manifest.json": Path.unlink,
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_model_with_a_file_that_was_changed_is_refused(registered, name):
    trained, result = registered
    version = f"models:/{result.model_name}/1"
    folder = Path(trained.run.folder)
    if not name.startswith("models/"):
        folder = fetch_model(version, "copies").keras_file.parents[1]
    (package,) = (path.name for path in (folder / "code").glob("encoding_*")) if "{" in name else ("",)
    CHANGED[name](file := folder / name.format(package=package))
    wrong = r"is damaged or was changed: its sha256 is" if file.exists() else r"is missing"
    for model in (trained.run.run_id, trained.training.final_model) if name.startswith("models/") else (version,):
        with pytest.raises(UserError, match=rf"{re.escape(str(file))} {wrong}"):
            raw_model.load(model)


def test_a_runs_model_needs_no_data_any_more(registered, pictures):
    trained, _ = registered
    before = ask(trained.run.run_id, "photos", probabilities=True).first
    shutil.rmtree("data/digits")
    assert ask(trained.run.run_id, "photos", probabilities=True).first == before


@pytest.mark.slow
def test_without_a_model_it_is_the_only_champion(registered):
    _, result = registered
    assert fetch_model(None, "copies").name == f"{result.model_name}/1"
    Trained("register.model_name=other").register()
    with pytest.raises(UserError, match=f"2 registered models.*models:/{result.model_name}@champion, models:/other@ch"):
        raw_model.load(None)
    client = open_store()
    for name in (result.model_name, "other"):
        client.delete_registered_model_alias(name, "champion")
    with pytest.raises(UserError, match="no registered model is @champion: train one with `stratagem run`"):
        raw_model.load(None)


FEATURES = {
    "number": {
        "kind": "number", "shape": (2,), "dtype": "float32",
        "columns": [
            {"name": "size", "kind": "number", "width": 1, "fill": 1.0},
            {"name": "age", "kind": "number", "width": 1, "fill": None},
        ],
    },
    "photo": {
        "kind": "image", "shape": (2, 2, 1), "dtype": "uint8",
        "columns": [{"name": "photo", "kind": "image", "width": 1}],
    },
}  # fmt: skip


def test_rows_that_are_whole_are_encoded_whatever_is_beside_them(project):
    Image.new("L", (4, 4), 9).save("ok.png")
    encoder = encoding.Encoder(FEATURES, {})
    columns = {
        "size": ["1", None, "x", "4", "5", "6"],
        "age": ["1", "2", "3", None, "5", "6"],
        "photo": ["ok.png", None, "ok.png", "ok.png", "none.png", "/etc"],
    }
    encoded, broken = encoder.encode_whole(columns, Path.cwd())
    assert broken == {
        2: "column 'size': 'x' is not a number",
        3: "column 'age': is missing",
        4: "column 'photo' is not a whole image (no such file)",
        5: "column 'photo' is not a whole image (it is a folder)",
    }
    assert encoded["number"].tolist() == [[1, 1], [1, 2]]
    assert encoded["photo"][:, 0, 0, 0].tolist() == [9, 0]
    none = {name: values[2:] for name, values in columns.items()}
    encoded, broken = encoder.encode_whole(none, Path.cwd())
    assert (len(encoded["number"]), len(broken)) == (0, 4)


def test_what_outputs_mean():
    logits = np.array([[0.0, np.log(3), -9], [2, 1, 0]], np.float32)
    labels = records.Target(task="multilabel", num_outputs=3, class_names=("x", "y", "z"))
    told = meaning(labels, 1, False)(logits)
    assert told["prediction"] == ["x;y", "x;y;z"]
    assert told["probability:y"] == pytest.approx([0.75, 1 / (1 + np.exp(-1))])
    numbers = records.Target(task="regression", num_outputs=1, columns=("price",))
    assert meaning(numbers, 1, False)(logits[:, 1:2]) == {"prediction": [1.098612, 1.0]}
    several = records.Target(task="regression", num_outputs=3, columns=("x", "y", "z"))
    assert list(meaning(several, 9, True)(logits)) == [
        "prediction:x",
        "prediction:y",
        "prediction:z",
    ]


def test_numbers_are_numbers_in_parquet_too(project):
    inputs = keras.Input((2,), name="number")
    keras.Model(inputs, keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs)).save("sum.keras")
    np.save("two.npy", np.array([[1, 2], [3, 4]], np.float32))
    ask("sum.keras", "two.npy", to="out.parquet", format="parquet")
    assert pandas.read_parquet("out.parquet")["prediction"].tolist() == [3.0, 7.0]


def test_code_in_a_file_of_a_model_is_not_run(project):
    inputs = keras.Input((2,), name="number")
    keras.Model(inputs, keras.layers.Lambda(lambda x: [x, open("planted", "w").close()][0])(inputs)).save("own.keras")
    Path("planted").unlink()  # To make the model has called it.
    np.save("two.npy", np.zeros((2, 2), np.float32))
    with pytest.raises(UserError, match=r"own\.keras: Keras cannot load .*[Ll]ambda"):
        ask("own.keras", "two.npy")
    assert not Path("planted").exists()


def test_a_model_that_unpacks_to_more_than_the_memory_is_refused(project):
    with zipfile.ZipFile("bomb.keras", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("config.json", b" " * 1000)
        archive.infolist()[0].file_size = 2**50
    np.save("two.npy", np.zeros((2, 2), np.float32))
    with pytest.raises(UserError, match=r"bomb\.keras unpacks to 1.1 PB, but only [\d.]+ .B of"):
        ask("bomb.keras", "two.npy")


def test_an_output_that_is_no_number_is_a_row_with_an_error(project):
    inputs = keras.Input((2,), name="number")
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    keras.Model(inputs, layer(inputs)).save("sum.keras")
    np.save("given.npy", np.array([[1, 2], [np.inf, 1], [3, 4]], np.float32))
    found = ask("sum.keras", "given.npy", to="out.jsonl")
    assert [row["prediction"] for row in lines("out.jsonl")] == [3, None, 7]
    assert lines("out.jsonl")[1]["error"] == "the model's output is not a finite number"
    assert found.num_failed == 1
    np.save("wrong.npy", np.zeros((3, 4), np.float32))
    with pytest.raises(UserError, match=r"'number' is float32 \(2, 4\), but .*sum\.keras takes float32 \(n, 2\)"):
        ask("sum.keras", "wrong.npy")


@pytest.mark.slow
def test_standard_output_is_left_by_who_reads_it(registered, pictures):
    _, result = registered
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(BrokenPipeError):
        ask(f"models:/{result.model_name}/1", "photos/0.png", stdout=write)


def test_a_model_that_brings_other_code_of_the_same_name_takes_its_own(project, tmp_path):
    found = {}
    for unit in (1, 2):
        folder = tmp_path / f"model{unit}"
        (folder / "code").mkdir(parents=True)
        code = (
            "import keras\n@keras.saving.register_keras_serializable('own')\nclass Times(keras.layers.Layer):\n"
            f"    def call(self, x):\n        return x * {unit}.0\n"
        )
        (folder / "code" / "own_layers.py").write_text(code)
        scope: dict[str, object] = {}
        exec(compile(code, "own", "exec"), scope)  # noqa: S102  # The code is written above.
        inputs = keras.Input((2,), name="number")
        keras.Model(inputs, scope["Times"]()(inputs)).save(folder / "model.keras")
        found[unit] = trained_models.TrainedModel(
            f"m/{unit}", folder / "model.keras", None, None, "own_layers", folder / "code"
        )
    one, two = RawModel(found[1]), RawModel(found[2])
    given = {"number": np.ones((1, 2), np.float32)}
    assert two.outputs(given).tolist() == [[2, 2]]
    assert one.outputs(given).tolist() == [[1, 1]], "the first one keeps its own"


def test_the_encoder_of_images_takes_base64_too(project):
    import base64

    file = io.BytesIO()
    Image.new("L", (2, 2), 7).save(file, "PNG")
    encoder = encoding.Encoder({"photo": FEATURES["photo"]}, {})
    text = base64.b64encode(file.getvalue()).decode()
    for given, folder in ((f"data:image/png;base64,{text}", Path.cwd()), (text, None)):
        encoded, broken = encoder.encode_whole({"photo": [given]}, folder)
        assert (encoded["photo"].max(), broken) == (7, {})


def turned(image):
    image = Image.fromarray(image)
    image.getexif()[ORIENTATION] = 6
    return image


NOISE = np.random.default_rng(0).integers(0, 256, (48, 48, 4), np.uint8)
KINDS = {
    "grey": Image.fromarray(NOISE[..., 0]),
    "coloured": Image.fromarray(NOISE[..., :3]),
    "transparent": Image.fromarray(NOISE),
    "16 bits": Image.fromarray(NOISE[..., 0].astype(np.uint16) * 256),
    "turned": turned(NOISE[:, :20, :3]),
    "of a palette": Image.fromarray(NOISE[..., :3]).quantize(9),
    "black and white": Image.fromarray(NOISE[..., 0] > 99),
}
PLAIN = ("grey", "coloured")
SAVED = [
    *(("TIFF", {}, kind) for kind in KINDS),
    *(("TIFF", {"compression": compression}, "coloured") for compression in ("tiff_lzw", "tiff_deflate", "packbits")),
    ("TIFF", {"compression": "group4"}, "black and white"),
    *(("JPEG2000", {}, kind) for kind in (*PLAIN, "transparent", "16 bits")),
    *(("PPM", {}, kind) for kind in (*PLAIN, "16 bits", "black and white")),
    *(("ICO", {"sizes": [(48, 48)]}, kind) for kind in (*PLAIN, "transparent", "of a palette")),
    *(("AVIF", {"quality": 100, "subsampling": "4:4:4"}, kind) for kind in (*PLAIN, "transparent", "turned")),
]


@pytest.mark.parametrize(("format", "options", "kind"), SAVED)
def test_a_picture_has_the_pixels_of_the_same_as_png(format, options, kind, tmp_path):
    image = KINDS[kind]
    # As bytes: AVIF takes what it says of turning out of what it is given.
    exif = {} if format in ("PPM", "ICO") else {"exif": image.getexif().tobytes()}
    image.save(tmp_path / "a.png", exif=image.getexif().tobytes())
    image.save(tmp_path / "b", format, **exif, **options)
    feature = FEATURES["photo"] | {"shape": (30, 20, 3)}
    found, broken = encoding.Encoder({"photo": feature}, {}).encode_whole({"photo": ["a.png", "b"]}, tmp_path)
    assert broken == {}
    right, pixels = found["photo"].astype(int)
    assert abs(pixels - right).max() <= (2 if format == "AVIF" else 0), "AVIF is not exact"
    # In requests and data, where a stranger may have made it, it is not an image.
    with pytest.raises(cells.BadValue, match=r"allowed: PNG, JPEG, BMP, GIF, WEBP\)"):
        encoding.Encoder({"photo": feature}, {}).encode({"photo": [(tmp_path / "b").read_bytes()]})


HEIC = Path(__file__).with_name("turned.heic")
"""Four colours in 64 x 48 pixels, of a telephone that was held upright: so 48 x 64 are seen. pillow-heif wrote it."""
SEEN = {(0, 0): (250, 240, 20), (0, 1): (220, 30, 30), (1, 0): (40, 160, 60), (1, 1): (30, 60, 200)}


def seen(pixels):
    """Return the colour in the middle of each quarter."""
    height, width, _ = pixels.shape
    return {(y, x): pixels[height // 4 + y * height // 2, width // 4 + x * width // 2] for y, x in SEEN}


def test_a_photograph_of_a_telephone_is_read_where_its_decoder_is_installed(tmp_path):
    pytest.importorskip("pi_heif", reason="the extra 'heic' is not installed")
    whole = HEIC.read_bytes()
    (tmp_path / "cut.heic").write_bytes(whole[:-100])
    feature = FEATURES["photo"] | {"shape": (32, 24, 3)}
    columns = {"photo": [str(HEIC), "cut.heic"]}
    found, broken = encoding.Encoder({"photo": feature}, {}).encode_whole(columns, tmp_path)
    assert list(broken) == [1]
    assert broken[1].startswith("is not a whole image (")
    assert found["photo"].shape == (1, 32, 24, 3)
    for place, colour in seen(found["photo"][0]).items():
        np.testing.assert_allclose(colour, SEEN[place], atol=12, err_msg=str(place))
    # In requests and data, where a stranger may have made it, it stays one that is not decoded.
    with pytest.raises(cells.BadValue, match=r"\(HEIC, which Pillow cannot read: convert it to JPEG or PNG \(heif"):
        encoding.Encoder({"photo": feature}, {}).encode({"photo": [whole]})


def test_a_photograph_of_a_telephone_says_what_reads_it(monkeypatch, project):
    monkeypatch.setitem(sys.modules, "pi_heif", None)  # As if the extra was not installed.
    monkeypatch.setattr(Image, "OPEN", {name: one for name, one in Image.OPEN.items() if name != "HEIF"})
    keras.Sequential([keras.Input((4, 4, 3), name="photo"), keras.layers.Flatten()]).save("flat.keras")
    found = ask("flat.keras", str(HEIC))
    assert found.first[0]["error"] == (
        "is not a whole image (HEIC, which Pillow cannot read: convert it to JPEG or PNG (heif-convert; sips on "
        "macOS); for predictions, you can also install pi-heif (the extra 'heic'))"
    )


def saved(format, image=KINDS["coloured"], **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


FRACTIONS = saved("TIFF", Image.fromarray(np.ones((4, 4), np.float32)))
WIDE = saved("TIFF", Image.fromarray(np.full((4, 4), 65_536, np.int32)))
NEGATIVE = saved("TIFF", Image.fromarray(np.full((4, 4), -1, np.int32)))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((saved(format)[:-300], "") for format in MORE_FORMATS),
        (saved("TIFF", compression="tiff_lzw")[:-300], r" \((?!Corrupt EXIF data)"),
        (FRACTIONS, r" \(its pixels are fractions: save it with 8 or 16 bits per channel\)"),
        (WIDE, r" \(its pixels have 32 bits: save it with 8 or 16 bits per channel\)"),
        (NEGATIVE, r" \(its pixels have 32 bits: "),
        (b"P6\n20000 20000\n255\n", r" \(Image size \(400000000 pixels\) exceeds limit of 178956970 pixels"),
        (b"P6\n10000 10000\n255\n", r" \(Image size \(100000000 pixels\) exceeds limit of 89478485 pixels"),
        (
            b"\0\0\0\x18ftypmif1" + bytes(40),
            r" \(allowed: PNG, .*HEIF\)$"
            if importlib.util.find_spec("pi_heif")
            else r" \(HEIC, which Pillow cannot read: convert it to JPEG or PNG",
        ),
        # Another program would have to draw it.
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", r" \(allowed: "),
    ],
)
def test_a_broken_picture_of_any_kind_is_a_row_with_its_error(content, said, project):
    keras.Sequential([keras.Input((4, 4, 3), name="photo"), keras.layers.Flatten()]).save("flat.keras")
    Path("b").write_bytes(content)
    KINDS["coloured"].save("c.tif")
    found = ask("flat.keras", "b", "c.tif")
    assert (found.num_examples, found.num_failed) == (2, 1)
    assert re.match(f"is not a whole image{said}", found.first[0]["error"]), found.first[0]["error"]
