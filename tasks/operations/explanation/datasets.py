"""What `stratagem data add` would do."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tasks import config
from tasks.data import data_state, dataset_folder
from tasks.operations import dvc_data
from tasks.operations.explanation.trainings import explain
from tasks.records import Explanation, GivenSetting, PlannedStage


def add(source: str, name: str | None, values: Mapping[str, Any]) -> Explanation:
    """Return what ``dvc_data.add`` would do with the same arguments; a table is read, to tell the kinds of its columns.

    Raises:
        UserError: as that one.
    """
    described, guessed = dvc_data.describe(source, name, values)
    for line in guessed:
        print(line, file=sys.stderr)
    if isinstance(described, config.Settings):
        given = described.dataset.model_dump(mode="json")
        texts = [f"dataset.{key}={value}" for key, value in given.items() if value is not None]
        return explain(None, texts, ("download", "prepare"))
    return Explanation(stages=tuple(_local(described)), settings=tuple(_settings(described, values)))


def _local(described: config.LocalDescription) -> Iterator[PlannedStage]:
    root, place = config.project_root(), f"data/{described.name}"
    there = dataset_folder.is_there(described, root)
    what = f"{place} is this dataset" if there else f"{place} with params.yaml and dvc.yaml is not there"
    yield PlannedStage(stage="folder", does="is there already" if there else "would run", why=what)
    if not there or not (root / place / "prepared" / "manifest.json").exists():
        yield PlannedStage(stage="prepare", does="would run", why=f"{place}/prepared is not there")
    elif data_state.is_known(root, described.name):
        why = "DVC found it up to date, and no file that it goes by has changed since"
        yield PlannedStage(stage="prepare", does="is cached", why=why)
    else:
        why = f"{place}/prepared is there; a file that DVC goes by may have changed since it looked"
        yield PlannedStage(stage="prepare", does="asks DVC", why=why)


def _settings(described: config.LocalDescription, values: Mapping[str, Any]) -> Iterator[GivenSetting]:
    for key, value in described.model_dump(mode="json").items():
        if key in values:
            source = "--target" if key == "target" and not isinstance(values[key], dict) else "--set"
        elif key in ("kind", "name", "source"):
            source = "SOURCE"
        else:
            usual = type(described).model_fields[key].get_default(call_default_factory=True)
            source = "default rule" if getattr(described, key) == usual else "SOURCE, as it was read"
        yield GivenSetting(key=f"dataset.{key}", value=value, source=source)
