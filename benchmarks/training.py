"""One training by the project's own stage, without tracking, and the evaluation of its last checkpoint.

`python -m benchmarks.training '{"train.epochs": 3}'`, in the environment of a stage process. Prints the training's
record as one JSON line, with `test/accuracy`, `evaluation_seconds`, and `jit_compile` where
that was left to be chosen.
"""

import contextlib
import json
import shutil
import sys
import tempfile
import time
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


def main(overrides: dict[str, object]) -> None:
    """Train, evaluate, and print."""
    from tasks.evaluate import evaluate

    settings = config.load(overrides=overrides)
    with trained(overrides) as result:
        began = time.perf_counter()
        evaluated = evaluate(settings, dvc_data.load_prepared(result.dataset), result)
        seconds = time.perf_counter() - began
        tuning = config.project_root() / result.checkpoints.removesuffix("/checkpoints") / "records" / "tuning.json"
        chosen = tuning.exists() and records.load(records.Tuning, tuning).jit_compile
    found = {"test/accuracy": evaluated.metrics["test/accuracy"], "evaluation_seconds": seconds, "jit_compile": chosen}
    print(json.dumps(result.model_dump(mode="json") | found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
