"""Prefect: its database, or the server that PREFECT_API_URL names."""

import os
from collections.abc import Iterator

from tasks.operations.doctor import Here, Remark, prefect_home
from tasks.operations.doctor._sqlite import look_at
from tasks.system.network import unreachable_reason

ANSWER_SECONDS = 2.0


def look(here: Here) -> Iterator[Remark]:
    """Yield whether the server answers, or the database is whole."""
    if url := os.environ.get("PREFECT_API_URL"):
        if (reason := unreachable_reason(f"{url.rstrip('/')}/health", ANSWER_SECONDS)) is None:
            yield Remark("ok", f"PREFECT_API_URL = {url} answers")
        else:
            text = f"PREFECT_API_URL = {url}: no Prefect server answers ({reason})"
            yield Remark("error", text, "prefect server start, or unset PREFECT_API_URL: then a run has one of its own")
        return
    if os.environ.get("PREFECT_API_DATABASE_CONNECTION_URL") or os.environ.get(
        "PREFECT_SERVER_DATABASE_CONNECTION_URL"
    ):
        yield Remark("ok", "its database is the one of PREFECT_SERVER_DATABASE_CONNECTION_URL, which is not looked at")
        return
    yield from look_at(prefect_home(here.root) / "prefect.db", "prefect")
