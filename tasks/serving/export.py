"""Exports a trained model to another format, loads the files back and compares their outputs with Keras."""

import contextlib
import itertools
import json
import logging
import math
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tasks import config, records
from tasks.data import prepared_data
from tasks.input import sources
from tasks.modeling import metrics, models
from tasks.records import ExportedModel, PreparedDataset, Run, TensorShape
from tasks.runs import lineage, outcome
from tasks.serving import formats
from tasks.system import files, temporary
from tasks.system.errors import StratagemError, UserError, last_line
from tasks.tracking import trained_models

MANIFEST = trained_models.EXPORT_MANIFEST
PROGRAM = "predict.py"
MAX_DIFFERENCE = 1e-4
# The first 1,000 examples of the test split, or all if it has fewer.
BATCH_SIZE, MAX_BATCHES = 250, 4

log = logging.getLogger(__name__)


def export(
    settings: config.Settings,
    prepared: PreparedDataset,
    run: Run,
    format: str,
    checkpoint: str,
    folder: str | None,
) -> ExportedModel:
    """Write a run's model and a manifest into a new folder.

    If the folder already contains the same export, write nothing.

    Args:
        format: the name of a file in tasks/serving/formats/.
        checkpoint: which of the run's two models to export, ``latest`` or ``best``.
        folder: the absolute path of the new folder; None is a folder in the run's folder.

    Raises:
        UserError: the training has not finished; the model is missing, damaged, cannot be loaded or does not support
            the format; or the folder cannot be created.
        StratagemError: the outputs of the files differ from Keras', and the files were removed; or the disk is full. A
            format that rounds the weights may have other outputs: the manifest has their metrics.
    """
    exporter, training = formats.find_format(format), outcome.load_training(run)
    best = training.best_model, training.best_weights_digest, training.best_checkpoint
    final = training.final_model, training.weights_digest, training.checkpoint
    path, weights_digest, step_folder = best if checkpoint == "best" else final
    file = config.project_root() / path
    what = f"run {run.run_id} cannot be exported as {format}"
    if reason := exporter.refuses.get(policy := settings.train.dtype_policy):
        raise UserError(f"{what}: it was trained with train.dtype_policy = {policy}, and {reason}")
    target = Path(folder or config.project_root() / run.folder / "exports" / f"{format}-{Path(step_folder).name}")
    trained_models.verify(f"run {run.run_id}", file, file.with_name(trained_models.MANIFEST))
    model_digest = lineage.model_digest(file, weights_digest, settings.model.name)
    if (before := _find_export(target, format, run, model_digest)) is not None:
        log.info("%s already exists: nothing was written", target)
        return before
    model = _load(settings, file)
    prepared_data.verify(prepared)
    with _new_folder(target) as new:
        with _explaining(what, target):
            exporter.write(model, file, new)
        trained_models.copy_meaning(file, new)
        package = trained_models.copy_encoder(new)
        (new / PROGRAM).write_text(formats.program(exporter, package), encoding="utf-8")
        files_of_it = trained_models.digests(new)
        (new / MANIFEST).write_text(json.dumps({"files": files_of_it}), encoding="utf-8")
        with _explaining(what, target):
            examples = _examples(model, settings, prepared, None if exporter.rounds else MAX_BATCHES)
            _forget(package)
            shipped = runpy.run_path(str(new / PROGRAM))["load"](new)  # By the predict.py of the export.
            shutil.rmtree(new / package / "__pycache__", ignore_errors=True)
            labels, expected, found = _compare(shipped.compute, examples)
        # The scale of a regression's outputs depends on the unit.
        difference = float(np.abs(found - expected).max()) / (max(prepared.target.deviation, default=0) or 1.0)
        most = math.inf if exporter.rounds else MAX_DIFFERENCE
        if not math.isfinite(difference) or difference > most:
            raise StratagemError(
                f"{what}: among the first {len(labels):,} test examples, an output differs from Keras' by "
                f"{difference:.3g}, but at most {most:g} is allowed. The files were removed from {target}"
            )
        made = ExportedModel(
            format=format,
            run_id=run.run_id,
            dataset=training.dataset,
            checkpoint=step_folder,
            model_digest=model_digest,
            weights_digest=weights_digest,
            data_version=run.lineage.data_version,
            git_commit=run.lineage.git_commit,
            inputs=tuple(TensorShape(name=one.name, shape=one.shape, dtype=one.dtype) for one in model.inputs),
            # The names of outputs are omitted: Keras numbers them, and each format renames them.
            outputs=tuple(TensorShape(shape=one.shape, dtype=one.dtype) for one in model.outputs),
            num_examples=len(labels),
            max_difference=difference,
            metrics=_metrics(settings, prepared, labels, found) if exporter.rounds else None,
            keras_metrics=_metrics(settings, prepared, labels, expected) if exporter.rounds else None,
            files=files_of_it,
        )
        records.save(made, new / MANIFEST)
    return made.model_copy(update={"folder": str(target)})


def _forget(package: str) -> None:
    """Remove a package from Python's module cache, so that this export's copy is imported and not that of another
    folder, which may no longer exist."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def _load(settings: config.Settings, file: Path) -> Any:
    """Return the Keras model of a file, on TensorFlow whatever it was trained on."""
    models.find_build(settings.model.name)  # The module that registers the user's classes with Keras.
    models.set_precision(settings.train.dtype_policy)
    advice = (
        ". Classes and functions of your own must be registered, by @keras.saving.register_keras_serializable(), in "
        f"the module of model.name = '{settings.model.name}'"
    )
    return models.load("the run's model", file, advice, own_code=True)


def _find_export(target: Path, format: str, run: Run, model_digest: str) -> ExportedModel | None:
    """Return the manifest of a folder that already contains this export; None if the folder does not exist. Refuse a
    folder that contains anything else: an existing folder is never overwritten."""
    if not os.path.lexists(target):
        return None
    remedy = "Choose another folder: --to FOLDER; or remove it"
    try:
        found = records.load(ExportedModel, target / MANIFEST)
    except UserError:
        raise UserError(f"{target} already exists and is not an export. {remedy}") from None
    if (found.format, found.run_id, found.model_digest) != (format, run.run_id, model_digest):
        raise UserError(f"{target} already contains another model, of run {found.run_id} as {found.format}. {remedy}")
    if found.files != trained_models.digests(target):
        raise UserError(
            f"{target} already contains this export, but its files were changed, added or removed. {remedy}"
        )
    return found.model_copy(update={"folder": str(target)})


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder next to the target; at the end, flush its files and rename it. Remove it on failure."""
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.scratch(target.parent, ".export.") as scratch:
            temporary.note(scratch)  # If this process is killed, the next command removes it.
            new = scratch / target.name
            new.mkdir()
            yield new
            for path in new.rglob("*"):
                if path.is_file():
                    with path.open("rb+") as file:
                        files.flush(file)
            new.rename(target)
    except BaseException as error:
        for folder in missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            raise files.unwritable(target, error) from None
        raise


@contextlib.contextmanager
def _explaining(what: str, target: Path) -> Iterator[None]:
    """Turn any library's error into one message: the model does not support the format, or the disk is full."""
    try:
        yield
    except (StratagemError, MemoryError):
        raise
    except Exception as error:
        if full := files.find_full_disk(error, target):
            raise full from None
        raise UserError(f"{what} ({last_line(error)})") from error


def _examples(
    model: Any, settings: config.Settings, prepared: PreparedDataset, batches: int | None
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield batches of the test split, up to a number if it is given: inputs, labels, and Keras' outputs."""
    with contextlib.closing(sources.ordered_batches(settings, prepared, "test", BATCH_SIZE)) as test:
        for batch, labels, *_ in itertools.islice(test.arrays(), batches):
            try:
                expected = np.asarray(model.predict_on_batch(batch), np.float64)
            except ValueError as error:
                raise UserError(
                    f"{prepared.folder} does not fit the model ({last_line(error)}): prepare the data as they were "
                    "when it was trained"
                ) from error
            if not np.isfinite(expected).all():
                raise StratagemError(
                    "the model gives outputs that are not numbers: its training diverged. Train again with a lower "
                    "schedule.learning_rate"
                )
            yield batch, labels, expected


def _compare(exported: Callable[[Any], Any], examples: Iterable[tuple[Any, Any, Any]]) -> tuple[Any, Any, Any]:
    """Return the labels of the examples, and the outputs of Keras and of the files."""
    all_labels, all_expected, all_found = [], [], []
    for batch, labels, expected in examples:
        found = np.asarray(exported(batch), np.float64)
        if found.shape != expected.shape:
            raise StratagemError(f"its outputs have the shape {found.shape}, but Keras' have {expected.shape}")
        all_labels.append(labels)
        all_expected.append(expected)
        all_found.append(found)
    return np.concatenate(all_labels), np.concatenate(all_expected), np.concatenate(all_found)


def _metrics(settings: config.Settings, prepared: PreparedDataset, labels: Any, values: Any) -> dict[str, float]:
    """Return the task's metrics with the names of an evaluation."""
    measured = metrics.compute(prepared.target.task, labels, values, metrics.without_file(settings))
    return {f"test/{name}": value for name, value in measured.items()}
