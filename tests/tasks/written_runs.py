"""Runs as their records tell of them, without a training."""

import os
import shutil
import socket
from pathlib import Path
from typing import Any

from tasks import config, records
from tasks.runs import locks, outcome

NO_SPLIT = records.PreparedSplit(
    num_examples=3, features={"image": "i.npy"}, labels="l.npy", sha256={"i.npy": "0"}, class_counts=(1, 2),
)  # fmt: skip
PREPARED = records.PreparedDataset(
    name="digits", kind="tfds", version="1.0.0", tfds_version="4.9.10", folder="data/digits/prepared",
    raw_folder="data/digits/raw",
    features={"image": records.Feature(kind="image", shape=(8, 8, 1), dtype="uint8")},
    target=records.Target(task="classification", num_outputs=2, class_names=("a", "b")),
    splits={"train": NO_SPLIT, "test": NO_SPLIT},
    sources=(), licence=None,
)  # fmt: skip
"""Digits, whose arrays are nowhere."""


def run_id_of(number: int) -> str:
    """Return an id whose first letters are those of the number."""
    return f"{number:04x}{'e' * 28}"


def write_run(
    number: int, status: str | None = "FINISHED", overrides: dict[str, Any] | None = None, **more: Any
) -> records.Run:
    """Leave a run behind that was started as the ``number``-th, with two checkpoints and two models of 1,000 bytes.

    Args:
        status: how it ended.
        overrides: of the settings.
        more: fields of its ``records.Run``, and of its lineage.
    """
    settings = config.load(None, overrides or {})
    of_lineage = {name: more.pop(name) for name in records.Lineage.model_fields if name in more}
    lineage = {"git_commit": None, "git_dirty": None, "code_digest": "c0de", "settings_digest": settings.digest()}
    run_id = run_id_of(number)
    given = {
        "run_id": run_id,
        "experiment": "digits",
        "name": f"{run_id[:6]}-convnet2-one_device-fit",
        "folder": f"mlruns/runs/{run_id}",
        "lineage": records.Lineage.model_validate({**lineage, "data_version": "d" * 32, **of_lineage}),
        "settings": settings.to_json(),
        "number": number,
        "start_time": number * 3_600_000,
        "key": f"key{number}",
        "host": socket.gethostname(),
        "project": locks.project_id(),
    }
    run = records.Run.model_validate(given | more)
    folder = Path(run.folder)
    records.save(run, folder / "records" / "run.json")
    for place in ("checkpoints/41/arrays.npz", "checkpoints/82/arrays.npz", "models/best.keras", "models/final.keras"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(bytes(1000))
    for step in (41, 82):
        (folder / "checkpoints" / str(step) / "state.json").write_text("{}")
    (folder / "report").mkdir()
    (folder / "report" / "history.csv").write_text("epoch\n")
    if status is not None:
        outcome.set_status(run, status, "some reason" if status != "FINISHED" else None)
    return run


def write_results(
    run: records.Run, version: str | None = None, lower_is_better: tuple[str, ...] = (), **metrics: float
) -> None:
    """Leave what training, evaluation and registration leave of a run.

    Args:
        version: of the model ``digits-convnet2``.
        lower_is_better: of its metrics.
        metrics: such as ``accuracy``, of the test.
    """
    folder, strategy, train = run.folder, run.settings["strategy"]["kind"], run.settings["train"]
    trained = records.TrainingResult(
        run_id=run.run_id, dataset="digits", strategy=strategy, loop=train["loop"], num_replicas=1, devices=("cpu:0",),
        global_batch_size=32, epochs=2, steps=82, num_parameters=1, examples_per_second=5000.0 + run.number,
        setup_seconds=1.0, first_call_seconds=None, epoch_seconds=(), history={}, stopped_early=False,
        checkpoints=f"{folder}/checkpoints", checkpoint=f"{folder}/checkpoints/82",
        best_checkpoint=f"{folder}/checkpoints/41", final_model=f"{folder}/models/final.keras",
        best_model=f"{folder}/models/best.keras", weights_digest=f"{run.number}", best_weights_digest="b",
        optimizer="SGD",
    )  # fmt: skip
    outcome.save(run, trained)
    evaluated = records.EvaluationResult(
        run_id=run.run_id, checkpoint=trained.checkpoint, step=82, num_examples=360,
        metrics={f"test/{name}": value for name, value in metrics.items()}, classes=(), confusion_matrix=(),
        lower_is_better=lower_is_better, strategy=strategy, outputs=f"{folder}/evaluation/82.npz", outputs_sha256="",
        test_rows="",
    )  # fmt: skip
    if metrics:
        outcome.save(run, evaluated)
    if version is not None:
        registered = records.RegisteredModel(
            run_id=run.run_id, model_uri="models:/m-" + "a" * 32, model_name="digits-convnet2", model_version=version,
            aliases=("challenger",), reason=None,
        )  # fmt: skip
        outcome.save(run, registered)


def write_summary(run: records.Run) -> records.RunSummary:
    """Leave the summary of a run that finished; return it."""
    given = {
        "run_id": run.run_id, "flow_run_id": None, "dataset": run.settings["dataset"]["name"],
        "strategy": "one_device", "loop": "fit", "num_replicas": 1, "epochs": 1, "steps": 2,
        "examples_per_second": None, "metrics": {"test/accuracy": 0.9}, "checkpoint": "c", "weights_digest": "w",
        "model_uri": None, "model_version": None, "aliases": (), "seconds": {},
        "finished_at": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    summary = records.RunSummary.model_validate(run.lineage.model_dump() | given)
    outcome.save(run, summary)
    return summary


def version_of(run: records.Run | None, number: int, *aliases: str, **tags: str) -> records.ModelVersion:
    """Return what MLflow's registry has of a version of the model ``digits-convnet2``."""
    run_id = run.run_id if run is not None else None
    return records.ModelVersion(name="digits-convnet2", version=str(number), aliases=aliases, run_id=run_id, tags=tags)


def leave_checkpoints(of: str, run_id: str, step: int) -> None:
    """Make the run folder that a run killed after ``step`` leaves: the checkpoints of another one up to then."""
    for folder in Path(f"mlruns/runs/{of}/checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) <= step:
            shutil.copytree(folder, Path(f"mlruns/runs/{run_id}/checkpoints") / folder.name)


def files_below(folder: Path | str) -> list[str]:
    """Return the files in a folder, by their places in it."""
    found = [Path(place, name) for place, _, names in os.walk(folder) for name in names]
    return sorted(str(path.relative_to(folder)) for path in found)
