"""Export: a trained model as files of another format, which were loaded back and compared with Keras."""

import contextlib
import itertools
import logging
import math
import os
import runpy
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
from filelock import FileLock, Timeout

from tasks import config, records, runs
from tasks.input import sources
from tasks.modeling import metrics, models
from tasks.records import ExportedModel, PreparedDataset, Run, TensorShape, TrainingResult
from tasks.runs import lineage
from tasks.serving import formats
from tasks.system import files
from tasks.system.errors import StratagemError, UserError, cut
from tasks.tracking import trained_models
from tasks.training.model import weights_digest

MANIFEST = "export.json"
PROGRAM = "predict.py"
SCRATCH = ".export."
MAX_DIFFERENCE = 1e-4
# The first 1,000 examples of the test split, or all it has.
BATCH_SIZE, MAX_BATCHES = 250, 4
REMEDY = "Restore it from a backup, export the run's other model with --checkpoint, or train again with --fresh"

log = logging.getLogger(__name__)


def export(
    settings: config.Settings,
    prepared: PreparedDataset,
    run: Run,
    format: str,
    checkpoint: str,
    folder: str | None,
) -> ExportedModel:
    """Write a run's model into a folder that is not there yet, with a manifest beside the files.

    Where the folder holds the same export already, nothing is written.

    Args:
        settings: ``model``, ``input``, ``train.seed`` and ``train.dtype_policy`` are read.
        prepared: the data whose test split is compared.
        run: whose model it is.
        format: a file of tasks/serving/formats/.
        checkpoint: ``latest`` or ``best``: which of the run's two models.
        folder: where to, absolute; None is a folder in the run's own.

    Raises:
        UserError: the run was not trained to its end, its model is missing or damaged, cannot be loaded or has no such
            format; or the folder cannot be made.
        StratagemError: what was written gives other outputs than Keras, and was removed; or the disk is full. A format
            that rounds the weights may give others: how good they are is in the manifest.
    """
    exporter, training = formats.find_format(format), runs.load_training(run)
    chosen = _choose(training, checkpoint)
    what = f"run {run.run_id} cannot be exported as {format}"
    if reason := exporter.refuses.get(policy := settings.train.dtype_policy):
        raise UserError(f"{what}: it was trained with train.dtype_policy = {policy}, and {reason}")
    target = Path(folder or config.project_root() / run.folder / "exports" / f"{format}-{chosen.step}")
    _check_whole(chosen.file)
    model_digest = lineage.model_digest(chosen.file, chosen.weights_digest, settings.model.name)
    if (before := _find_export(target, format, run, model_digest)) is not None:
        log.info("%s is there already: nothing was written", target)
        return before
    model = _load(settings, chosen)
    sources.verify(settings.input, prepared)
    with _new_folder(target) as new:
        with _explaining(what, target):
            exporter.write(model, chosen.file, new)
        trained_models.write_meaning(new, prepared)
        package = trained_models.copy_encoder(new)
        (new / PROGRAM).write_text(formats.program(exporter, package), encoding="utf-8")
        with _explaining(what, target):
            examples = _examples(model, settings, prepared, None if exporter.rounds else MAX_BATCHES)
            shipped = runpy.run_path(str(new / PROGRAM))["load"](new)  # By the file that goes with it.
            shutil.rmtree(new / package / "__pycache__", ignore_errors=True)
            compared = _compare(shipped.compute, examples)
        # A regression's numbers are as large as its unit makes them.
        difference = compared.max_difference / (max(prepared.target.deviation, default=0) or 1.0)
        most = math.inf if exporter.rounds else MAX_DIFFERENCE
        if (wrong := _wrong_outputs(difference, most, len(compared.labels))) is not None:
            raise StratagemError(f"{what}: {wrong}. Nothing was left in {target}")
        made = ExportedModel(
            format=format,
            run_id=run.run_id,
            dataset=training.dataset,
            checkpoint=chosen.checkpoint,
            model_digest=model_digest,
            weights_digest=chosen.weights_digest,
            data_version=run.lineage.data_version,
            git_commit=run.lineage.git_commit,
            inputs=tuple(TensorShape(name=one.name, shape=one.shape, dtype=one.dtype) for one in model.inputs),
            # Keras numbers the names of outputs, and each format has names of its own for them.
            outputs=tuple(TensorShape(shape=one.shape, dtype=one.dtype) for one in model.outputs),
            num_examples=len(compared.labels),
            max_difference=difference,
            metrics=_metrics(settings, prepared, compared.labels, compared.found) if exporter.rounds else None,
            keras_metrics=_metrics(settings, prepared, compared.labels, compared.expected) if exporter.rounds else None,
            files=_digests(new),
        )
        records.save(made, new / MANIFEST)
    return made.model_copy(update={"folder": str(target)})


def _wrong_outputs(difference: float, most: float, num_examples: int) -> str | None:
    """Return what is wrong with the outputs of files that differ so much from Keras', None where nothing is."""
    if not math.isfinite(difference):
        return "its files give outputs that are not numbers"
    if difference > most:
        among = f"among the first {num_examples:,} test examples"
        return f"an output differs from Keras' by {difference:.3g} {among}, and {most:g} is allowed"
    return None


@dataclass(frozen=True)
class _Chosen:
    """One of the two models that a training leaves."""

    file: Path
    weights_digest: str
    checkpoint: str

    @property
    def step(self) -> str:
        return Path(self.checkpoint).name


def _choose(training: TrainingResult, checkpoint: str) -> _Chosen:
    root = config.project_root()
    if checkpoint == "best":
        return _Chosen(root / training.best_model, training.best_weights_digest, training.best_checkpoint)
    return _Chosen(root / training.final_model, training.weights_digest, training.checkpoint)


def _check_whole(keras_file: Path) -> None:
    """Refuse a .keras file that is not there, or of which a byte was lost."""
    try:
        with zipfile.ZipFile(keras_file) as archive:
            broken = archive.testzip()
    except FileNotFoundError:
        raise UserError(f"{keras_file} is missing. {REMEDY}") from None
    except Exception as error:  # zipfile raises many kinds for a byte that is another one.
        raise UserError(f"{keras_file} is damaged ({error}). {REMEDY}") from None
    if broken is not None:
        raise UserError(f"{keras_file} is damaged ({broken} in it has another checksum). {REMEDY}")


def _load(settings: config.Settings, chosen: _Chosen) -> Any:
    """Return the Keras model of a file, on TensorFlow whatever it was trained on."""
    models.find_build(
        settings.model.name
    )  # Keras knows a class of the user's once the module that registers it is imported.
    models.set_precision(settings.train.dtype_policy)
    try:
        model = keras.models.load_model(chosen.file, compile=False)
    except Exception as error:
        raise UserError(
            f"{chosen.file}: Keras cannot load it ({_cause(error)}). Classes and functions of your own must be "
            f"registered, by @keras.saving.register_keras_serializable(), in the module of model.name = "
            f"'{settings.model.name}'"
        ) from error
    if weights_digest(model) != chosen.weights_digest:
        raise UserError(f"{chosen.file} has other weights than the run's record says. {REMEDY}")
    return model


def _find_export(target: Path, format: str, run: Run, model_digest: str) -> ExportedModel | None:
    """Return the manifest of a folder that holds this export already; None where there is no such folder.

    Raises:
        UserError: the folder holds anything else. It is never written to, so nothing in it can be lost.
    """
    if not os.path.lexists(target):
        return None
    remedy = "Give another folder: --to FOLDER; or remove that one"
    try:
        found = records.load(ExportedModel, target / MANIFEST)
    except UserError:
        raise UserError(f"{target} is there already, and no export made it. {remedy}") from None
    if (found.format, found.run_id, found.model_digest) != (format, run.run_id, model_digest):
        raise UserError(f"{target} holds another model already, of run {found.run_id} as {found.format}. {remedy}")
    if found.files != _digests(target):
        raise UserError(f"{target} holds this export already, but files in it were changed, added or removed. {remedy}")
    return found.model_copy(update={"folder": str(target)})


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Give a new folder beside the target; when the block ends, flush its files and rename it. It goes if one fails."""
    missing = [folder for folder in target.parents if not folder.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target.parent)
        with files.scratch(target.parent, SCRATCH) as scratch, FileLock(scratch / files.MARK):
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


def _remove_leftovers(folder: Path) -> None:
    """Remove what exports left that were killed: nobody holds the lock of their scratch folders."""
    for left in folder.glob(f"{SCRATCH}*"):
        if (left / files.MARK).is_file():
            with contextlib.suppress(Timeout, OSError), FileLock(left / files.MARK, blocking=False):
                files.remove_scratch([left], folder)


@contextlib.contextmanager
def _explaining(what: str, target: Path) -> Iterator[None]:
    """Say in one message why a model has no such format, or that the disk is full; whatever library says it."""
    try:
        yield
    except (StratagemError, MemoryError):
        raise
    except Exception as error:
        if full := files.find_full_disk(error, target):
            raise full from None
        raise UserError(f"{what} ({_cause(error)})") from error


def _examples(
    model: Any, settings: config.Settings, prepared: PreparedDataset, batches: int | None
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield batches of the test split, as many as there are or as are given: what the model takes, the labels, and
    what Keras gives.

    Raises:
        UserError: the data are of another shape than those that the model was trained on.
        StratagemError: the outputs are not numbers.
    """
    with contextlib.closing(sources.ordered_batches(settings, prepared, "test", BATCH_SIZE)) as test:
        for batch, labels, *_ in itertools.islice(test.arrays(), batches):
            try:
                expected = np.asarray(model.predict_on_batch(batch), np.float64)
            except ValueError as error:
                raise UserError(
                    f"{prepared.folder} does not fit the model ({_cause(error)}): prepare the data as they were when "
                    "it was trained"
                ) from error
            if not np.isfinite(expected).all():
                raise StratagemError(
                    "the model gives outputs that are not numbers: its training diverged. Train again with a lower "
                    "schedule.learning_rate"
                )
            yield batch, labels, expected


class _Compared(NamedTuple):
    """What Keras and an export's files give for the same examples."""

    labels: Any
    expected: Any
    found: Any

    @property
    def max_difference(self) -> float:
        return float(np.abs(self.found - self.expected).max())  # Of one that is not a number, no number.


def _compare(exported: Callable[[Any], Any], examples: Iterable[tuple[Any, Any, Any]]) -> _Compared:
    """Return what the files give for the examples, beside what Keras does.

    Raises:
        StratagemError: outputs have another shape.
    """
    all_labels, all_expected, all_found = [], [], []
    for batch, labels, expected in examples:
        found = np.asarray(exported(batch), np.float64)
        if found.shape != expected.shape:
            raise StratagemError(f"the files give outputs of shape {found.shape}, and Keras of {expected.shape}")
        all_labels.append(labels)
        all_expected.append(expected)
        all_found.append(found)
    return _Compared(*map(np.concatenate, (all_labels, all_expected, all_found)))


def _metrics(settings: config.Settings, prepared: PreparedDataset, labels: Any, values: Any) -> dict[str, float]:
    """Return the task's metrics as an evaluation names them."""
    measured = metrics.compute(prepared.target.task, labels, values, metrics.without_file(settings))
    return {f"test/{name}": value for name, value in measured.items()}


def _digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file below a folder, but for the manifest and Python's copies of what it imported."""

    def is_kept(path: Path) -> bool:
        source = path.parent.with_name(f"{path.name.partition('.')[0]}.py")
        return path.parent.name == "__pycache__" and path.suffix == ".pyc" and source.is_file()

    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): files.digest(path) for path in paths if not is_kept(path)}


def _cause(error: Exception) -> str:
    """Return what went wrong in one line: TensorFlow and Keras put the cause last, after the user code."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {cut(lines[-1].strip(), 300)}"
