"""What there is in MLflow's registry."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException

from tasks import records, runs
from tasks.tracking.store import REFUSALS, SQLITE, open_store, retried, store_uri

PAGE = 200


@retried
def list_versions() -> list[records.ModelVersion]:
    """Return all versions of all registered models, by name and number; none where there is no store yet.

    Raises:
        UserError: the store cannot be used.
        Unavailable: the tracking server does not answer, or fails.
    """
    uri = store_uri()
    if uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).exists():
        return []
    client = open_store()
    aliases: dict[tuple[str, str], list[str]] = {}
    for model in _pages(client.search_registered_models):
        for alias, version in model.aliases.items():
            aliases.setdefault((model.name, str(version)), []).append(alias)
    found = [
        records.ModelVersion(
            name=one.name,
            version=str(one.version),
            aliases=tuple(sorted(aliases.get((one.name, str(one.version)), ()))),
            run_id=_local_run_id(client, one.run_id),
            tags=one.tags,
        )
        for one in _pages(client.search_model_versions)
    ]
    return sorted(found, key=lambda one: (one.name, int(one.version)))


def _pages(search: Callable[..., Any]) -> Iterator[Any]:
    token = None
    while True:
        page = search(max_results=PAGE, page_token=token)
        yield from page
        if not (token := page.token):
            return


def _local_run_id(client: Any, run_id: str | None) -> str | None:
    """Return the id that a run has in mlruns/: another one than MLflow's where it was started without the server."""
    if not run_id or runs.look_up(run_id) is not None:
        return run_id or None
    try:
        found: str = client.get_run(run_id).data.tags.get("local_run_id", run_id)
    except MlflowException as error:
        if error.error_code not in REFUSALS:
            raise
        return run_id  # Deleted for good.
    return found
