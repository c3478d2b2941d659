"""What MLflow is told of a sweep and of its trials, beside what it is told of every run."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from tasks import config, records, runs
from tasks.system.errors import UserError
from tasks.tracking.lifecycle import log_files, set_tags
from tasks.tracking.metrics import log_metrics
from tasks.tracking.outbox import MAX_TAG_LENGTH, mlflow_run_id, text_of


def log_trial(run: records.Run, trial: records.Trial) -> None:
    """Give a trial's run what came of it: tags to find it by, and its value, under one name in all runs of a sweep."""
    if trial.value is not None:
        log_metrics(run, {"sweep/value": trial.value, "sweep/epochs": len(trial.values)})
    set_tags(run, {"trial": str(trial.number), "trial_state": trial.state})


def log_sweep(run: records.Run, sweep: records.Sweep, paths: Sequence[Path]) -> None:
    """Give a sweep its files, what was the best, and the training on all examples as one more child: unless that was
    there before, as another sweep's or a run by itself. Then it stays where it is, and the sweep's tag names it."""
    log_files(run, paths, "sweep")
    found = next((one for one in sweep.trials if one.number == sweep.best), None)
    if found is not None and found.value is not None:
        log_metrics(run, {"sweep/value": found.value, "sweep/trials": len(sweep.trials)})
        told = [f"trial {found.number} of {len(sweep.trials)}: {sweep.plan.metric} {found.value:.4f}", ""]
        told += [f"- {key} = {text_of(value)}" for key, value in found.params.items()]
        told += ["", f"trained again on all examples: run {sweep.final.run_id}"] if sweep.final is not None else []
        set_tags(run, {"best_trial": str(found.number), "mlflow.note.content": "\n".join(told)[:MAX_TAG_LENGTH]})
    if sweep.final is not None:
        set_tags(run, {"final_run": sweep.final.run_id})
        final = runs.find(sweep.final.run_id)
        if final.start_time >= run.start_time and not _is_anothers(final, run):
            parent = {"mlflow.parentRunId": mlflow_run_id(run), "sweep": sweep.plan.name, "trial": "final"}
            set_tags(final, parent)


def _is_anothers(final: records.Run, run: records.Run) -> bool:
    """Return whether a sweep that was there before this one has trained a run as its last."""
    root = config.project_root()
    for other in runs.sweeps():
        if other.start_time < run.start_time:
            with contextlib.suppress(UserError):  # It has not come so far.
                kept = records.load(records.Sweep, root / other.folder / "sweep.json")
                if kept.final is not None and kept.final.run_id == final.run_id:
                    return True
    return False
