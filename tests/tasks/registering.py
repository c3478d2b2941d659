"""What the tests of the registry register: a run that has trained, with a model and what it gave for five test rows."""

from pathlib import Path

import keras
import numpy as np

from tasks import config, records, register
from tasks.evaluation import predictions
from tasks.runs import lineage
from tasks.serving import loaded_back
from tasks.tracking import trained_models
from tasks.tracking.lifecycle import end_run, start_run
from tasks.tracking.metrics import log_metrics

IMAGES = np.random.default_rng(1).integers(0, 256, (5, 4, 4, 1), np.uint8)
VERSION = "0123456789abcdef0123456789abcdef"
LABELS = np.array([0, 1, 1, 2, 2])


def save_model(path: Path) -> str:
    """A model as training exports it: raw pixels in, logits out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scaled = keras.layers.Rescaling(1 / 255)(inputs := keras.Input((4, 4, 1)))
    keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(scaled))).save(path)
    return path.as_posix()


class Trained:
    """A run that has trained for 20 steps and was best at step 10."""

    def __init__(self, *overrides: str) -> None:
        self.settings = config.load(overrides=["register.minimum=0.9", *overrides])
        split = records.PreparedSplit(
            num_examples=5, features={"image": "data/digits/prepared/test_images.npy"}, labels="l.npy", sha256={},
            class_counts=(1, 2, 2),
        )  # fmt: skip
        self.prepared = records.PreparedDataset(
            name="digits", kind="tfds", version="1.0.0", tfds_version="4.9.10",
            folder="data/digits/prepared", raw_folder="r",
            features={"image": records.Feature(kind="image", shape=(4, 4, 1), dtype="uint8")},
            target=records.Target(task="classification", num_outputs=3, class_names=("a", "b", "c")),
            splits={"train": split, "test": split}, sources=(), licence=None,
        )  # fmt: skip
        Path(split.features["image"]).parent.mkdir(parents=True, exist_ok=True)
        np.save(split.features["image"], IMAGES)
        self.run = start_run(self.settings, self.prepared, lineage.collect(self.settings, VERSION))
        folder = self.run.folder
        self.training = records.TrainingResult(
            run_id=self.run.run_id, dataset="digits", strategy="one_device", loop="fit", num_replicas=1,
            devices=("/device:CPU:0",), global_batch_size=32, epochs=2, steps=20, num_parameters=51,
            examples_per_second=None, setup_seconds=1.0, first_call_seconds=None, epoch_seconds=(), history={},
            stopped_early=False, checkpoints=f"{folder}/checkpoints",
            checkpoint=f"{folder}/checkpoints/20", best_checkpoint=f"{folder}/checkpoints/10",
            final_model=save_model(Path(folder, "models", "final.keras")),
            best_model=save_model(Path(folder, "models", "best.keras")), weights_digest="f" * 64,
            best_weights_digest="e" * 64, optimizer="SGD",
        )  # fmt: skip
        self.sign()

    def sign(self) -> None:
        """Write what belongs to the .keras files."""
        folder = Path(self.run.folder, "models")
        trained_models.complete(folder, self.prepared, str(self.settings.model.name))

    def register(
        self, step: int = 20, accuracy: float = 0.95, loss: float = 0.2, right: int = 5, force: bool = False,
        recall: float = 1.0, apart: loaded_back.Loader | None = None,
        rows_of: records.PreparedDataset | None = None, outputs: np.ndarray | None = None,
    ) -> records.RegisteredModel:  # fmt: skip
        """Register what gives the right class of so many test rows, or ``outputs``; ``apart`` loads it back."""
        if outputs is None:
            outputs = np.eye(3, dtype=np.float32)[(LABELS + (np.arange(5) >= right)) % 3]
        kept = f"{self.run.folder}/evaluation/{step}.npz"
        evaluation = records.EvaluationResult(
            run_id=self.run.run_id, checkpoint=f"{self.run.folder}/checkpoints/{step}", step=step, num_examples=5,
            metrics={"test/accuracy": accuracy, "test/loss": loss},
            classes=(records.ClassMetrics(name="b", precision=1.0, recall=recall, f1=1.0, support=2),),
            confusion_matrix=(), strategy="one_device", lower_is_better=("test/loss",), outputs=kept,
            outputs_sha256=predictions.save(Path(kept), LABELS, outputs),
            test_rows=predictions.test_rows(rows_of or self.prepared),
        )  # fmt: skip
        log_metrics(self.run, evaluation.metrics)  # As the stage before.

        def as_evaluated(what: str, features: object, rows: list[int] | None = None, **arguments: object) -> np.ndarray:
            assert what == "load_back"
            return outputs[rows]

        load = apart or as_evaluated
        result = register.register(self.settings, self.run, self.prepared, self.training, evaluation, load, force)
        end_run(self.run, "FINISHED")
        return result


def of_nothing(what: str, features: object, rows: object = None, **arguments: object) -> np.ndarray:
    """Load a model back whose data are not here."""
    assert (what, features, rows) == ("score", {}, None)
    return np.zeros([1, 3])


def roll_back(name: str, apart: loaded_back.Loader = of_nothing) -> records.RolledBack:
    """Move @champion back; ``apart`` loads the model back."""
    return register.rollback(name, apart)
