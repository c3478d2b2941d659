"""What commands would do that change, end or move what is there: data remove, push and pull, rollback,
reconcile, jobs cancel."""

from collections.abc import Iterator, Mapping

from tasks import config, runs
from tasks.operations import data_folders
from tasks.records import Explanation, JobState, PlannedStage
from tasks.system import files
from tasks.system.errors import listed
from tasks.tracking import trained_models


def remove(name: str) -> Explanation:
    """Return what `stratagem data remove` would do.

    Raises:
        UserError: there is no such dataset, or a run is at work on it.
    """
    data_folders.check_removable(name)
    folder, trained = f"data/{name}", [run for run in runs.list_runs(runs.RunFilter()).runs if run.dataset == name]
    num_bytes = files.num_bytes(config.project_root() / folder)
    kept = f"its source, files of yours, and the runs and models that were trained on it ({len(trained):,})"
    return Explanation(
        stages=(
            PlannedStage(stage="remove", does="would run", why=f"what was made in {folder}, of {num_bytes:,} bytes"),
            PlannedStage(stage="keep", does="is left out", why=kept),
        )
    )


def push(name: str | None) -> Explanation:
    """Return what `stratagem data push` would do.

    Raises:
        UserError: as ``data_folders.push``.
    """
    versions = {own: one.data_version for own, one in data_folders.to_push(name).items()}
    return Explanation(stages=tuple(_moved("push", versions, "which of its files the remote lacks")))


def pull(name: str | None) -> Explanation:
    """Return what `stratagem data pull` would do.

    Raises:
        UserError: as ``data_folders.pull``.
    """
    return Explanation(stages=tuple(_moved("pull", data_folders.to_pull(name), "which of its files are not here")))


def _moved(stage: str, versions: Mapping[str, str | None], asked: str) -> Iterator[PlannedStage]:
    for name, version in versions.items():
        yield PlannedStage(stage=stage, does="asks DVC", why=f"data/{name}, data version {version}: {asked}")


def rollback(model: str) -> Explanation:
    """Return what `stratagem rollback` would do.

    Raises:
        UserError: there is no such model.
    """
    known = trained_models.check_registered(model)
    if known is None:
        return Explanation(stages=(_asks_mlflow(f"which version of {model} is the champion, and which was before it"),))
    champion = [one.version for one in known if one.name == model and config.CHAMPION in one.aliases]
    which = f"{model}/{champion[0]} is @{config.CHAMPION} now" if champion else f"no version is @{config.CHAMPION} now"
    return Explanation(
        stages=(_asks_mlflow(f"{which}; MLflow knows which version had it before, which is loaded back first"),)
    )


def _asks_mlflow(why: str) -> PlannedStage:
    """Return a rollback of which MLflow alone knows what it would do."""
    return PlannedStage(stage="rollback", does="asks MLflow", why=why)


def cancel(found: JobState) -> Explanation:
    """Return what `stratagem jobs cancel` would do."""
    why = f"job {found.job.id} of {found.job.engine}, {found.job.name}: it is {found.state}; its checkpoints stay"
    return Explanation(stages=(PlannedStage(stage="cancel", does="would run", why=why),))


def reconcile() -> Explanation:
    """Return what `stratagem reconcile` would do."""
    dead = [holder.what for _, holder in runs.crashed_holders()]
    untold = [end.flow_run_id for _, end in runs.unreported()]
    kept = runs.undelivered()
    found = (
        ("end", dead, "commands that were killed at work"),
        ("report", untold, "flow runs whose end Prefect was not told of"),
        ("deliver", kept, "runs with more to tell MLflow"),
    )
    return Explanation(
        stages=tuple(
            PlannedStage(stage=stage, does="would run" if these else "is left out", why=f"{what}: {_named(these)}")
            for stage, these, what in found
        )
    )


def _named(these: list[str]) -> str:
    return listed(these, 3) if these else "none"
