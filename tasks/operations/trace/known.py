"""What is known when a chain is followed: the runs in mlruns/, and the versions in MLflow's registry."""

import contextlib
from dataclasses import dataclass, field
from functools import cached_property

from tasks import config
from tasks.operations import pipeline
from tasks.records import ModelVersion
from tasks.runs.entries import PLACES, Entry, find_entries
from tasks.system.errors import StratagemError
from tasks.tracking import trained_models


@dataclass
class Known:
    """Runs and comparisons, and versions of models; each is read once, when it is asked for."""

    no_registry: str | None = field(default=None, init=False)
    """Why MLflow's registry could not be asked."""

    @cached_property
    def entries(self) -> list[Entry]:
        """The runs and comparisons that can be read, the newest first."""
        return find_entries(*PLACES)

    @cached_property
    def runs(self) -> dict[str, Entry]:
        """The runs by their ids, the newest first."""
        found = [entry for entry in self.entries if entry.run.folder.startswith("mlruns/runs/")]
        return {entry.run.run_id: entry for entry in found}

    @cached_property
    def versions(self) -> list[ModelVersion]:
        """The versions in the registry; or, where that cannot be asked, as the runs' records have them."""
        try:
            known = trained_models.own_versions()
            return pipeline.registered_versions() if known is None else known
        except StratagemError as error:
            self.no_registry = str(error)
            return self._recorded()

    def _recorded(self) -> list[ModelVersion]:
        found = []
        for entry in self.runs.values():
            if entry.model_version is None:
                continue
            name, _, number = entry.model_version.rpartition("/")
            aliases = entry.registration.aliases if entry.registration is not None else ()
            found.append(ModelVersion(name=name, version=number, aliases=aliases, run_id=entry.run.run_id, tags={}))
        return found

    def versions_of(self, run_id: str) -> list[ModelVersion]:
        """Return the versions of models that were made of a run, also those that another run's model was before."""
        entry = self.runs.get(run_id)
        named = entry.model_version if entry is not None else None
        return [one for one in self.versions if one.run_id == run_id or f"{one.name}/{one.version}" == named]

    def mlflow_run_ids(self) -> dict[str, str]:
        """Return the runs that MLflow has under another id, because they were started while it did not answer."""
        found = {}
        for path in (config.project_root() / "mlruns" / "runs").glob("*/mlflow_run_id"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if path.parent.name in self.runs:
                    found[path.read_text(encoding="utf-8")] = path.parent.name
        return found
