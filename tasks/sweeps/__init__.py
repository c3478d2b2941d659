"""Sweeps: what may be tried (`space`), what Optuna suggests (`sampler`), which trials are given up (`halving`), where
they are kept (`store`), and what is left of a sweep of before (`earlier`). The only importer of Optuna."""

from tasks.sweeps.earlier import best_of, find, key_of, refuse_foreign_cluster, run_of, save_plan
from tasks.sweeps.halving import limits
from tasks.sweeps.sampler import SAMPLER, importance, next_batch, next_params
from tasks.sweeps.space import Space, load, spaces
from tasks.sweeps.store import Trials
