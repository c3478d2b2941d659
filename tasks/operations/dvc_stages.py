"""The stages that DVC runs: those of data/<name>/dvc.yaml, and those of the root's dvc.yaml, which write metrics/."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tasks import config, records
from tasks.operations import dvc_data, pipeline, preconditions
from tasks.process import client
from tasks.records import TrainingResult
from tasks.reports.tables import history_table, metrics_table, predictions_table
from tasks.runs import entries, outcome
from tasks.system.errors import UserError
from tasks.system.imports import import_quietly, set_who_logs


def make_data(stage: str, name: str) -> None:
    """Run download or prepare for the dataset that data/<name>/params.yaml describes."""
    root = config.project_root()
    folder = root / "data" / name
    if not (folder / "params.yaml").is_file():
        raise UserError(f"data/{name} is not a dataset folder: `stratagem {stage}` with dataset.name={name} creates it")
    described = config.read_description(folder)
    if stage == "prepare":
        # Only TFDS needs TensorFlow, whose import takes seconds.
        set_who_logs() if described.is_local else import_quietly("tasks.data.kinds.tfds")
        from tasks.prepare import prepare

        prepared = prepare(described)
        sizes = {split: part.num_examples for split, part in prepared.splits.items()}
        print(f"prepared {prepared.name} {prepared.version}: {_counts(sizes)}", file=sys.stderr)
        if held := prepared.held_out:
            print(
                f"it has no test split: {held.num_examples:,} of its training examples, drawn with seed {held.seed}, "
                "become the test split",
                file=sys.stderr,
            )
        return
    overrides = [
        f"dataset.{key}={json.dumps(value)}"
        for key, value in described.model_dump(exclude={"kind", "checks", "columns"}).items()
    ]
    if downloads := os.environ.get("STRATAGEM_DOWNLOADS"):
        overrides.append(f"dataset.downloads={json.dumps(downloads)}")
    dataset = config.load(None, overrides, root).dataset
    import_quietly()
    from tasks.download import download

    manifest = download(dataset)
    print(f"downloaded {manifest.name} {manifest.version}: {_counts(manifest.num_examples)}", file=sys.stderr)


def _counts(splits: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in splits.items())


def run_train(recipe: str | None, overrides: Sequence[str]) -> None:
    """Train in a new or resumed run; write its record and its history."""
    root = config.project_root()
    folder = root / "metrics"
    folder.mkdir(exist_ok=True)
    settings, prepared = dvc_data.load(recipe, overrides)
    preconditions.check_devices(settings)
    with runs_of_the_project(root):
        training = pipeline.train_alone(settings, prepared, pipeline.Resumption())
    records.save(training, folder / "training.json")
    history_table(training, folder / "history.csv")


def run_evaluate(recipe: str | None, overrides: Sequence[str]) -> None:
    """Evaluate the model of the stage `train`; write the record, tables and pictures."""
    root = config.project_root()
    settings, prepared = dvc_data.load(recipe, overrides)
    folder = root / "metrics"
    training = records.load(TrainingResult, folder / "training.json")
    with runs_of_the_project(root):
        run = entries.find_run(training.run_id)
        outcome.refuse_pruned(run)
        evaluation = client.evaluate(settings, prepared, training, run)
        client.write_report(settings, run)
        drawn = "confusion_matrix.png" if evaluation.confusion_matrix else "predictions.png"
        for picture, name in ((drawn, "predictions.png"), ("learning_curve.png", "learning_curve.png")):
            shutil.copyfile(root / run.folder / "report" / picture, folder / name)
    records.save(evaluation, folder / "evaluation.json")
    metrics_table(evaluation, folder / "test.json")
    predictions_table(evaluation, folder / "predictions.csv")


@contextlib.contextmanager
def runs_of_the_project(root: Path) -> Iterator[None]:
    """Within the block, use the project's mlruns/ even if DVC works in a copy of the project.

    `dvc exp run --temp` and the workers of DVC's queue copy the project to .dvc/tmp/exps/, and finally remove the copy,
    with the checkpoints, models and MLflow store in it.
    """
    copies = (copy for copy in (root, *root.parents) if copy.parts[-4:-1] == (".dvc", "tmp", "exps"))
    project = next((copy.parents[3] for copy in copies), None)
    if project is None or not (project / "params.yaml").is_file() or (root / "mlruns").is_symlink():
        yield
        return
    own, aside = root / "mlruns", root / ".dvc" / "tmp" / "mlruns"
    (project / "mlruns").mkdir(exist_ok=True)
    own.mkdir(exist_ok=True)
    own.rename(aside)
    try:
        own.symlink_to(project / "mlruns")
        yield
    finally:
        # Restore the folder that git tracks: DVC commits the changes of the copy as the experiment.
        own.unlink(missing_ok=True)
        aside.rename(own)
