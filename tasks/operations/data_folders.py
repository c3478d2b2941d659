"""The folders of data/: lists, shows, compares and removes them, pushes them to DVC's remote and pulls them."""

from typing import Any

from filelock import Timeout

from tasks import config, runs
from tasks.data import data_difference, data_state, dataset_folder, prepared_data, quality_report
from tasks.operations import dvc_data
from tasks.process import dvc
from tasks.records import DataDifference, DataQuality, KeptColumn, PreparedDataset
from tasks.runs import lineage
from tasks.system.errors import UserError, one_of


def list_datasets() -> dict[str, PreparedDataset | None]:
    """Return the datasets in data/ by name; None for one that is not prepared or whose record cannot be read."""
    found: dict[str, PreparedDataset | None] = {}
    for name in _names():
        try:
            found[name] = dvc_data.load_prepared(name)
        except UserError:
            found[name] = None
    return found


def show(name: str) -> PreparedDataset:
    """Return the record of a prepared dataset in data/.

    Raises:
        UserError: there is no such dataset, or it is not prepared.
    """
    _check_known(name)
    return dvc_data.load_prepared(name)


def metadata(prepared: PreparedDataset) -> dict[str, KeptColumn]:
    """Return the metadata columns of a dataset's test examples.

    Raises:
        UserError: its file is missing or damaged.
    """
    from tasks.evaluation import (
        slices,  # Here and not above: it imports NumPy, and a run imports this module before Prefect.
    )

    try:
        columns = slices.metadata(prepared)
    except (OSError, ValueError):
        raise UserError(f"{prepared.metadata}: missing or damaged. {prepared_data.remedy(prepared.name)}") from None
    found = {}
    for name, column in columns.items():
        values: list[Any] = [value for value in column.values if value is not None]
        ends = {} if column.kind == "category" or not values else {"lowest": min(values), "highest": max(values)}
        missing = len(column.values) - len(values)
        found[name] = KeptColumn(kind=column.kind, num_missing=missing, num_different=len(set(values)), **ends)
    return found


def quality(name: str) -> DataQuality | None:
    """Return the checks' report on a prepared dataset; None if they have not run on this data version."""
    return quality_report.load(dvc_data.load_prepared(name), config.project_root() / "data" / name)


def _names() -> list[str]:
    return dataset_folder.names(config.project_root())


def _check_known(name: str) -> None:
    if name not in (known := _names()):
        raise UserError(one_of("dataset", name, known) + ", which are the folders of data/")


def remove(name: str) -> list[str]:
    """Remove a dataset's folder and what was made in it; return the user's files that stay, relative to the project.

    Raises:
        UserError: there is no such dataset, a run uses it, or another command is preparing it.
    """
    root = config.project_root()
    _check_known(name)
    try:
        with dvc.lock(root, timeout=1.0):
            if at_work := runs.at_work_on(name):
                raise UserError(
                    f"data/{name}: run {at_work[0].run_id} on {at_work[0].host} is at work on it: wait for its end, or "
                    "end it, then remove the dataset"
                )
            prepared_data.set_foreign_aside(name)
            left = dataset_folder.remove(root / "data" / name, root)
            data_state.forget(root, name)
    except Timeout:
        raise UserError(f"data/{name}: a command is preparing data: wait for its end, then remove it") from None
    return left


def push(name: str | None) -> dict[str, PreparedDataset]:
    """Copy a dataset, or all that are prepared, to DVC's remote; return their records by name.

    Raises:
        UserError: no such dataset, one that is not prepared, or no remote.
    """
    if name is not None:
        _check_known(name)
        chosen = {name: dvc_data.load_prepared(name)}
    else:
        chosen = {name: one for name, one in list_datasets().items() if one is not None}
    if not chosen or None in {one.data_version for one in chosen.values()}:
        raise UserError(
            "there is nothing to push: no dataset of data/ is prepared, or one has no dvc.lock. `stratagem prepare "
            "--set dataset.name=NAME` makes both"
        )
    dvc.let("push", [f"data/{name}/dvc.yaml" for name in chosen], config.project_root())
    return chosen


def pull(name: str | None) -> dict[str, PreparedDataset]:
    """Fetch the data in a dataset's dvc.lock, or in all of them, from DVC's remote; return their records by name.

    Raises:
        UserError: no such dataset, it has no dvc.lock, there is no remote, or the user's files are in the way.
    """
    if name is not None:
        _check_known(name)
    chosen = [one for one in ([name] if name is not None else _names()) if lineage.data_version(one) is not None]
    if not chosen:
        raise UserError(
            f"data/{name or '*'}/dvc.lock names no data, so there is nothing to pull: where they were prepared, "
            f"`stratagem data push` them and commit data/{name or 'NAME'}; or make them here: stratagem prepare"
        )
    for one in chosen:
        prepared_data.set_foreign_aside(one)
    dvc.let("pull", [f"data/{one}/dvc.yaml" for one in chosen], config.project_root())
    return {one: dvc_data.load_prepared(one) for one in chosen}


def diff(first: str, second: str) -> DataDifference:
    """Return what differs between two datasets, each NAME as it is here or NAME@COMMIT as it was in a commit.

    Raises:
        UserError: there is no such dataset or commit, or its data are not in DVC's cache.
    """

    def load(asked: str) -> PreparedDataset:
        name, at, commit = asked.partition("@")
        return data_difference.load_at(name, commit) if at else show(name)

    return data_difference.compare(load(first), load(second), (first, second))
