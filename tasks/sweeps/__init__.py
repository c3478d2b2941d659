"""Sweeps: the search space (`space`), and Optuna's suggestions, storage and pruning of trials, and resuming an earlier
sweep (`study`)."""

from tasks.sweeps.space import Space, load, spaces
from tasks.sweeps.study import (
    Trials,
    best_of,
    find_sweep,
    importance,
    key_of,
    limits,
    next_batch,
    next_params,
    plan_of,
    run_of,
)  # fmt: skip
