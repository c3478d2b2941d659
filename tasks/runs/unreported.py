"""Flow runs whose end their Prefect server was not told of, because it had died."""

from collections.abc import Iterator
from pathlib import Path

from tasks import config, records
from tasks.records import FlowEnd
from tasks.system.errors import UserError


def keep_unreported(end: FlowEnd) -> None:
    """Keep how a flow run ended, until its server is told."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    records.save(end, folder / f"{end.flow_run_id}.json")


def unreported() -> Iterator[tuple[Path, FlowEnd]]:
    """Yield what is kept, with its file, which whoever has told the server removes."""
    for path in sorted(_folder().glob("*.json")):
        try:
            yield path, records.load(FlowEnd, path)
        except UserError:  # Half of a file, or somebody else's: nothing that could be told.
            continue


def _folder() -> Path:
    return config.project_root() / "mlruns" / "unreported"
