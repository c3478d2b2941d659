"""Models and versions of another store, brought to the one that MLFLOW_TRACKING_URI names, with their aliases."""

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import mlflow
from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric

from tasks import config
from tasks.system.errors import UserError
from tasks.tracking.champion import HISTORY
from tasks.tracking.store import is_own_store, open_store, pages, retried

FROM_MODEL, FROM_PROJECT = "synced_model_id", "synced_from"
# What MLflow's pages link a model to its version with.
VERSIONS_TAG = "mlflow.modelVersions"
MODEL_ID = re.compile(r"m-[0-9a-f]{32}")


class SourceStore(NamedTuple):
    """A store that is copied from."""

    client: mlflow.MlflowClient
    folder: Path
    """mlruns/, where its database and its files lie now."""
    is_own: bool
    """Whether it is that of this project, whose processes may be at work in it."""

    def place(self, uri: str) -> Path:
        """Return where files lie that the store names by the place where they were written.

        Raises:
            UserError: another machine's have a link among them.
        """
        written = unquote(uri.removeprefix("file://"))
        _, found, rest = written.rpartition("/mlruns/artifacts/")
        own = (self.folder / "artifacts").resolve()
        here = (own / rest).resolve()
        if self.is_own:
            return here if found and here.is_relative_to(own) and here.exists() else Path(written)
        # Another machine's database may name any file of this one, which is not to be brought to anybody, and so may a
        # link that was copied with it.
        if not (found and here.is_relative_to(own)):
            return own / "elsewhere"
        if (link := next((path for path in here.rglob("*") if path.is_symlink()), None)) is not None:
            raise UserError(f"{link} is a link, which may lead to any file of this machine: copy what it leads to")
        return here


def copy_model(source: SourceStore, client: mlflow.MlflowClient, run: Any, there: str, model: Any) -> str:
    """Bring a logged model, which names its run and itself; return its id."""
    experiment_id = client.get_run(there).info.experiment_id
    same = list(pages(client.search_logged_models, [experiment_id], f"source_run_id = '{there}'"))
    made = next((one for one in same if one.tags.get(FROM_MODEL) == model.model_id), None)
    tags = {key: text for key, text in model.tags.items() if key != VERSIONS_TAG} | {FROM_MODEL: model.model_id}
    if made is None:
        made = client.create_logged_model(
            experiment_id, model.name, there, tags=tags, params=model.params, model_type=model.model_type
        )
    if made.status != LoggedModelStatus.READY:
        place = source.place(model.artifact_location)
        if not (place / "MLmodel").is_file():
            raise UserError(f"run {run.info.run_id}: its model {model.model_id} is not in {place}: copy it, too")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, "model")
            shutil.copytree(place, folder)
            text = (folder / "MLmodel").read_text(encoding="utf-8")
            text = text.replace(model.model_id, made.model_id).replace(run.info.run_id, there)
            (folder / "MLmodel").write_text(text, encoding="utf-8")
            client.log_model_artifacts(made.model_id, str(folder))
        steps = {one.model_id: one.step for one in (run.outputs.model_outputs if run.outputs else [])}
        client.log_outputs(there, [LoggedModelOutput(made.model_id, steps.get(model.model_id, 0))])
        _log_metrics(client, there, model, made)
        client.finalize_logged_model(made.model_id, "READY")
    else:  # What was said of it since it was brought.
        _log_metrics(client, there, model, made)
        if changed := {key: text for key, text in tags.items() if made.tags.get(key) != text}:
            client.set_logged_model_tags(made.model_id, changed)
    made_id: str = made.model_id
    return made_id


def _log_metrics(client: mlflow.MlflowClient, there: str, model: Any, made: Any) -> None:
    """Bring the metrics of a model that its copy does not have."""
    known = {(one.key, one.value, one.step, one.timestamp) for one in made.metrics or []}
    points = [
        Metric(one.key, one.value, one.timestamp, one.step, made.model_id, one.dataset_name, one.dataset_digest)
        for one in model.metrics or []
        if (one.key, one.value, one.step, one.timestamp) not in known
    ]
    if points:
        client.log_batch(there, metrics=points)


def model_of(version: Any) -> str | None:
    """Return the id of the logged model that a version was made of; a store of SQLite says it by the place alone."""
    found = MODEL_ID.search(version.source or "")
    return version.model_id or (found[0] if found else None)


def copy_version(client: mlflow.MlflowClient, version: Any, there: str, copied: Mapping[str, str]) -> str:
    """Bring a version, under the next number that is free there, unless it is there; return NAME/VERSION."""
    name, model_id = version.name, copied[model_of(version) or ""]
    if not list(client.search_registered_models(f"name = '{name}'")):
        client.create_registered_model(name)
    found = list(pages(client.search_model_versions, filter_string=f"name = '{name}'"))
    digest = version.tags.get("model_digest")
    made = next((one for one in found if model_of(one) == model_id), None) or next(
        (one for one in found if digest and one.tags.get("model_digest") == digest), None
    )
    tags = {**version.tags, FROM_PROJECT: _project_of(client, there)}
    if made is None:
        at = client.get_logged_model(model_id).artifact_location
        address = at if is_own_store() else f"models:/{model_id}"
        made = client.create_model_version(name, address, there, tags=tags, model_id=model_id)
    elif made.run_id == there:  # One of somebody else's that is the same model is left as it is.
        for key, text in tags.items():
            if made.tags.get(key) != text:
                client.set_model_version_tag(name, made.version, key, text)
    links = json.dumps([{"name": name, "version": made.version}])
    client.set_logged_model_tags(model_id, {VERSIONS_TAG: links})
    return f"{name}/{made.version}"


def _project_of(client: mlflow.MlflowClient, there: str) -> str:
    """Return what a run says of the project that it is of, which is the same in each copy."""
    held: str = client.get_run(there).data.tags.get("held_by", "")
    return held.partition(":")[0].partition(".")[0]


def known_versions(client: mlflow.MlflowClient, there: str) -> tuple[str, ...]:
    """Return the versions that were made of a run, as NAME/VERSION."""
    found = pages(client.search_model_versions, filter_string=f"run_id = '{there}'")
    return tuple(sorted(f"{one.name}/{one.version}" for one in found))


@retried
def copy_aliases(source: SourceStore) -> list[str]:
    """Give the versions their aliases, where these are free there, or at an older version of the same project; return
    a sentence for each that stays where it is."""
    client = open_store()
    notes = []
    for model in list(pages(source.client.search_registered_models)):
        there = list(client.search_registered_models(f"name = '{model.name}'"))
        if not there:
            continue
        numbers = _numbers(source, client, model.name)
        for alias, version in model.aliases.items():
            wanted, present = numbers.get(str(version)), there[0].aliases.get(alias)
            if wanted is None or str(present) == wanted:
                continue
            if present is not None and not _is_of_same(client, model.name, str(present), wanted):
                notes.append(
                    f"{model.name}@{alias} stays at version {present}, which came from elsewhere; version {wanted} has "
                    "it here"
                )
                continue
            client.set_registered_model_alias(model.name, alias, wanted)
            if alias == config.CHAMPION and HISTORY in model.tags:
                history = [numbers[one] for one in model.tags[HISTORY].split(", ") if one in numbers]
                client.set_registered_model_tag(model.name, HISTORY, ", ".join(history))
    return notes


def _numbers(source: SourceStore, client: mlflow.MlflowClient, name: str) -> dict[str, str]:
    """Return the number there of each version here that was brought."""
    wanted = f"name = '{name}'"
    there = {
        one.tags.get("model_digest"): str(one.version)
        for one in pages(client.search_model_versions, filter_string=wanted)
    }
    found = pages(source.client.search_model_versions, filter_string=wanted)
    digests = {str(one.version): one.tags.get("model_digest") for one in found}
    return {version: there[digest] for version, digest in digests.items() if digest is not None and digest in there}


def _is_of_same(client: mlflow.MlflowClient, name: str, present: str, wanted: str) -> bool:
    """Return whether both versions were brought from one project: then the alias is that project's to move."""
    of_both = [client.get_model_version(name, version).tags.get(FROM_PROJECT) for version in (present, wanted)]
    return bool(of_both[0]) and of_both[0] == of_both[1]
