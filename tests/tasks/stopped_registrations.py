"""A script: two registrations at one MLflow server, of which the first is stopped with SIGSTOP right before one of its
requests, and goes on when the second has come to its end; at last it is killed there.

Both models are better than the champion, and none is better than the other: whoever is second must be compared with
the first. It prints where the first was stopped. This process imports MLflow and Keras once and opens nothing: what it
forks does all the rest, so each has connections of its own.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from tasks import records, tracking
from tasks.tracking import turns
from tests.tasks.killed_registrations import BETTER, PARTS, WORSE, fork, load
from tests.tasks.registering import Trained

MOVING = "is moving @champion of"
COMPARED = "it is no better"
# Each: the request, the how many-th of its kind from where the first says that it is its turn, who is the champion
# then, and what the other one is told.
STOPS = {
    "nothing is said": ("set_registered_model_tag", 1, "second", "another registration moved @champion meanwhile"),
    "nobody is looked for": ("get_registered_model", 1, "first", MOVING),
    "the champion is not looked at": ("get_registered_model", 2, "first", MOVING),
    "the champion is not moved": ("set_registered_model_alias", 2, "first", MOVING),
    "the turn is not over": ("delete_registered_model_tag", 1, "first", COMPARED),
}


def wait(process: int) -> bool:
    """Wait until a process has ended; return whether it was only stopped."""
    _, status = os.waitpid(process, os.WUNTRACED)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit("a process failed")
    return os.WIFSTOPPED(status)


def make() -> None:
    """Leave three trained runs behind."""
    for name in ("worse", "first", "second"):
        trained = Trained("register.model_name=any")
        for part in PARTS:
            records.save(getattr(trained, part), Path(f"{name}-{part}.json"))


def register(name: str, model: str, at: str | None = None) -> None:
    """Register one of them, and stop where that is named."""
    turns.WAIT_SECONDS = 0.3
    if at is not None:
        _stop_before(*STOPS[at][:2])
    result = load(name, model).register(right=WORSE if name == "worse" else BETTER)
    records.save(result, Path(f"{model}-{name}.json"))


def _stop_before(request: str, number: int) -> None:
    ask, say, seen = getattr(MlflowClient, request), MlflowClient.set_registered_model_tag, -1

    def counted(self: MlflowClient, *given: Any, **more: Any) -> Any:
        nonlocal seen
        seen += seen >= 0
        if seen == number:
            os.kill(os.getpid(), signal.SIGSTOP)
        return ask(self, *given, **more)

    def said(self: MlflowClient, name: str, key: str, value: str) -> Any:
        nonlocal seen
        if request == "set_registered_model_tag":
            os.kill(os.getpid(), signal.SIGSTOP)
        say(self, name, key, value)  # Which asks for the model itself, too.
        seen = max(seen, 0) if key.startswith(turns.TAG) else seen

    setattr(MlflowClient, request, counted)
    MlflowClient.set_registered_model_tag = said  # type: ignore[method-assign]


def check(model: str, champion: str, other: str | None = None, reason: str = "") -> None:
    """End with a message unless this one is the champion, it alone was told so, and nobody has a turn any more."""
    first = records.load(records.RegisteredModel, Path(f"{model}-{champion}.json"))
    there = tracking.open_store().get_registered_model(model)
    told = [first.judgement]
    right = str(there.aliases["champion"]) == first.model_version and first.judgement and first.judgement.promoted
    if other is not None:
        second = records.load(records.RegisteredModel, Path(f"{model}-{other}.json")).judgement
        told.append(second)
        right = right and second is not None and not second.promoted and reason in second.reason
    if not right or any(key.startswith(turns.TAG) for key in there.tags):
        sys.exit(f"{model}: {there.aliases} {there.tags} {told}")


def main() -> None:
    wait(fork(make))
    for place, (at, (_, _, champion, reason)) in enumerate(STOPS.items()):
        model = f"model-{place}"
        wait(fork(partial(register, "worse", model)))
        first = fork(partial(register, "first", model, at))
        if not wait(first):
            sys.exit(f"it was not stopped where {at}")
        wait(fork(partial(register, "second", model)))
        os.kill(first, signal.SIGCONT)
        wait(first)
        other = "first" if champion == "second" else "second"
        wait(fork(partial(check, model, champion, other, reason)))
        print(at)
    wait(fork(partial(register, "worse", "killed")))
    first = fork(partial(register, "first", "killed", "the champion is not moved"))
    wait(first)
    os.kill(first, signal.SIGKILL)
    wait(first)
    wait(fork(partial(register, "second", "killed")))
    wait(fork(partial(check, "killed", "second")))
    print("killed")


if __name__ == "__main__":
    main()
