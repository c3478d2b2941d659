"""The stages that DVC runs: those of data/<name>/dvc.yaml, and those of the root's, which write to metrics/."""

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tasks import config, records, reports, runs
from tasks.operations import dvc_data, pipeline, preconditions
from tasks.process import client
from tasks.records import TrainingResult
from tasks.system.errors import UserError
from tasks.system.imports import import_quietly, quiet_standard_error, set_who_logs

NOTHING = re.compile(r"writing of split \"(.+?)\": No examples were yielded")
COPIES = (".dvc", "tmp", "exps")
"""The folder of DVC's copies of the project."""


def run_check(dataset: config.Dataset) -> None:
    """Refuse a dataset that cannot be fetched.

    Raises:
        UserError: no such dataset, no network, or it does not have images with one class each.
    """
    from tasks.download import refuse_early

    with quiet_standard_error():
        refuse_early(dataset)


def make_data(stage: str, name: str) -> None:
    """Run download or prepare for the dataset that data/<name>/params.yaml describes."""
    root = config.project_root()
    folder = root / "data" / name
    if not (folder / "params.yaml").is_file():
        raise UserError(
            f"there is no dataset folder data/{name}: `stratagem {stage}` with dataset.name={name} makes it"
        )
    described = config.read_description(folder)
    if stage == "prepare":
        # TensorFlow, which takes seconds, is needed for TFDS alone.
        set_who_logs() if described.is_local else import_quietly("tasks.data.kinds.tfds")
        from tasks.prepare import prepare

        _print_prepared(prepare(described))
        return
    overrides = [
        f"dataset.{key}={json.dumps(value)}"
        for key, value in described.model_dump(exclude={"kind", "checks", "columns"}).items()
    ]
    if downloads := os.environ.get("STRATAGEM_DOWNLOADS"):
        overrides.append(f"dataset.downloads={json.dumps(downloads)}")
    dataset = config.load(None, overrides, root).dataset
    run_check(dataset)
    import_quietly()
    from tasks.download import download

    try:
        manifest = download(dataset)
    except AssertionError as error:  # From TFDS, which cannot write an empty split.
        if (found := NOTHING.search(str(error))) is None:
            raise
        raise UserError(
            f"dataset {name}: its builder gives no example of the split '{found[1]}', and TFDS writes no empty one. "
            "Mend the builder, or leave the split out of it"
        ) from None
    print(f"downloaded {manifest.name} {manifest.version}: {_counts(manifest.num_examples)}", file=sys.stderr)


def _print_prepared(prepared: records.PreparedDataset) -> None:
    sizes = {split: part.num_examples for split, part in prepared.splits.items()}
    print(f"prepared {prepared.name} {prepared.version}: {_counts(sizes)}", file=sys.stderr)
    if held := prepared.held_out:
        print(
            f"it has no test split: {held.num_examples:,} of its training examples, drawn with seed {held.seed}, are "
            "the test split from now on",
            file=sys.stderr,
        )


def _counts(splits: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in splits.items())


def run_train(recipe: str | None, overrides: Sequence[str]) -> None:
    """Train as a run of its own; write its record and its history."""
    root = config.project_root()
    folder = root / "metrics"
    folder.mkdir(exist_ok=True)
    settings, prepared = dvc_data.load(recipe, overrides)
    preconditions.check_devices(settings)
    with runs_of_the_project(root):
        training = pipeline.train_alone(settings, prepared, pipeline.Resumption())
    records.save(training, folder / "training.json")
    reports.history_table(training, folder / "history.csv")


def run_evaluate(recipe: str | None, overrides: Sequence[str]) -> None:
    """Evaluate what `train` trained; write its record, its tables and its pictures."""
    root = config.project_root()
    settings, prepared = dvc_data.load(recipe, overrides)
    training = records.load(TrainingResult, root / "metrics" / "training.json")
    with runs_of_the_project(root):
        _evaluate(settings, prepared, training, root)


def _evaluate(
    settings: config.Settings, prepared: records.PreparedDataset, training: TrainingResult, root: Path
) -> None:
    folder = root / "metrics"
    run = runs.find_run(training.run_id)
    runs.refuse_pruned(run)
    evaluation = client.evaluate(settings, prepared, training, run)
    records.save(evaluation, folder / "evaluation.json")
    reports.metrics_table(evaluation, folder / "test.json")
    reports.predictions_table(evaluation, folder / "predictions.csv")
    drawn = "confusion_matrix.png" if evaluation.confusion_matrix else "predictions.png"
    for picture, name in ((drawn, "predictions.png"), ("learning_curve.png", "learning_curve.png")):
        shutil.copyfile(root / run.folder / "report" / picture, folder / name)


@contextlib.contextmanager
def runs_of_the_project(root: Path) -> Iterator[None]:
    """Within the block, let mlruns/ be the project's where DVC works in a copy of the project.

    `dvc exp run --temp` and the workers of DVC's queue make a copy in .dvc/tmp/exps/, and remove it at the end. What a
    run leaves would go with it: its checkpoints, its models, and the MLflow store that knows of them.
    """
    project = next((copy.parents[3] for copy in (root, *root.parents) if copy.parts[-4:-1] == COPIES), None)
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
        # As git knows it: DVC commits what changed in the copy as the experiment.
        own.unlink(missing_ok=True)
        aside.rename(own)
