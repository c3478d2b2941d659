"""Sweeps: what may be tried (`space`), what Optuna suggests and keeps and which trials are given up (`study`, the only
importer of Optuna), and whether a sweep goes on with an earlier one (`earlier`)."""

from tasks.sweeps.earlier import best_of, find_sweep, key_of, refuse_foreign_cluster, run_of, save_plan
from tasks.sweeps.space import Space, load, spaces
from tasks.sweeps.study import SAMPLER, Trials, importance, limits, next_batch, next_params
