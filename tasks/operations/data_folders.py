"""The folders of data/: lists, shows, compares and removes them, pushes them to DVC's remote and pulls them."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import Timeout

from tasks import config, records, runs
from tasks.data import data_state, dataset_folder, prepared_data, quality_report
from tasks.operations import dvc_data
from tasks.process import dvc
from tasks.records import DataDifference, DataQuality, Feature, KeptColumn, PreparedDataset
from tasks.runs import lineage
from tasks.system.errors import UserError, one_of


def list_datasets() -> dict[str, PreparedDataset | None]:
    """Return the datasets in data/ by name; None for one that is not prepared or whose record cannot be read."""
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


def _check_known(name: str) -> None:
    if name not in (known := dataset_folder.names(config.project_root())):
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
    wanted = dataset_folder.names(config.project_root()) if name is None else [name]
    chosen = [one for one in wanted if lineage.data_version(one) is not None]
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
        return _load_at(name, commit) if at else show(name)

    return compare(load(first), load(second), (first, second))


def _load_at(name: str, commit: str) -> PreparedDataset:
    """Return the manifest of a dataset as it was in a commit, from DVC's cache.

    Raises:
        UserError: no such commit, it has no such dataset, or the cache does not hold it.
    """
    root = config.project_root()
    path = f"data/{name}/dvc.lock"
    lock = lineage.file_at(commit, path, root)
    version = lineage.version_in(lock, name) if lock is not None else None
    if version is None:
        raise UserError(f"{name}@{commit}: that commit has no {path} of a prepared dataset: git log -- {path}")
    listing = prepared_data.md5_by_file(version, root) or {}
    md5 = listing.get("manifest.json", "")
    manifest = root / prepared_data.LISTINGS / md5[:2] / md5[2:]
    if not md5 or not manifest.is_file():
        raise UserError(
            f"{name}@{commit}: DVC's cache does not hold its data version {version}: where the data were made, push "
            f"them; here fetch them: dvc fetch --all-commits data/{name}/dvc.yaml"
        )
    return records.load(PreparedDataset, manifest).model_copy(update={"data_version": version})


def compare(first: PreparedDataset, second: PreparedDataset, names: tuple[str, str]) -> DataDifference:
    """Return what differs between two prepared datasets.

    Args:
        names: what they are called, such as ``photos@HEAD~1``.
    """
    of_first, of_second = dict(_facts(first)), dict(_facts(second))
    rows = {what: (of_first.get(what), of_second.get(what)) for what in of_first | of_second}
    return DataDifference(
        first=names[0],
        second=names[1],
        differences={what: values for what, values in rows.items() if values[0] != values[1]},
    )


def _facts(dataset: PreparedDataset) -> Iterator[tuple[str, str]]:
    """Yield the names and the values by which two datasets are compared: examples, classes, columns, statistics."""
    # Here and not above: it imports NumPy, and a run imports this module before Prefect.
    from tasks.data.encoding.cells import FIRST

    yield "data version", (dataset.data_version or "not under DVC")[:12]
    yield "kind", dataset.kind
    yield "version", dataset.version
    target = dataset.target
    yield "task", f"{target.task}, {target.num_outputs} output{'s' * (target.num_outputs != 1)}"
    yield "labels", ", ".join(target.columns) or "one"
    held = dataset.held_out
    yield "held out to test", f"{held.num_examples:,}, seed {held.seed}" if held else "none"
    if "validation" not in dataset.splits:
        yield "validation examples of a run", "drawn by class" if dataset.validation_by_class else "drawn from all"
    for name, split in dataset.splits.items():
        yield f"{name}: examples", f"{split.num_examples:,}"
        # Not by the paths, which hold the dataset's name.
        arrays = "".join(sorted(f"{Path(path).name} {digest}\n" for path, digest in split.sha256.items()))
        yield f"{name}: sha256 of the arrays", hashlib.sha256(arrays.encode()).hexdigest()[:12]
        for class_name, count in zip(target.class_names, split.class_counts, strict=False):
            yield f"{name}: class {class_name}", f"{count:,}"
        columns = [one.name for feature in dataset.features.values() for one in feature.columns]
        for column in columns:  # A manifest has no column of which nothing is missing, and a reader no use for a gap.
            yield f"{name}: missing values of {column}", f"{split.num_missing.get(column, 0):,}"
    yield "metadata of the test split", dataset.sha256[dataset.metadata][:12] if dataset.metadata else "none"
    for name, feature in dataset.features.items():
        yield name, f"{feature.kind}, {feature.dtype} ({' x '.join(map(str, feature.shape))})"
        for one in feature.columns:
            yield f"{name}: column {one.name}", f"{one.kind}{', scaled by quantiles' if one.quantiles else ''}"
        yield from _statistics(name, feature)
        for column, size in zip(_places(name, feature), feature.vocabulary_sizes, strict=False):
            yield f"{column}: different values", f"{size - FIRST:,}"
    yield from (
        (f"{name}: {what}", f"{value:.6g}")
        for what, values in (("mean", target.mean), ("deviation", target.deviation))
        for name, value in zip(target.columns or ("label",), values, strict=False)
    )


def _statistics(name: str, feature: Feature) -> Iterator[tuple[str, str]]:
    for what, values in (("mean", feature.mean), ("deviation", feature.deviation)):
        for place, value in zip(_places(name, feature), values, strict=False):
            yield f"{place}: {what}", f"{value:.6g}"


def _places(name: str, feature: Feature) -> list[str]:
    """Return what the places of a feature are called: by column, else by channel or number."""
    if feature.columns:
        return [
            f"{column.name}{f' {number}' if column.width > 1 else ''}"
            for column in feature.columns
            for number in range(column.width)
        ]
    count = max(len(feature.mean), len(feature.vocabulary_sizes))
    return [name] if count == 1 else [f"{name} {number}" for number in range(count)]
