"""Runs, metrics and models in MLflow; the only importer of mlflow.

A run is always addressed by its id, never as MLflow's "active run", which does not cross threads and leaves stray runs
behind.
"""

from tasks.tracking.champion import Rollback, find_rollback, rollback
from tasks.tracking.parents import log_comparison
from tasks.tracking.crashed import end_crashed
from tasks.tracking.lifecycle import (
    Sweeping,
    end_run,
    log_files,
    log_reproduction,
    resume_run,
    set_tags,
    start_comparison,
    start_run,
    start_sweep,
    start_trial,
)
from tasks.tracking.metrics import MetricWriter, log_metrics, system_metrics
from tasks.tracking.models import (
    check_code,
    fetch_model,
    fetched_model,
    find_model,
    find_version,
    import_flavor,
    log_model,
    predict,
)
from tasks.tracking.outbox import OUTBOX, await_told, mlflow_run_id
from tasks.tracking.registry import (
    Candidate,
    Standing,
    fetch_keras_file,
    find_standing,
    list_versions,
    model_place,
    register_version,
    registering,
)
from tasks.tracking.store import Unavailable, is_own_store, open_store, store_uri
from tasks.tracking.sweeps import log_sweep, log_trial
from tasks.tracking.copier import sync
