"""Which trials are not worth more epochs: successive halving, as Li et al. have it in ASHA (2020), with the brackets of
their Hyperband (2018).

Optuna's own pruners ask their study in the middle of a training, so what they decide depends on what other trainings
have told by then, and is another thing after a kill. Here the limits of a trial follow from the trials before it, and
are known before it begins: the training ends itself, at an epoch's end, in whatever process it runs.
"""

from collections.abc import Sequence

from tasks.records import Limits
from tasks.sweeps.space import Halving


def rungs(pruner: Halving, epochs: int) -> list[int]:
    """Return after how many epochs trials are held against each other: ``min_epochs``, and ``factor`` times that."""
    found, epoch = [], pruner.min_epochs
    while epoch < epochs:
        found.append(epoch)
        epoch *= pruner.factor
    return found


def limits(
    pruner: Halving | None, number: int, epochs: int, earlier: Sequence[Sequence[float]], metric: str, lower: bool
) -> Limits:
    """Return what a trial must reach.

    Args:
        pruner: None prunes nothing.
        number: of the trial. Its bracket says at which rung it is judged first: trial 0 at the first, trial 1 at the
            second, and so on, again from the first after the last: some slow beginners get their time.
        epochs: that it is to train.
        earlier: the metric after each epoch of the trials before it.
        metric: its name.
        lower: whether less of it is better.
    """
    found = {}
    judged_at = rungs(pruner, epochs) if pruner is not None else []
    for epoch in judged_at[number % len(judged_at) :] if judged_at else []:
        there = sorted((values[epoch - 1] for values in earlier if len(values) >= epoch), reverse=not lower)
        if pruner is not None and len(there) >= pruner.min_trials:
            found[epoch] = there[max((len(there) + 1) // pruner.factor, 1) - 1]  # The trial itself counts, too.
    return Limits(metric=metric, lower_is_better=lower, by_epoch=found)
