"""A run that nobody trained: its records, its predictions and its data, for tests of what is made of them."""

import json
import shutil
from pathlib import Path

import numpy as np
from scipy import stats

from tasks import config, records
from tasks.evaluation import predictions
from tasks.modeling import metrics
from tasks.records import (
    ClassMetrics,
    Column,
    EvaluationResult,
    Feature,
    Lineage,
    Placement,
    PreparedDataset,
    PreparedSplit,
    RegisteredModel,
    Run,
    RunStatus,
    Target,
    TrainingResult,
    VariablePlacement,
)

CHECKOUT = Path(__file__).resolve().parents[2]
RUN_ID = "a" * 32
FOLDER = f"mlruns/runs/{RUN_ID}"
FEATURES = {
    "image": Feature(kind="image", shape=(6, 5, 3), dtype="uint8", mean=(100.0,) * 3, deviation=(50.0,) * 3),
    "numbers": Feature(
        kind="number", shape=(3,), dtype="float32", mean=(0.0,) * 3, deviation=(1.0,) * 3,
        columns=(Column(name="age", kind="number"), Column(name="day", kind="datetime", width=2)),
    ),
    "categories": Feature(
        kind="category", shape=(1,), dtype="int32", columns=(Column(name="town", kind="category"),),
        vocabulary="data/made/prepared/categories_vocabulary.json", vocabulary_sizes=(4,),
    ),
    "text": Feature(
        kind="text", shape=(4,), dtype="int32", columns=(Column(name="words", kind="text"),),
        vocabulary="data/made/prepared/text_vocabulary.json", vocabulary_sizes=(5,),
    ),
}  # fmt: skip
VOCABULARIES = {"categories": [["Bern", "Basel"]], "text": [["good", "bad", "film"]]}


def bootstrap(measure, labels, outputs, num_resamples=1000):
    """Return the 95% interval of a metric as scipy finds it: the two ends."""
    outputs = outputs.astype(np.float64)
    found = stats.bootstrap(
        (np.arange(len(labels)),), lambda rows: measure(labels[rows], outputs[rows]), vectorized=False,
        n_resamples=num_resamples, method="percentile", rng=1,
    )  # fmt: skip
    return tuple(found.confidence_interval)


def project(folder: Path) -> Path:
    """Make a folder the project's; the caller goes there."""
    (folder / ".dvc").mkdir(parents=True)
    shutil.copyfile(CHECKOUT / "params.yaml", folder / "params.yaml")
    return folder


def arrays(count: int, names: tuple[str, ...] = tuple(FEATURES), seed: int = 0) -> dict[str, np.ndarray]:
    """Return the features of so many test examples."""
    random = np.random.default_rng(seed)
    made = {
        "image": random.integers(0, 256, (count, 6, 5, 3)).astype(np.uint8),
        "numbers": random.normal(size=(count, 3)).astype(np.float32),
        "categories": random.integers(0, 4, (count, 1)).astype(np.int32),
        "text": random.integers(0, 5, (count, 4)).astype(np.int32),
    }
    return {name: made[name] for name in names}


def run(
    labels: np.ndarray,
    outputs: np.ndarray,
    features: dict[str, np.ndarray] | None = None,
    class_names: tuple[str, ...] | None = None,
    **settings: object,
) -> Run:
    """Write the records of a run in the current folder, a project; what its labels are says the task."""
    root = config.project_root()
    task = "classification" if labels.ndim == 1 else "multilabel" if labels.dtype == np.uint8 else "regression"
    num = outputs.shape[1]
    names = () if task == "regression" else class_names or tuple(f"class {place}" for place in range(num))
    columns = tuple(f"number {place}" for place in range(num)) if task == "regression" else ()
    target = Target(task=task, num_outputs=num, class_names=names, columns=columns)
    prepared = _prepared(root, target, labels, features if features is not None else arrays(len(labels)))
    given = config.load(None, {"dataset.name": "made", "train.epochs": 3, **settings}).to_json()
    lineage = Lineage(git_commit="c" * 40, git_dirty=False, code_digest="d", settings_digest="s", data_version="v" * 32)
    made = Run(run_id=RUN_ID, experiment="made", name="made-up", folder=FOLDER, lineage=lineage, settings=given)
    folder = root / FOLDER
    records.save(made, folder / "records" / "run.json")
    records.save(_training(root), folder / "records" / "training.json")
    records.save(_evaluation(root, prepared, labels, outputs), folder / "records" / "evaluation.json")
    registered = RegisteredModel(
        run_id=RUN_ID,
        model_uri="models:/m",
        model_name="made-mlp",
        model_version="7",
        aliases=("challenger",),
        reason=None,
    )
    records.save(registered, folder / "records" / "registration.json")
    records.save(RunStatus(status="RUNNING", reason=None, at="now"), folder / "status.json")
    return made


def _prepared(root: Path, target: Target, labels: np.ndarray, features: dict[str, np.ndarray]) -> PreparedDataset:
    folder = "data/made/prepared"
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, array in {**features, "label": labels}.items():
        np.save(root / folder / f"test_{name}s.npy", array)
    for name, vocabulary in VOCABULARIES.items():
        (root / folder / f"{name}_vocabulary.json").write_text(json.dumps(vocabulary))
    paths = {name: f"{folder}/test_{name}s.npy" for name in features}
    counts = tuple(np.bincount(labels, minlength=target.num_outputs).tolist()) if labels.ndim == 1 else ()
    split = PreparedSplit(
        num_examples=len(labels), features=paths, labels=f"{folder}/test_labels.npy", class_counts=counts,
        sha256={path: path for path in (*paths.values(), f"{folder}/test_labels.npy")}, num_missing={"age": 3},
    )  # fmt: skip
    prepared = PreparedDataset(
        name="made", kind="table", version="1", folder=folder, features={name: FEATURES[name] for name in features},
        target=target, splits={"test": split, "train": split}, licence="CC0",
    )  # fmt: skip
    records.save(prepared, root / folder / "manifest.json")
    return prepared


def _training(root: Path) -> TrainingResult:
    history = {
        "train/loss": (2.0, float("nan"), 0.5), "validation/loss": (1.5, 1.0, 0.75),
        "train/learning_rate": (0.1, 0.1, 0.01),
    }  # fmt: skip
    training = TrainingResult(
        run_id=RUN_ID, dataset="made", strategy="one_device", loop="fit", num_replicas=1, devices=("/device:CPU:0",),
        global_batch_size=8, epochs=3, steps=30, num_parameters=46, examples_per_second=1234.5, setup_seconds=1.25,
        first_call_seconds=2.5, epoch_seconds=(1.0, 3.0, 2.0), history=history, stopped_early=False,
        checkpoints=f"{FOLDER}/checkpoints", checkpoint=f"{FOLDER}/checkpoints/30",
        best_checkpoint=f"{FOLDER}/checkpoints/20", final_model=f"{FOLDER}/models/final.keras",
        best_model=f"{FOLDER}/models/best.keras", weights_digest="e" * 64, best_weights_digest="f" * 64,
        optimizer="SGD",
    )  # fmt: skip
    hidden, logits = {"hidden/kernel": (4, 5), "hidden/bias": (5,)}, {"logits/kernel": (5, 3), "logits/bias": (6,)}
    where = {"dtype": "float32", "devices": ("cpu",), "sharding": "whole", "bytes_per_device": 4}
    variables = [
        VariablePlacement(path=path, shape=shape, **where)
        for path, shape in {**hidden, "seed_generator/seed_generator_state": (2,), **logits, "adam/x": (20,)}.items()
    ]
    placement = Placement(
        strategy="one_device", backend="tensorflow", num_replicas=1, num_workers=1, devices=("cpu",),
        collectives="none", variables=tuple(variables),
    )  # fmt: skip
    records.save(placement, root / FOLDER / "records" / "placement.json")
    return training


def _evaluation(root: Path, prepared: PreparedDataset, labels: np.ndarray, outputs: np.ndarray) -> EvaluationResult:
    target, values = prepared.target, outputs.astype(np.float64)
    classes: tuple[ClassMetrics, ...] = ()
    if target.class_names:
        counts = metrics.count_classes(labels, values)
        columns = zip(target.class_names, counts.precision, counts.recall, counts.f1, counts.support, strict=True)
        classes = tuple(
            ClassMetrics(name=name, precision=float(p), recall=float(r), f1=float(f), support=int(n))
            for name, p, r, f, n in columns
        )
    confusion = metrics.confusion(labels, values).tolist() if target.task == "classification" else []
    kept = f"{FOLDER}/evaluation/30.npz"
    measured = metrics.compute(target.task, labels, values)
    return EvaluationResult(
        run_id=RUN_ID, checkpoint=f"{FOLDER}/checkpoints/30", step=30, num_examples=len(labels),
        metrics={"test/loss": 1.5, **{f"test/{name}": value for name, value in measured.items()}}, classes=classes,
        confusion_matrix=tuple(map(tuple, confusion)), strategy="one_device", lower_is_better=(), outputs=kept,
        outputs_sha256=predictions.save(root / kept, labels, outputs), test_rows=predictions.test_rows(prepared),
    )  # fmt: skip


def classification(count: int = 300, num_classes: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return labels and logits, of which about two in three are right."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, num_classes, count)
    logits = random.normal(size=(count, num_classes)).astype(np.float32)
    logits[np.arange(count), labels] += 1.2
    return labels, logits
