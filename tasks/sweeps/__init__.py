"""Sweeps: the search space (`space`), and Optuna's suggestions, storage and pruning of trials, and resuming an earlier
sweep (`study`)."""

from tasks.sweeps.space import *
from tasks.sweeps.study import *
