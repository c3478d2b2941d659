"""The user's own callbacks: pass on Keras' calls, name the method in errors, and store their state in checkpoints."""

import inspect
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import keras

from tasks import config
from tasks.modeling import own_code
from tasks.system.errors import UserError, shown
from tasks.training import Training

log = logging.getLogger(__name__)

KEY = "train.callbacks"
PLACES = {"train": (), "test": (), "epoch": ("epoch",), "train_batch": ("batch",), "test_batch": ("batch",)}
METHODS = {f"on_{what}_{when}": place for what, place in PLACES.items() for when in ("begin", "end")}
"""Methods that Keras calls in a training, and their arguments before ``logs``."""


class OwnCallback(keras.callbacks.Callback):
    """Passes each call on to a user's callback."""

    def __init__(self, name: str, made: keras.callbacks.Callback, training: Training) -> None:
        super().__init__()
        self.name = name
        self.made = made
        self.position = training.position
        self._trained = training.model
        self._saved = training.position.start.callbacks.get(name)
        self.over: bool = self._saved is not None and self._saved["over"]
        """Whether it has stopped the training, including before a resume."""

    @cached_property
    def asks_for_batches(self) -> bool:
        """Whether it overrides a batch method."""
        return any(self._has(method) for method in (*METHODS, "on_batch_begin", "on_batch_end") if "batch" in method)

    @property
    def remembers(self) -> bool:
        """Whether a resume can restore its state."""
        return hasattr(self.made, "state")

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.made.set_model(model)

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.made.set_params(params)

    def state(self) -> dict[str, Any]:
        """Return its state for a checkpoint.

        Raises:
            UserError: JSON cannot represent the state.
        """
        state = self._call("state") if self.remembers else None
        try:
            return {"over": self.over, "state": json.loads(json.dumps(state))}
        except (TypeError, ValueError) as error:
            raise UserError(f"{KEY}: {self.name}.state() returns a state that JSON cannot store ({error})") from None

    def hand_on(self, method: str, place: Sequence[int], logs: dict[str, Any] | None) -> None:
        """Call a method of the user's callback as Keras does, with plain floats; reading a batch's values waits for
        that batch."""
        start, model = self.position.start, self._trained
        if "batch" in method:
            if not self.asks_for_batches:
                return
            logs = logs and {name: float(value) for name, value in logs.items()}
        if method == "on_epoch_begin" and self.remembers and place[0] == start.epoch and start.step_in_epoch:
            return  # It had this call before the training was resumed inside the epoch.
        stopped, before = model.stop_training, dict(logs or {})
        self._call(method, *place, logs)
        if method == "on_epoch_end" and logs is not None:
            for name, value in before.items():
                # Keras' own callbacks write the learning rate.
                if name != "learning_rate" and (name not in logs or logs[name] is not value):
                    raise UserError(
                        f"{KEY}: {self.name}.on_epoch_end changes logs['{name}'], a metric that the training or "
                        "another callback gives. Use another name"
                    )
            for name in logs.keys() - before.keys():
                where = f"{self.name}.on_epoch_end sets logs['{name}'] = {shown(logs[name])}, which is not a number"
                with own_code.blamed(f"{KEY}: {where}"):
                    logs[name] = float(logs[name])
        if method == "on_train_begin" and self.remembers and self._saved and self._saved["state"] is not None:
            self._call("restore", self._saved["state"])
        self.over |= model.stop_training and not stopped

    def _has(self, method: str) -> bool:
        """Return whether the user's class overrides a method."""
        function = getattr(getattr(self.made, method), "__func__", None)
        return function is not getattr(keras.callbacks.Callback, method)

    def _call(self, method: str, *args: Any) -> Any:
        step = self.position.step + self.position.offset
        with own_code.blamed(f"{KEY}: {self.name}.{method} fails at step {step}"):
            return getattr(self.made, method)(*args)


def _handing_on(method: str) -> Callable[..., None]:
    def hand_on(self: OwnCallback, *args: Any, logs: dict[str, Any] | None = None) -> None:
        count = len(METHODS[method])
        self.hand_on(method, args[:count], args[count] if len(args) > count else logs)

    return hand_on


for _method in METHODS:
    setattr(OwnCallback, _method, _handing_on(_method))


def make(section: config.Train) -> dict[str, keras.callbacks.Callback]:
    """Return the user's own callbacks by unique names.

    Raises:
        UserError: a callback does not exist, cannot be built, or has a method that Keras cannot call.
    """
    found, counts = {}, Counter[str]()
    for name, options in section.own_callbacks:
        made = own_code.make(name, KEY, keras.callbacks.Callback, options)
        methods = {method: (*place, "logs") for method, place in METHODS.items()}
        if hasattr(made, "state") or hasattr(made, "restore"):
            methods |= {"state": (), "restore": ("state",)}
        for method, args in methods.items():
            try:
                inspect.signature(getattr(made, method)).bind(*args)
            except (TypeError, AttributeError) as error:
                raise UserError(
                    f"{KEY} = '{name}': a training calls {method}({', '.join(args)}), but its signature does not allow "
                    f"that ({error})"
                ) from None
        counts[name] += 1
        found[name if counts[name] == 1 else f"{name} {counts[name]}"] = made
    return found


def log_forgetful(callbacks: Sequence[Any]) -> None:
    """Log the callbacks that lose their state on a resume."""
    forgetful = [one.name for one in callbacks if isinstance(one, OwnCallback) and not one.remembers]
    if forgetful:
        log.info(
            "callbacks %s have no state() and restore(), so a resumed training may end with different weights from an "
            "uninterrupted one",
            ", ".join(forgetful),
        )
