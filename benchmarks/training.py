"""One training by the project's own stage, without tracking.

`python -m benchmarks.training '{"train.epochs": 3}'`, in the environment of a stage process. Prints the training's
record as one JSON line.
"""

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tasks import config, records
from tasks.operations import dvc_data
from tasks.runs import lineage


@contextlib.contextmanager
def trained(overrides: dict[str, object], recipe: str | None = None) -> Iterator[records.TrainingResult]:
    """Train in a run folder of its own, which is removed when the block ends."""
    from tasks.train import train

    settings = config.load(recipe, overrides)
    prepared = dvc_data.load_prepared(settings.dataset.name)
    runs = config.project_root() / "mlruns" / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="benchmark-", dir=runs)
    try:
        run = records.Run(
            run_id="benchmark",
            experiment="benchmark",
            name="benchmark",
            folder=Path(folder).relative_to(config.project_root()).as_posix(),
            lineage=lineage.collect(settings, prepared.data_version),
            settings=settings.to_json(),
        )
        yield train(settings, prepared, run, send=lambda step, metrics: None)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    with trained(json.loads(sys.argv[1])) as result:
        print(result.model_dump_json())
