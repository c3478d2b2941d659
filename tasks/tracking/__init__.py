"""Runs, metrics and models in MLflow; the only importer of mlflow.

A run is always addressed by its id, never as MLflow's "active run", which does not cross threads and leaves stray runs
behind.

MLflow takes seconds to import. So it is imported when one of these names is first asked for, and not with
``tracking.trained_models``, which needs none of it.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasks.tracking.champion import Rollback, find_rollback, rollback
    from tasks.tracking.copier import sync
    from tasks.tracking.crashed import end_crashed
    from tasks.tracking.lifecycle import end_run, log_files, log_reproduction, resume_run, set_tags, start_run
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
    from tasks.tracking.parents import (
        Sweeping,
        log_comparison,
        log_sweep,
        log_trial,
        start_comparison,
        start_sweep,
        start_trial,
    )
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
else:
    MODULES = (
        "champion", "copier", "crashed", "lifecycle", "metrics", "models", "outbox", "parents", "registry", "store",
    )  # fmt: skip

    def __getattr__(name: str) -> Any:
        if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}"):
            raise AttributeError(name)  # Python asks before it imports a module of this package.
        for module in MODULES:
            found = getattr(importlib.import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                globals()[name] = found
                return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
