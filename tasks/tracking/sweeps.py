"""What MLflow is told of a sweep and of its trials, beside what it is told of every run."""

from collections.abc import Sequence
from pathlib import Path

from tasks import records, runs
from tasks.tracking.lifecycle import log_files, set_tags
from tasks.tracking.metrics import log_metrics
from tasks.tracking.outbox import MAX_TAG_LENGTH, mlflow_run_id, text_of


def log_trial(run: records.Run, trial: records.Trial) -> None:
    """Give a trial's run what came of it: tags to find it by, and its value, under one name in all runs of a sweep."""
    if trial.value is not None:
        log_metrics(run, {"sweep/value": trial.value, "sweep/epochs": len(trial.values)})
    set_tags(run, {"trial": str(trial.number), "trial_state": trial.state})


def log_sweep(run: records.Run, sweep: records.Sweep, paths: Sequence[Path]) -> None:
    """Give a sweep its files, what was the best, and the training on all examples as one more child."""
    log_files(run, paths, "sweep")
    found = next((one for one in sweep.trials if one.number == sweep.best), None)
    if found is not None and found.value is not None:
        log_metrics(run, {"sweep/value": found.value, "sweep/trials": len(sweep.trials)})
        told = [f"trial {found.number} of {len(sweep.trials)}: {sweep.plan.metric} {found.value:.4f}", ""]
        told += [f"- {key} = {text_of(value)}" for key, value in found.params.items()]
        set_tags(run, {"best_trial": str(found.number), "mlflow.note.content": "\n".join(told)[:MAX_TAG_LENGTH]})
    if sweep.final is not None:
        set_tags(run, {"final_run": sweep.final.run_id})
        parent = {"mlflow.parentRunId": mlflow_run_id(run), "sweep": sweep.plan.name, "trial": "final"}
        set_tags(runs.find(sweep.final.run_id), parent)
