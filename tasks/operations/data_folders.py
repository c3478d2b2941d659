"""Lists, shows, compares, removes, pushes and pulls the datasets in data/."""

import hashlib
from collections.abc import Iterator
from typing import Any

from tasks import config, records
from tasks.data import dataset_folder, prepared_data
from tasks.operations import dvc_data
from tasks.process import stages
from tasks.records import DataDifference, DataQuality, PreparedDataset
from tasks.runs import dvc, lineage, locks, repository
from tasks.system import units
from tasks.system.errors import UserError, one_of


def list_datasets() -> dict[str, PreparedDataset | None]:
    """Return the datasets in data/ by name; None for a dataset that is not prepared or has an unreadable record."""
    found: dict[str, PreparedDataset | None] = {}
    for name in dataset_folder.names(config.project_root()):
        try:
            found[name] = dvc_data.load_prepared(name)
        except UserError:
            found[name] = None
    return found


def show(name: str) -> PreparedDataset:
    """Return the record of a prepared dataset in data/.

    Raises:
        UserError: the dataset does not exist, or is not prepared.
    """
    _check_known(name)
    return dvc_data.load_prepared(name)


def quality(name: str) -> DataQuality | None:
    """Return the quality report of a prepared dataset; None if the checks have not run on this data version."""
    return prepared_data.load_quality(dvc_data.load_prepared(name))


def _check_known(name: str) -> None:
    if name not in (known := dataset_folder.names(config.project_root())):
        raise UserError(one_of("dataset", name, known) + ", which are the folders of data/")


def remove(name: str) -> list[str]:
    """Remove a dataset's folder except the user's own files in it; return these, relative to the project.

    Raises:
        UserError: the dataset does not exist, or a run uses it.
        StratagemError: another command is preparing data.
    """
    root = config.project_root()
    _check_known(name)
    with dvc.at_work(root, seconds=1.0):
        if at_work := locks.at_work_on(name):
            raise UserError(
                f"data/{name}: run {at_work[0].run_id} on {at_work[0].host} uses it: wait until the run ends, or stop "
                "it, then remove the dataset"
            )
        return dataset_folder.remove(root / "data" / name, root)


def push(name: str | None) -> dict[str, PreparedDataset]:
    """Copy a dataset, or all prepared datasets, to DVC's remote; return their records by name.

    Raises:
        UserError: the dataset does not exist or is not prepared, or DVC has no remote.
    """
    if name is not None:
        _check_known(name)
        chosen = {name: dvc_data.load_prepared(name)}
    else:
        chosen = {name: one for name, one in list_datasets().items() if one is not None}
    if not chosen or None in {one.data_version for one in chosen.values()}:
        raise UserError(
            "nothing to push: no dataset in data/ is prepared, or one has no dvc.lock. "
            "`stratagem data prepare --set dataset.name=NAME` creates both"
        )
    with dvc.at_work(config.project_root()):
        stages.push(targets=[f"data/{name}/dvc.yaml" for name in chosen])
    return chosen


def pull(name: str | None) -> dict[str, PreparedDataset]:
    """Fetch the data in a dataset's dvc.lock, or in all of them, from DVC's remote; return their records by name.

    Raises:
        UserError: the dataset does not exist or has no dvc.lock, DVC has no remote, or the user's files are in the way.
    """
    if name is not None:
        _check_known(name)
    wanted = dataset_folder.names(config.project_root()) if name is None else [name]
    chosen = [one for one in wanted if lineage.data_version(one) is not None]
    if not chosen:
        raise UserError(
            f"data/{name or '*'}/dvc.lock lists no data, so there is nothing to pull: where the data were prepared, "
            f"`stratagem data push` and commit data/{name or 'NAME'}; or prepare them here: stratagem data prepare"
        )
    for one in chosen:
        prepared_data.set_foreign_aside(one)
    with dvc.at_work(config.project_root()):
        stages.pull(targets=[f"data/{one}/dvc.yaml" for one in chosen])
    return {one: dvc_data.load_prepared(one) for one in chosen}


def diff(first: str, second: str) -> DataDifference:
    """Return the differences between two datasets: NAME is the current state, NAME@COMMIT that in a commit.

    Raises:
        UserError: a dataset or commit does not exist, or DVC's cache lacks its data.
    """
    return compare(_load(first), _load(second), (first, second))


def _load(asked: str) -> PreparedDataset:
    """Return the current manifest of a dataset, or that of a commit from DVC's cache."""
    name, at, commit = asked.partition("@")
    if not at:
        return show(name)
    root = config.project_root()
    path = f"data/{name}/dvc.lock"
    lock = repository.file_at(commit, path, root)
    version = lineage.version_in(lock, name) if lock is not None else None
    if version is None:
        raise UserError(f"{name}@{commit}: that commit has no {path} of a prepared dataset: git log -- {path}")
    listing = prepared_data.md5_by_file(version, root) or {}
    md5 = listing.get("manifest.json", "")
    manifest = root / prepared_data.LISTINGS / md5[:2] / md5[2:]
    if not md5 or not manifest.is_file():
        raise UserError(
            f"{name}@{commit}: DVC's cache lacks its data version {version}: push it where it was prepared, then "
            f"fetch it here: dvc fetch --all-commits data/{name}/dvc.yaml"
        )
    return records.load(PreparedDataset, manifest).model_copy(update={"data_version": version})


def compare(first: PreparedDataset, second: PreparedDataset, names: tuple[str, str]) -> DataDifference:
    """Return the differences between two prepared datasets with these names, such as ``photos@HEAD~1``."""
    of_first, of_second = dict(_facts(first)), dict(_facts(second))
    rows = {what: (of_first.get(what), of_second.get(what)) for what in of_first | of_second}
    return DataDifference(
        first=names[0],
        second=names[1],
        differences={what: values for what, values in rows.items() if values[0] != values[1]},
    )


def _facts(dataset: PreparedDataset) -> Iterator[tuple[str, str]]:
    """Yield a manifest's keys and values, except those that contain the dataset's name."""
    names = dataset.target.class_names
    told = dataset.model_dump(
        mode="json",
        include={"kind", "version", "data_version", "held_out", "target", "features", "validation_by_class"},
    )
    for feature in told["features"].values():
        feature.pop("vocabulary")
        feature["columns"] = {column.pop("name"): column for column in feature["columns"]}
    told["splits"] = {
        name: {
            "num_examples": split.num_examples,
            "arrays": hashlib.sha256("".join(sorted(split.sha256.values())).encode()).hexdigest()[:12],
            "class_counts": dict(zip(names, split.class_counts, strict=False)),
            "num_missing": split.num_missing,
        }
        for name, split in dataset.splits.items()
    }
    told["data_version"] = (dataset.data_version or "not under DVC")[:12]
    told["metadata"] = dataset.sha256[dataset.metadata][:12] if dataset.metadata else None
    yield from _flat("", told)


def _flat(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(f"{key}.{name}" if key else str(name), inner)
    elif value is not None:
        yield key, units.number(value) if isinstance(value, float) else str(value)
