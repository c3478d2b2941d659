"""Arrays that no one process holds: written in pieces by several workers, read back by anyone, or not there at all."""

import json
import threading

import numpy as np
import pytest

from tasks.system.errors import StratagemError, UserError
from tasks.training import checkpoints, shards
from tasks.training.checkpoints import Checkpoints, State
from tasks.training.shards import Pieces, ShardWriter

KERNEL = np.arange(48, dtype=np.float32).reshape(8, 6)
BIAS = np.arange(6, dtype=np.float32)
STATE = State(
    step=7, epoch=0, step_in_epoch=7, global_batch_size=4, seed=0, settings_digest="", data_version=None, history={}
)


def cut(*parts):
    """The pieces of KERNEL that a worker has, each by its rows and columns."""
    own = [((slice(a, b), slice(c, d)), KERNEL[a:b, c:d].copy()) for a, b, c, d in parts]
    return {"model/0000": Pieces((8, 6), own)}


HALVES = [cut((0, 8, 0, 3)), cut((0, 8, 3, 6))]
QUARTERS = [cut((0, 4, 0, 3), (4, 8, 0, 3)), cut((0, 4, 3, 6), (4, 8, 3, 6))]


def save(folder, parts, state=STATE):
    """Write a checkpoint as a chief and its workers do, each in its own thread."""
    with Checkpoints(folder, keep=9) as saved:
        saved.num_writers = len(parts)
        with shards.marked(folder, saved.attempt):
            others = [ShardWriter(folder, saved.attempt, worker) for worker in range(1, len(parts))]
        writing = threading.Thread(target=saved._write, args=({"model/0001": BIAS}, parts[0], state, {}))
        writing.start()
        for writer, own in zip(others, parts[1:], strict=True):
            with writer:
                writer.save(own, state.step)
        writing.join()
    return folder / str(state.step)


@pytest.mark.parametrize("parts", [HALVES, QUARTERS, [cut((0, 8, 0, 6)), cut()]], ids=["halves", "quarters", "whole"])
def test_pieces_are_the_array_again_whatever_the_layout(tmp_path, parts):
    folder = save(tmp_path, parts)
    assert sorted(path.name for path in folder.iterdir()) == [
        "arrays.npz", "pieces-0.npz", "pieces-1.npz", "state.json"
    ]  # fmt: skip
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    arrays, state = Checkpoints(tmp_path, read_only=True).restore(7)
    assert state == STATE
    np.testing.assert_array_equal(arrays["model/0001"], BIAS)
    kernel = arrays["model/0000"]
    assert kernel.shape == (8, 6)
    np.testing.assert_array_equal(np.asarray(kernel), KERNEL)
    for rows, columns in [(slice(2, 7), slice(1, 5)), (slice(4, 8), slice(0, 3)), (slice(0, 8), slice(5, 6))]:
        np.testing.assert_array_equal(kernel.read((rows, columns)), KERNEL[rows, columns])


def test_workers_are_told_where_pieces_lie_and_get_whole_arrays_as_bytes(tmp_path):
    save(tmp_path, HALVES)
    arrays, state = Checkpoints(tmp_path, read_only=True).restore(7)
    payload = checkpoints.pack(arrays, state)
    there, told = checkpoints.unpack(payload)
    assert told == STATE
    np.testing.assert_array_equal(there["model/0001"], BIAS)
    np.testing.assert_array_equal(np.asarray(there["model/0000"]), KERNEL)
    some, _ = checkpoints.unpack(checkpoints.pack({"model/0001": arrays["model/0001"]}, state))
    assert list(some) == ["model/0001"]
    (tmp_path / "7").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"cannot be read here .* the same on all machines"):
        checkpoints.unpack(payload)


@pytest.mark.parametrize("name", ["pieces-0.npz", "pieces-1.npz"])
def test_a_damaged_piece_is_found_and_the_checkpoint_before_is_used(tmp_path, name, caplog):
    save(tmp_path, HALVES)
    damaged = save(tmp_path, HALVES, STATE.model_copy(update={"step": 8})) / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    saved = Checkpoints(tmp_path)
    with pytest.raises(checkpoints.Damaged, match=f"{name} has another sha256"):
        saved.restore(8)
    arrays, state = saved.restore_latest()
    assert state.step == 7
    np.testing.assert_array_equal(np.asarray(arrays["model/0000"]), KERNEL)
    assert "checkpoint 8 is damaged" in caplog.text


def test_a_worker_that_reads_a_piece_compares_it_itself(tmp_path):
    folder = save(tmp_path, HALVES)
    arrays, state = Checkpoints(tmp_path, read_only=True).restore(7)
    there, _ = checkpoints.unpack(checkpoints.pack(arrays, state))
    digests = json.loads((folder / "state.json").read_text())["pieces"]
    other = save(tmp_path / "other", [cut((0, 8, 0, 3)), {"model/0000": Pieces((8, 6), [
        ((slice(0, 8), slice(3, 6)), KERNEL[:, 3:] + 1)
    ])}])  # fmt: skip
    (other / "pieces-1.npz").replace(folder / "pieces-1.npz")
    assert there["model/0000"].files.digests == digests
    np.testing.assert_array_equal(there["model/0000"].read((slice(0, 8), slice(0, 3))), KERNEL[:, :3])
    with pytest.raises(checkpoints.Damaged, match=r"pieces-1.npz has another sha256"):
        there["model/0000"].read((slice(0, 8), slice(0, 4)))


def test_missing_pieces_are_damage(tmp_path):
    folder = save(tmp_path, [cut((0, 8, 0, 3)), cut((0, 4, 3, 6))])
    with pytest.raises(checkpoints.Damaged, match="pieces of model/0000 are missing"):
        Checkpoints(tmp_path, read_only=True).restore(7)
    (folder / "pieces-1.npz").unlink()
    with pytest.raises(checkpoints.Damaged, match=r"no such file: pieces-1.npz"):
        Checkpoints(tmp_path, read_only=True).restore(7)


def test_without_the_part_of_one_worker_there_is_no_checkpoint(tmp_path):
    with Checkpoints(tmp_path, silent_seconds=0.2) as saved:
        saved.num_writers = 2
        with pytest.raises(StratagemError, match="worker 1 has written nothing of its part"):
            saved._write({}, HALVES[0], STATE, {})
        assert list(tmp_path.iterdir()) == []


def test_what_an_attempt_before_has_left_is_no_part_of_a_checkpoint(tmp_path):
    with shards.marked(tmp_path, "before"), ShardWriter(tmp_path, "before", 1) as left:
        left.save(HALVES[1], 7)
    saved = Checkpoints(tmp_path, read_only=True, silent_seconds=0.2)
    saved.num_writers = 2
    with pytest.raises(StratagemError, match="worker 1 has written"):
        saved._write({}, HALVES[0], STATE, {})
    saved.close()
    assert saved.steps() == []
    Checkpoints(tmp_path).close()
    assert list(tmp_path.iterdir()) == [], "a training that begins takes it away"


def test_a_worker_that_does_not_see_the_chiefs_folder_is_refused(tmp_path):
    (tmp_path / "chiefs").mkdir()
    (tmp_path / "own").mkdir()
    with shards.marked(tmp_path / "chiefs", "a1"), pytest.raises(UserError, match="must be the same on all machines"):
        ShardWriter(tmp_path / "own", "a1", 1)


def test_a_part_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "folder").mkdir()
    with shards.marked(tmp_path / "folder", "a1"):
        writer = ShardWriter(tmp_path / "folder", "a1", 1)
    (tmp_path / "folder").rmdir()
    (tmp_path / "folder").touch()
    with (
        pytest.raises(StratagemError, match="this worker's part of the checkpoint of step 7 cannot be written"),
        writer,
    ):
        writer.save(HALVES[1], 7)
