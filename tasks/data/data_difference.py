"""What differs between two datasets, or two data versions of one: read from their manifests, no array is opened."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from tasks import config, records
from tasks.data import prepared_data
from tasks.records import DataDifference, Feature, PreparedDataset
from tasks.runs import lineage
from tasks.system.errors import UserError


def load_at(name: str, commit: str) -> PreparedDataset:
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
    from tasks.data import (
        encoding,  # Here and not above: it imports NumPy, and a run imports this module before Prefect.
    )

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
            yield f"{column}: different values", f"{size - encoding.FIRST:,}"
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
