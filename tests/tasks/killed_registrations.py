"""A script: registrations and a rollback in processes that are killed with signal 9, one after each write to the
registry; and whether the same commands, given again, end what each has left undone.

It prints how many writes there are. This process imports MLflow and Keras once and opens nothing: what it forks does
all the rest, so each has connections of its own.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tasks import config, records
from tasks.system.errors import UserError
from tasks.tracking.store import open_store
from tests.tasks.registering import Trained, roll_back

# What five test rows tell: who has none of them right is shown to be worse than who has all (p = 1/32).
WORSE, BETTER = 0, 5
WRITES = (
    "create_registered_model", "create_model_version", "set_model_version_tag", "set_registered_model_alias",
    "set_registered_model_tag", "set_logged_model_tags",
)  # fmt: skip
MOST = 40
PARTS = {"run": records.Run, "prepared": records.PreparedDataset, "training": records.TrainingResult}


def fork(work: Callable[[], None]) -> int:
    """Do work in a process of its own; return its id."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return process


def forked(work: Callable[[], None]) -> int:
    """Do work in a process of its own; return the signal that ended it, 0 where it came to its end."""
    _, status = os.waitpid(fork(work), 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    if os.WEXITSTATUS(status):
        sys.exit("a process failed")
    return 0


def make() -> None:
    """Leave two trained runs behind."""
    for name in ("worse", "better"):
        trained = Trained("register.model_name=any")
        for part in PARTS:
            records.save(getattr(trained, part), Path(f"{name}-{part}.json"))


def load(name: str, model: str) -> Trained:
    """Return one of them, which registers as this model."""
    trained = Trained.__new__(Trained)
    for part, record in PARTS.items():
        setattr(trained, part, records.load(record, Path(f"{name}-{part}.json")))
    trained.settings = config.load(overrides=[f"register.model_name={model}", "register.minimum=null"])
    return trained


def act(model: str, after: int) -> None:
    """Register the worse one, then the better one, and roll back; end at once right after so many writes."""
    done = 0

    def stopping(write: Callable[..., Any]) -> Callable[..., Any]:
        def stop(self: MlflowClient, *given: Any, **more: Any) -> Any:
            nonlocal done
            result = write(self, *given, **more)
            done += 1
            if done == after:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return stop

    for name in WRITES:
        setattr(MlflowClient, name, stopping(getattr(MlflowClient, name)))
    load("worse", model).register(right=WORSE)
    load("better", model).register(right=BETTER)
    roll_back(model)


def aliases(model: str) -> dict[str, str]:
    found = open_store().get_registered_model(model).aliases
    return {alias: str(version) for alias, version in found.items()}


def go_on(model: str) -> None:
    """Give the same commands again: they must end what was left undone, with one champion all the while."""
    known = aliases(model)
    assert load("worse", model).register(right=WORSE).model_version == "1"
    assert known.get("champion", "1") in ("1", "2")
    result = load("better", model).register(right=BETTER)
    assert result.model_version == "2"
    rolled_back = "rolled back" in result.judgement.reason
    assert aliases(model)["champion"] == ("1" if rolled_back else "2"), known
    if not rolled_back:
        history = open_store().get_registered_model(model).tags.get("champion_history", "")
        assert history == "1, 2"
        assert roll_back(model).now == "1"
    with pytest.raises(UserError, match="version 1 is the first that was @champion"):
        roll_back(model)
    versions = open_store().search_model_versions(f"name = '{model}'")
    assert {str(one.version) for one in versions} == {"1", "2"}


def take_turn(after: int) -> None:
    """End what the process before has left undone, then be killed after so many writes, if there are as many."""
    if after > 1:
        go_on(f"model-{after - 1}")
    act(f"model-{after}", after)


def main() -> None:
    forked(make)
    for after in range(1, MOST):
        if forked(partial(take_turn, after)) != signal.SIGKILL:
            print(after - 1)
            return
    sys.exit("there are more writes than this tries")


if __name__ == "__main__":
    main()
