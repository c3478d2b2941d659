"""What changes in a model while it trains, taken from it and given back."""

import keras
import numpy as np
import pytest

from tasks.system.errors import UserError
from tasks.training import model_state
from tests.tasks.test_checkpoints import build, trained


def test_everything_that_training_changes_has_a_key():
    model = trained()
    groups = {}
    for key in model_state.variables(model):
        groups.setdefault(key.split("/")[0], []).append(key)
    assert groups["model"] == [f"model/{i:04d}" for i in range(4)]
    assert groups["seed"] == ["seed/0000"], "Dropout's generator"
    # iterations, learning rate, and two moments for each of four weights
    assert groups["optimizer"] == [f"optimizer/{i:04d}" for i in range(10)]
    assert len(groups["metric"]) == 4, "total and count of loss and accuracy"
    # A second build in one process is numbered anew by Keras: its checkpoint must fit all the same.
    assert model_state.variables(trained()).keys() == model_state.variables(model).keys()


def test_a_model_that_was_never_compiled_has_no_optimizer():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert list(model_state.variables(model)) == ["model/0000", "model/0001"]


def test_a_snapshot_is_a_copy():
    model = trained()
    taken = model_state.snapshot(model)
    before = {key: array.copy() for key, array in taken.items()}
    for variable in model.trainable_variables:
        variable.assign(keras.ops.zeros(variable.shape))
    for key, array in before.items():
        np.testing.assert_array_equal(taken[key], array)
        assert taken[key].flags.owndata
    assert not model_state.snapshot(model)["model/0000"].any()


def test_only_the_groups_that_are_asked_for_are_assigned():
    arrays = model_state.snapshot(trained())
    fresh = build()
    before = model_state.snapshot(fresh)
    model_state.assign(fresh, arrays, ("model",))  # Of an optimizer that is not built: what evaluate does.
    after = model_state.snapshot(fresh)
    np.testing.assert_array_equal(after["model/0000"], arrays["model/0000"])
    np.testing.assert_array_equal(after["seed/0000"], before["seed/0000"])


def test_another_model_is_refused_by_the_name_of_its_variable_and_stays_as_it_is():
    said = r"kernel has the shape \(3, 4\) there and \(3, 5\) here"
    arrays = model_state.snapshot(trained())
    other = trained(units=5)
    before = model_state.snapshot(other)
    with pytest.raises(UserError, match=said) as error:
        model_state.assign(other, arrays, ("model",))
    assert "Use the settings that the run was trained with" in str(error.value)
    for key, array in model_state.snapshot(other).items():
        np.testing.assert_array_equal(array, before[key])
