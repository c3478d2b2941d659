import json
import re
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tasks.runs import committed
from tasks.system.errors import StratagemError, UserError
from tasks.training import checkpoints, model_state
from tasks.training.checkpoints import Checkpoints, State


def build(kind=keras.Model, units=4, dropout=0.5, optimizer="adam"):
    keras.utils.set_random_seed(0)
    images = keras.Input((3,))
    x = keras.layers.Dense(units)(images)
    x = keras.layers.Dropout(dropout)(x)
    model = kind(images, keras.layers.Dense(2)(x))
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        jit_compile=False,  # Keras' own choice is XLA, which takes half a second a model.
    )
    return model


def trained(**options):
    model = build(**options)
    images = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    model.fit(images, np.array([0, 1] * 4), epochs=1, verbose=0)
    return model


def state(step, **more):
    origin = {
        "epoch": 0,
        "step_in_epoch": step,
        "global_batch_size": 8,
        "seed": 0,
        "settings_digest": "d",
        "data_version": None,
        "history": {},
    }
    return State(step=step, **{**origin, **more})


def test_what_is_saved_comes_back(tmp_path):
    model = trained()
    saved_state = state(
        7,
        epoch=2,
        step_in_epoch=3,
        history={"train/loss": (1.5, float("nan"), float("inf")), "train/accuracy": (0.1, 0.2, 1 / 3)},
        callbacks={"train.early_stopping": {"wait": 1, "best": 0.25, "best_epoch": 1, "stopped_epoch": 0}},
    )
    with Checkpoints(tmp_path / "c") as saved:
        saved.save(model, saved_state)
    expected = model_state.snapshot(model)
    with Checkpoints(tmp_path / "c") as saved:
        arrays, found = saved.restore(7)
    assert found.model_dump_json() == saved_state.model_dump_json()
    assert found.history["train/accuracy"] == saved_state.history["train/accuracy"]
    assert arrays.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(arrays[key], array)
        assert arrays[key].dtype == array.dtype

    fresh = build()
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.compute_metrics(None, keras.ops.zeros([1], "int64"), keras.ops.zeros([1, 2]))
    model_state.assign(fresh, arrays, ("model", "seed", "optimizer", "metric"))
    for key, array in model_state.snapshot(fresh).items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)


def test_latest_is_a_number(tmp_path):
    model = build()
    with Checkpoints(tmp_path / "c", keep=10) as saved:
        for step in (8, 9, 10, 100):
            saved.save(model, state(step))
        assert saved.find("latest") == 100
        assert saved.steps() == [8, 9, 10, 100]
    with Checkpoints(tmp_path / "c", keep=10) as saved:
        assert saved.find("latest") == 100, "also for whoever comes later"
        assert saved.find(9) == 9
        assert saved.restore(9)[1].step == 9


@pytest.mark.parametrize(
    ("monitor", "best"), [("validation/accuracy", 2), ("validation/loss", 3), ("train/accuracy", 1), ("train/loss", 4)]
)
def test_the_best_is_kept_beside_the_newest(tmp_path, monitor, best):
    model = build()
    # The best by each metric is another step; the newest two are 5 and 6.
    table = {
        "validation/accuracy": [0.1, 0.9, 0.2, 0.3, 0.4, 0.5],
        "validation/loss": [0.9, 0.8, 0.1, 0.7, 0.6, 0.5],
        "train/accuracy": [0.9, 0.1, 0.2, 0.3, 0.4, 0.5],
        "train/loss": [0.9, 0.8, 0.7, 0.1, 0.6, 0.5],
    }
    with Checkpoints(tmp_path / "c", keep=2, monitor=monitor) as saved:
        for step in range(1, 7):
            saved.save(model, state(step), {name: values[step - 1] for name, values in table.items()})
        assert saved.find("best") == best
        assert saved.steps() == [best, 5, 6]
    with Checkpoints(tmp_path / "c", keep=2, monitor=monitor) as saved:
        assert saved.find("best") == best
        assert saved.restore(best)[1].step == best
    assert sorted(int(path.name) for path in (tmp_path / "c").iterdir() if path.is_dir()) == [best, 5, 6]


def test_checkpoints_inside_an_epoch_are_not_the_best_and_do_not_pile_up(tmp_path):
    model = build()
    with Checkpoints(tmp_path / "c", keep=2, monitor="validation/loss") as saved:
        for step in range(1, 13):
            # Epochs of four steps; the first one stays the best.
            metrics = {"validation/loss": float(step)} if step % 4 == 0 else None
            saved.save(model, state(step), metrics)
        assert saved.find("best") == 4
        assert saved.steps() == [4, 11, 12]


def test_without_any_epoch_the_best_is_the_newest(tmp_path):
    with Checkpoints(tmp_path / "c", keep=5) as saved:
        saved.save(build(), state(1))
        saved.save(build(), state(2))
        assert saved.find("best") == 2


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_never_the_best(tmp_path, worst):
    with Checkpoints(tmp_path / "c", keep=5, monitor="validation/loss") as saved:
        for step, loss in enumerate([worst, 0.5, worst, 0.7, worst], start=1):
            saved.save(build(), state(step), {"validation/loss": loss})
        assert saved.find("best") == 2


@pytest.mark.parametrize(
    ("steps", "which", "said"),
    [
        ([], "latest", "holds no checkpoint: the run was stopped before the first one"),
        ([], "best", "holds no checkpoint"),
        ([9, 10], 11, "evaluate.checkpoint = 11: .* has no checkpoint of that step. Allowed: 9, 10, latest, best"),
    ],
)
def test_a_checkpoint_that_is_not_there(tmp_path, steps, which, said):
    with Checkpoints(tmp_path / "c", keep=5) as saved:
        for step in steps:
            saved.save(build(), state(step))
        with pytest.raises(UserError, match=said) as error:
            saved.find(which)
    assert error.value.exit_code == 2


KILLED = """
import os, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_checkpoints import build, state
from tasks.training.checkpoints import Checkpoints
folder = Path(sys.argv[1])
saved = Checkpoints(folder, keep=9)
saved.save(build(), state(1))
saved.find("latest")
model = build(units=5_000_000)
saved.save(model, state(2))
while len(list(folder.iterdir())) == 1:
    time.sleep(0.001)
os._exit(9)  # While the second is being written.
"""


@pytest.mark.slow
def test_a_checkpoint_whose_writer_was_killed_does_not_count(tmp_path, run):
    done = run([sys.executable, "-c", KILLED, tmp_path / "c", Path(__file__).parent])
    assert done.returncode == 9, done.stderr
    assert any(not path.name.isdigit() for path in (tmp_path / "c").iterdir()), "something half-written is there"
    with Checkpoints(tmp_path / "c", keep=9) as saved:
        assert saved.find("latest") == 1
        assert saved.restore(1)[1].step == 1
        saved.save(build(), state(3))
        assert saved.find("latest") == 3
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["1", "3"], "leftovers are cleared away"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = [(file, how) for file in ("arrays.npz", "state.json") for how in (flip, truncate, Path.unlink)]


@pytest.mark.in_ci(0, 2, 4)
@pytest.mark.parametrize(("file", "damage"), DAMAGE, ids=lambda part: getattr(part, "__name__", part))
def test_a_damaged_checkpoint_is_noticed_and_the_newest_whole_one_is_used(tmp_path, caplog, file, damage):
    folder = tmp_path / "c"
    with Checkpoints(folder, keep=9) as saved:
        for step in (8, 9, 10, 11):
            saved.save(build(), state(step), {"validation/loss": 1 / step})
    for step in (10, 11):
        damage(folder / str(step) / file)
    with Checkpoints(folder, keep=9, read_only=True) as saved:
        with pytest.raises(checkpoints.Damaged, match=r"c/11 is damaged \(.+\)"):
            saved.restore(11)
        assert saved.steps() == [8, 9, 10, 11], "who reads one of them moves nothing"
    with Checkpoints(folder, keep=9) as saved, caplog.at_level("WARNING"):
        assert saved.restore_latest()[1].step == 9
        assert saved.restore_best()[1].step == 9
    assert [path.name for path in sorted(folder.iterdir())] == ["8", "9"]
    assert sorted(path.name for path in (tmp_path / "damaged_checkpoints").iterdir()) == ["10", "11"]
    said = [record.message for record in caplog.records]
    assert [message.partition(" is damaged: it is now in ")[0] for message in said] == [
        "checkpoint 11",
        "checkpoint 10",
    ]
    with Checkpoints(folder, keep=9) as saved:
        saved.save(build(), state(11))
        assert saved.restore_latest()[1].step == 11


@pytest.mark.parametrize("number", [None, 2])
def test_a_checkpoint_of_another_format_is_rejected_and_not_taken_for_a_damaged_one(tmp_path, number):
    with Checkpoints(tmp_path / "c") as saved:
        saved.save(trained(), state(1))
    path = tmp_path / "c" / "1" / "state.json"
    content = committed.parse(path.read_bytes(), path)
    written = json.loads(path.read_bytes())
    assert written["format"] == 1
    changed = content if number is None else content | {"format": number}
    path.write_text(json.dumps({**changed, "sha256": committed.digest(changed)}))
    found = "no format number" if number is None else "format 2"
    said = f"{path} has {found}, but this version of Stratagem reads only format 1: start the run again with --fresh"
    with Checkpoints(tmp_path / "c") as saved, pytest.raises(UserError, match=re.escape(said)):
        saved.restore_latest()
    assert path.exists()


def test_the_arrays_of_another_checkpoint_are_noticed(tmp_path):
    """Which are whole, so that the file's own checksums hold."""
    with Checkpoints(tmp_path / "c", keep=9) as saved:
        saved.save(trained(), state(1))
        other = trained()
        other.trainable_variables[0].assign(keras.ops.zeros((3, 4)))
        saved.save(other, state(2))
        saved.find("latest")
        shutil.copyfile(tmp_path / "c" / "1" / "arrays.npz", tmp_path / "c" / "2" / "arrays.npz")
        with pytest.raises(checkpoints.Damaged, match=r"sha256 of arrays\.npz has changed since it was written"):
            saved.restore(2)


def test_every_flipped_byte_of_the_state_is_noticed(tmp_path):
    with Checkpoints(tmp_path / "c") as saved:
        saved.save(build(), state(1), {"validation/loss": 0.5})
    path = tmp_path / "c" / "1" / "state.json"
    content = path.read_bytes()
    with Checkpoints(tmp_path / "c") as saved:
        for place in range(len(content)):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(checkpoints.Damaged):
                print(content[place - 9 : place + 9], saved.restore(1))
        path.write_bytes(content)
        assert saved.restore(1)[1].step == 1


def test_without_a_whole_checkpoint_nothing_is_moved(tmp_path):
    with Checkpoints(tmp_path / "c", keep=9) as saved:
        for step in (1, 2):
            saved.save(build(), state(step))
        saved.find("latest")
        for step in (1, 2):
            flip(tmp_path / "c" / str(step) / "arrays.npz")
        with pytest.raises(
            UserError, match=r"no checkpoint in .+/c is intact: .+/2 is damaged.+/1 is damaged.+--fresh"
        ):
            saved.restore_latest()
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["1", "2"]
    assert not (tmp_path / "damaged_checkpoints").exists()


def test_weights_that_are_no_numbers_do_not_take_the_place_of_the_last_good_ones(tmp_path):
    model = build()
    with Checkpoints(tmp_path, keep=1) as saved:
        for step in (1, 2):
            saved.save(model, state(step))
        model.layers[1].kernel.assign(np.full((3, 4), np.nan))
        saved.save(model, state(3))
    assert saved.steps() == [2, 3]
    assert saved.restore_latest()[1].step == 2


def test_a_disk_without_enough_room_keeps_the_last_checkpoint(tmp_path, mount_small):
    (tmp_path / "c").mkdir()
    mount_small(tmp_path / "c", "size=1100k")
    with Checkpoints(tmp_path / "c") as saved:
        saved.save(build(), state(1))
        saved.find("latest")
        saved.save(build(units=200_000), state(2))
        with pytest.raises(
            StratagemError, match=r"step 2 cannot be written to .+/c: No space left on device; that of step 1 is intact"
        ):
            saved.find("latest")
        assert [path.name for path in (tmp_path / "c").iterdir()] == ["1"]
        assert saved.restore_latest()[1].step == 1


def test_a_user_who_may_write_no_more_keeps_the_last_checkpoint(tmp_path, no_file_larger_than):
    with Checkpoints(tmp_path / "c") as saved:
        saved.save(build(), state(1))
        saved.find("latest")
        # The system says it when it is too late.
        with no_file_larger_than(100_000):
            saved.save(build(units=20_000), state(3))
            with pytest.raises(StratagemError, match=r"step 3 cannot be written to .+/c: File too large; that of step"):
                saved.find("latest")
        assert [path.name for path in (tmp_path / "c").iterdir()] == ["1"]
        assert saved.restore_latest()[1].step == 1


def test_an_export_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "models" / "final.keras"
    first = build()
    assert checkpoints.save_model(first, path) == path
    before = path.read_bytes()
    assert [file.name for file in path.parent.iterdir()] == ["final.keras"]

    class Broken(keras.layers.Layer):
        def call(self, x):
            return x

        def save_own_variables(self, store):
            raise OSError("No space left on device")

    broken = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), Broken()])
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save_model(broken, path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["final.keras"]

    second = build(units=5)
    checkpoints.save_model(second, path)
    assert path.read_bytes() != before
