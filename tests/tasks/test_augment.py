from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from tasks import config
from tasks.input.augment import augment, augment_batch, check_augmentation
from tasks.input.batches import Batches, InputShare
from tasks.input.draws import RAND_AUGMENT, pass_draws, with_partners
from tasks.input.order import order
from tasks.records import Feature
from tasks.system.errors import UserError

OFF = config.Augmentation(
    flip=False, crop_padding=0, translation=0, rotation=0, zoom=0, fill_mode="constant", brightness=0, contrast=0,
    rand_augment=None, erasing=0, mixup=0, cutmix=0,
)  # fmt: skip
MOST = {
    "flip": True, "crop_padding": 2, "translation": 1.0, "rotation": 1.0, "zoom": 1.0, "brightness": 1.0,
    "contrast": 1.0, "rand_augment": config.RandAugment(num_layers=3, magnitude=10), "erasing": 1.0,
}  # fmt: skip


def batches_of(count, size, **options):
    """Batches whose examples are not read."""
    return Batches(count, size, False, source=SimpleNamespace(rows=np.arange(count)), **options)


def section_of(**values):
    return OFF.model_copy(update=values)


@pytest.mark.slow  # What compiles in each example takes seconds.
@hypothesis_settings(deadline=None, max_examples=5)
@example(count=5, seed=3, shape=(9, 7, 3), on=set(MOST), fill_mode="reflect")
@example(count=5, seed=4, shape=(8, 9, 1), on=set(MOST), fill_mode="nearest")
@given(
    count=st.integers(0, 5),
    seed=st.integers(0, 100),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3, 4])),
    on=st.sets(st.sampled_from(sorted(MOST))),
    fill_mode=st.sampled_from(["constant", "nearest", "reflect"]),
)
def test_numpy_tensorflow_xla_and_jax_augment_alike(count, seed, shape, on, fill_mode):
    section = section_of(fill_mode=fill_mode, **{key: MOST[key] for key in on})
    images = np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)
    draws = pass_draws(count, seed, 0, section)
    assert draws.dtype == np.int32
    here = augment(images, draws, section)
    assert here.dtype == np.uint8
    assert here.shape == images.shape
    for jit_compile in (False, True):
        traced = tf.function(lambda *args: augment(*args, section), jit_compile=jit_compile)
        np.testing.assert_array_equal(traced(tf.constant(images), tf.constant(draws)).numpy(), here)
    if count:
        np.testing.assert_array_equal(jax.jit(lambda *args: augment(*args, section))(images, draws), here)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "num_classes", "jit_compile"),
    [(3, 3, False), pytest.param(1, 0, True, marks=pytest.mark.exhaustive)],  # To compile it takes 4 s.
)
def test_numpy_tensorflow_xla_and_jax_mix_alike(num_classes, channels, jit_compile):
    rng = np.random.default_rng(channels)
    section = section_of(mixup=0.5, cutmix=1.0, rand_augment=config.RandAugment(num_layers=2, magnitude=9))
    draws = pass_draws(60, 3, 0, section)
    places = with_partners(np.arange(60), draws)
    labels = rng.integers(0, 3, 60) if num_classes else rng.integers(0, 2, (60, 4)).astype(np.float32)
    batch = (
        rng.integers(0, 256, (60, 7, 9, channels), np.uint8)[places],
        labels[places],
        rng.random(60, np.float32)[places],
    )
    here = augment_batch(batch, draws[places], section, num_classes)
    assert [one.dtype for one in here] == [np.uint8, np.float32, np.float32]
    assert [one.shape for one in here] == [(60, 7, 9, channels), (60, num_classes or 4), (60,)]
    traced = tf.function(lambda *args: augment_batch(*args, section, num_classes), jit_compile=jit_compile)
    on_tensorflow = [one.numpy() for one in traced(tuple(map(tf.constant, batch)), tf.constant(draws[places]))]
    on_jax = jax.jit(lambda *args: augment_batch(*args, section, num_classes))(batch, draws[places])
    for there in (on_tensorflow, on_jax):
        np.testing.assert_array_equal(there[0], here[0])
        np.testing.assert_array_equal(there[1], here[1])
        np.testing.assert_allclose(there[2], here[2], rtol=1e-6)


def test_the_draws_stay_the_same_with_other_versions_and_machines():
    """As with the order: raw words, made a draw here."""
    two = {"seed": 123, "share": InputShare(worker=1, num_workers=2)}
    draws = batches_of(8, 4, **two, augmentation=section_of(flip=True, crop_padding=2)).draws(2 * 45 + 1)
    assert draws.dtype == np.int32
    assert draws.tolist() == [[1, 1, 1], [1, 3, 3]]
    one_layer = MOST | {"rand_augment": config.RandAugment(num_layers=1, magnitude=10)}
    assert batches_of(8, 4, **two, augmentation=section_of(**one_layer)).draws(2 * 45 + 1).tolist() == [
        [
            1, 1, 1, 7822, -13325, 13325, 7822, -7203, -25711, -137, 320,
            65536, 0, 0, 65536, 0, 0, 256, 256, 256, 256, 0, 1, 0, 0, 48449, 50898, 25648, 12175,
        ],
        [
            1, 3, 3, 111818, -23325, 23325, 111818, -34731, 50211, 40, 475,
            65536, 0, 0, 65536, 0, 29491, 256, 256, 256, 256, 256, 1, 0, 0, 22636, 13637, 37443, 13234,
        ],
    ]  # fmt: skip
    section = section_of(mixup=1.0, cutmix=1.0)
    assert batches_of(8, 4, **two, augmentation=section).draws(2 * 45 + 1)[:, 0, 3:].tolist() == [
        [5, 194, 10533, 53981, 0], [6, 256, 32493, 22376, 27199],
    ]  # fmt: skip


def test_what_one_key_draws_does_not_depend_on_the_others():
    together = pass_draws(50, 0, 0, section_of(**MOST))
    columns = {
        "flip": [0], "crop_padding": [1, 2], "brightness": [9], "contrast": [10], "rand_augment": range(11, 53),
        "erasing": range(53, 57),
    }  # fmt: skip
    for key, places in columns.items():
        alone = pass_draws(50, 0, 0, section_of(**{key: MOST[key]}))
        own = alone[:, places] if key in ("flip", "crop_padding") else alone[:, 3:]
        np.testing.assert_array_equal(together[:, places], own, err_msg=key)


def test_every_draw_is_as_likely_and_has_nothing_to_do_with_the_order():
    section = section_of(flip=True, crop_padding=1)
    batches = batches_of(18_000, 18_000, augmentation=section)
    draws = batches.draws(0)
    counts = Counter(map(tuple, draws.tolist()))
    assert len(counts) == 18
    assert 800 < min(counts.values()) <= max(counts.values()) < 1200  # Of 1000: six standard deviations are 190.
    for drawn in draws.T:
        assert abs(np.corrcoef(drawn, order(18_000, 0, 0))[0, 1]) < 0.05
    assert batches.draws(1)[:, 0].tolist() != draws[:, 0].tolist()
    still = batches_of(50, 50, augmentation=section_of(crop_padding=1))
    assert not still.draws(0)[:, 0].any()
    assert batches_of(50, 50).draws(0) is None


def test_the_numbers_drawn_are_even_and_of_each_other_free():
    keys = {"translation": 0.2, "brightness": 0.5, "contrast": 1.0, "erasing": 0.25}
    draws = pass_draws(20_000, 0, 0, section_of(**keys)).T
    down, right, brightness, contrast, top, left, height, width = draws[[7, 8, 9, 10, 11, 12, 13, 14]].astype(float)
    erased = height > 0
    assert abs(erased.mean() - 0.25) < 0.02  # Six standard deviations are 0.018.
    ranges = {
        "down": (down, -0.2 * 65536, 0.2 * 65536), "right": (right, -0.2 * 65536, 0.2 * 65536),
        "brightness": (brightness, -127.5, 127.5), "contrast": (contrast, 0, 512),
        "top": (top, 0, 65536), "left": (left, 0, 65536),
        "height": ((height[erased] / 65536) ** 2, 0.02, 0.33), "width": ((width[erased] / 65536) ** 2, 0.02, 0.33),
    }  # fmt: skip
    for name, (drawn, least, most) in ranges.items():
        shares = np.histogram(drawn, 8, (least - 1e-4, most + 1e-4))[0] / len(drawn)
        assert np.abs(shares - 1 / 8).max() < 0.03, name
    assert np.abs(np.corrcoef(draws[7:13]) - np.eye(6)).max() < 0.05


# What each kind does, by draws that are made here.


def changed(images, draws, **on):
    """The images with these draws in the place of those of the pass."""
    return augment(images, np.array([[0, 0, 0, *draws]] * len(images), np.int32), section_of(**on))


def mixed(images, labels, draws, **on):
    """Pairs of images and labels of three classes, each mixed to one by these draws: image, shares of the classes."""
    drawn = np.zeros((len(images), 2, 8), np.int32)
    drawn[:, 0, 3:] = draws
    return augment_batch((images, labels), drawn, section_of(**on), 3)


@pytest.mark.parametrize("kept", [0, 64, 255, 256])
def test_mixup_adds_shares_of_images_and_labels(kept):
    images = np.stack([random_images(5, 4, 6, 3), random_images(5, 4, 6, 3, seed=1)], 1)
    found, shares = mixed(images, np.array([[0, 2]] * 5), [0, kept, 0, 0, 0], mixup=1.0)
    wanted = (images[:, 0] * float(kept) + images[:, 1] * float(256 - kept)) / 256
    assert np.abs(found - wanted).max() <= 0.5
    assert shares.tolist() == [[kept / 256, 0, 1 - kept / 256]] * 5


@pytest.mark.parametrize(
    ("y", "x", "side", "rows", "lines"),
    [(0.5, 0.5, 0.5, (2, 6), (5, 15)), (0.0, 0.92, 0.5, (0, 2), (13, 20)), (0.5, 0.5, 0, (0, 0), (0, 0)),
     (0.5, 0.5, 1, (0, 8), (0, 20))],
)  # fmt: skip
def test_cutmix_takes_a_rectangle_and_its_area_of_the_label(y, x, side, rows, lines):
    """Of 8 x 20 pixels, also where the rectangle reaches over the edge."""
    images = np.stack([random_images(2, 8, 20, 1), random_images(2, 8, 20, 1, seed=1)], 1)
    draws = [0, 256, *(round(65536 * share) for share in (y, x, side))]
    found, shares = mixed(images, np.array([[0, 1], [2, 2]]), draws, cutmix=1.0)
    wanted, taken = images[:, 0].copy(), np.diff(rows)[0] * np.diff(lines)[0] / 160
    wanted[:, slice(*rows), slice(*lines)] = images[:, 1, slice(*rows), slice(*lines)]
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(shares, [[1 - taken, taken, 0], [0, 0, 1]], atol=1 / 512)


def test_shares_are_drawn_of_their_distributions():
    """Against scipy's own draws: the share of mixup, and the area of cutmix before the edge cuts it off."""
    from scipy import stats

    draws = pass_draws(20_000, 0, 0, section_of(mixup=0.4, cutmix=2.0))[:, -5:].T
    partner, kept, y, x, side = draws.astype(float)
    cuts = kept == 256
    cuts &= side > 0
    assert abs(cuts.mean() - 0.5) < 0.03  # The root of 0.25 / 20,000 is 0.0035.
    assert not side[~cuts].any()
    up_to = [(kept[~cuts] <= number).mean() for number in range(257)]  # Each number stands for what is rounded to it.
    assert np.abs(up_to - stats.beta(0.4, 0.4).cdf((np.arange(257) + 0.5) / 256)).max() < 0.03
    even = {"partner": partner / 20_000, "y": y / 65536, "x": x / 65536}
    for name, found, wanted in [
        ("cutmix", 1 - (side[cuts] / 65536) ** 2, stats.beta(2.0, 2.0)),
        *((name, drawn, stats.uniform()) for name, drawn in even.items()),
    ]:  # fmt: skip
        assert stats.kstest(found + 1e-9, wanted.cdf).statistic < 0.03, name
    assert np.abs(np.corrcoef([partner, y, x, np.arange(20_000)]) - np.eye(4)).max() < 0.05
    assert not pass_draws(50, 0, 0, section_of(mixup=0.4))[:, -1].any()
    assert (pass_draws(50, 0, 0, section_of(cutmix=2.0))[:, -4] == 256).all()


def random_images(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("side", [4, 5])
@pytest.mark.parametrize("fill_mode", ["constant", "nearest", "reflect"])
def test_a_quarter_turn_is_numpys(turns, side, fill_mode):
    images = random_images(3, side, side, 3)
    cosine, sine = round(np.cos(turns * np.pi / 2)), round(np.sin(turns * np.pi / 2))
    draws = np.array([cosine, sine, -sine, cosine, 0, 0]) * 65536
    found = changed(images, draws, rotation=0.5, fill_mode=fill_mode)
    np.testing.assert_array_equal(found, np.rot90(images, turns, axes=(1, 2)))


@pytest.mark.parametrize(("down", "right"), [(1, 0), (0, -2), (-3, 5)])
@pytest.mark.parametrize(
    ("fill_mode", "pad"), [("constant", "constant"), ("nearest", "edge"), ("reflect", "symmetric")]
)
def test_a_shift_by_whole_pixels_cuts_the_padded_image(down, right, fill_mode, pad):
    images = random_images(2, 4, 8, 3)
    draws = [65536, 0, 0, 65536, down * 65536 // 4, right * 65536 // 8]
    padded = np.pad(images, [(0, 0), (8, 8), (8, 8), (0, 0)], pad)
    found = changed(images, draws, translation=1.0, fill_mode=fill_mode)
    np.testing.assert_array_equal(found, padded[:, 8 + down : 12 + down, 8 + right : 16 + right])


def test_a_zoom_of_a_half_doubles_and_lies_between_pixels():
    image = np.array([[0, 80], [160, 240]], np.uint8).reshape(1, 2, 2, 1)
    found = changed(image, [32768, 0, 0, 32768, 0, 0], zoom=0.5)[0, :, :, 0]
    assert found.tolist() == [[60, 100], [140, 180]]  # A quarter of a pixel from the centre.
    smaller = changed(random_images(1, 8, 8, 1), [131072, 0, 0, 131072, 0, 0], zoom=1.0)[0, :, :, 0]
    fours = random_images(1, 8, 8, 1)[0, :, :, 0].astype(int).reshape(4, 2, 4, 2).sum((1, 3))
    np.testing.assert_array_equal(smaller, np.pad((fours + 2) // 4, 2))


def test_brightness_adds_and_cuts():
    images = random_images(4, 5, 7, 3)
    for added in (-255, -40, 0, 13, 255):
        found = changed(images, [added], brightness=1.0)
        np.testing.assert_array_equal(found, np.clip(images.astype(int) + added, 0, 255))


def test_contrast_moves_pixels_from_the_mean_of_their_channel():
    images = random_images(4, 5, 7, 3)
    mean = np.rint(images.mean((1, 2), keepdims=True))
    for factor in (0.0, 0.5, 1.0, 1.75):
        wanted = np.clip(mean + (images - mean) * factor, 0, 255)
        assert np.abs(changed(images, [int(256 * factor)], contrast=1.0) - wanted).max() <= 0.5


def test_erasing_makes_a_rectangle_black():
    images = random_images(2, 10, 20, 3) | 1
    found = changed(images, [32768, 65535, 65536 * 4 // 10, 65536 // 4], erasing=1.0)
    wanted = images.copy()
    wanted[:, 3:7, 15:20] = 0  # Free are 6 rows and 15 columns: the middle, and the right edge.
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(changed(images, [32768, 65535, 0, 0], erasing=1.0), images)


def operated(images, **on):
    """The images after one layer of RandAugment that does this alone."""
    columns = {
        "matrix": [65536, 0, 0, 65536, 0, 0], "contrast": 256, "brightness": 256, "color": 256, "sharpness": 256,
        "solarize": 256, "posterize": 1, "autocontrast": 0, "equalize": 0,
    }  # fmt: skip
    matrix, *others = (columns | on).values()
    return changed(images, [*matrix, *others], rand_augment=config.RandAugment(num_layers=1, magnitude=10))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["noise", "dim", "one value", "two values"])
def test_operations_are_pillows(kind, channels):
    values = {
        "noise": random_images(1, 40, 50, channels),
        "dim": random_images(1, 40, 50, channels) // 3 + 40,
        "one value": np.full((1, 40, 50, channels), 7, np.uint8),
        "two values": random_images(1, 40, 50, channels) % 2 * 9,
    }[kind]
    picture = Image.fromarray(values[0] if channels == 3 else values[0, :, :, 0])

    def same(found, pillows, most):
        difference = found[0].astype(int) - np.asarray(pillows).reshape(found[0].shape).astype(int)
        assert np.abs(difference).max() <= most

    same(operated(values, equalize=1), ImageOps.equalize(picture), 0)
    same(operated(values, autocontrast=1), ImageOps.autocontrast(picture), 1)
    for factor in (26, 128, 486):  # Pillow cuts off what lies after the point, and its filter rounds by itself.
        same(operated(values, sharpness=factor), ImageEnhance.Sharpness(picture).enhance(factor / 256), 2)
        if channels == 3:
            same(operated(values, color=factor), ImageEnhance.Color(picture).enhance(factor / 256), 2)
    if channels == 1:
        np.testing.assert_array_equal(operated(values, color=26), values)


def test_rand_augment_does_one_of_its_operations_a_layer():
    images = np.repeat(random_images(1, 16, 16, 3), 4000, axis=0)
    section = section_of(rand_augment=config.RandAugment(num_layers=1, magnitude=10))
    draws = pass_draws(4000, 0, 0, section)
    found, image = augment(images, draws, section), images[0].astype(int)
    counts = Counter(one.tobytes() for one in found)
    both_ways = {}
    for sign in (-1, 1):
        for axis in (0, 1):
            matrix = np.array([65536, 0, 0, 65536, 0, 0])
            matrix[2 - axis] = sign * round(0.3 * 65536)
            both_ways[f"shear {sign} {axis}"] = changed(images[:1], matrix, rotation=1.0)[0]
            matrix = np.array([65536, 0, 0, 65536, 0, 0])
            matrix[4 + axis] = sign * round(0.45 * 65536)
            both_ways[f"translate {sign} {axis}"] = changed(images[:1], matrix, rotation=1.0)[0]
        cosine, sine = round(65536 * np.cos(np.pi / 6)), sign * round(65536 * np.sin(np.pi / 6))
        both_ways[f"rotate {sign}"] = changed(images[:1], [cosine, sine, -sine, cosine, 0, 0], rotation=1.0)[0]
        both_ways[f"contrast {sign}"] = changed(images[:1], [round(256 * (1 + sign * 0.9))], contrast=1.0)[0]
        both_ways[f"brightness {sign}"] = np.clip((image * round(256 * (1 + sign * 0.9)) + 128) // 256, 0, 255)
        for name in ("color", "sharpness"):
            both_ways[f"{name} {sign}"] = operated(images[:1], **{name: round(256 * (1 + sign * 0.9))})[0]
    alone = {"identity": image, "solarize": 255 - image, "posterize": image & 0xF0}
    alone |= {name: operated(images[:1], **{name: 1})[0] for name in ("autocontrast", "equalize")}
    wanted = alone | both_ways
    assert len(wanted) == 2 * len(RAND_AUGMENT) - 5
    assert counts.keys() == {np.asarray(one, np.uint8).tobytes() for one in wanted.values()}
    for name, one in wanted.items():
        half = 4000 / 14 if name in alone else 2000 / 14
        assert abs(counts[np.asarray(one, np.uint8).tobytes()] - half) < 0.45 * half, name


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("flip", r"flip = True: .* has no images, but size\. Set input\.augmentation\.flip=false"),
        ("rotation", r"rotation = 1\.0: .* has no images, .* Set input\.augmentation\.rotation=0"),
        ("rand_augment", r"rand_augment = \{'magnitude': 10.*, 'num_layers': 3\}: .*\.rand_augment=null"),
    ],
)
def test_what_has_no_images_is_not_augmented(tiny, key, said):
    number = Feature(kind="number", shape=(1,), dtype="float32")
    table = tiny.model_copy(update={"features": {"size": number}})
    check_augmentation(OFF, table)
    check_augmentation(section_of(**{key: MOST[key]}), tiny)
    with pytest.raises(UserError, match=said):
        check_augmentation(section_of(**{key: MOST[key]}), table)


def test_what_cannot_be_mixed_is_refused(digits):
    two = digits.model_copy(
        update={"features": {**digits.features, "age": Feature(kind="number", shape=(), dtype="float32")}}
    )
    check_augmentation(section_of(mixup=0.2), digits)
    with pytest.raises(UserError, match=r"mixup = 0\.2: digits has image, age, .+ Set input\.augmentation\.mixup=0$"):
        check_augmentation(section_of(mixup=0.2), two)
