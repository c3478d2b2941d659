"""MLflow's store: the project's own, or the server that MLFLOW_TRACKING_URI names."""

import os
from collections.abc import Iterator
from pathlib import Path

from tasks.operations.doctor import Here, Remark
from tasks.operations.doctor._sqlite import look_at
from tasks.system.network import unreachable_reason

SQLITE = "sqlite:///"
ANSWER_SECONDS = 2.0


def look(here: Here) -> Iterator[Remark]:
    """Yield whether the store answers, or its database is whole."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"{SQLITE}{here.root / 'mlruns' / 'mlflow.db'}"
    if uri.startswith(("http://", "https://")):
        if (reason := unreachable_reason(f"{uri.rstrip('/')}/health", ANSWER_SECONDS)) is None:
            yield Remark("ok", f"MLFLOW_TRACKING_URI = {uri} answers")
        else:
            text = f"MLFLOW_TRACKING_URI = {uri}: no MLflow server answers ({reason}). Runs keep what they have to tell"
            yield Remark("error", text, "start it, or unset MLFLOW_TRACKING_URI")
        return
    if not uri.startswith(SQLITE):
        yield Remark("ok", f"MLFLOW_TRACKING_URI = {uri}: a store of this kind is not looked at")
        return
    yield from look_at(Path(uri.removeprefix(SQLITE)), "mlflow")
