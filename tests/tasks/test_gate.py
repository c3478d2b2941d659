"""The rule by which a model becomes the champion, on what models give: by chance, by a real gain, by slices."""

import re
from pathlib import Path

import numpy as np
import pytest

from tasks import config
from tasks.evaluation import gate
from tasks.evaluation.predictions import Predictions
from tasks.modeling import metrics
from tasks.records import ClassMetrics, EvaluationResult, Feature, PreparedDataset, Target
from tasks.reports import material, sections
from tasks.system.errors import UserError
from tests.tasks import made_up

CLASSES = Target.of_classes("0123456789")
NUMBERS = Target(task="regression", num_outputs=1, mean=(0.0,), deviation=(1.0,))
SEVERAL = Target(task="multilabel", num_outputs=4, class_names=("a", "b", "c", "d"))
SIMULATIONS = 200


def prepared(target: Target) -> PreparedDataset:
    feature = Feature(kind="image", shape=(4, 4, 1), dtype="uint8")
    return PreparedDataset(
        name="any", kind="arrays", version="1", folder="f", features={"image": feature}, target=target, splits={}
    )


def evaluation(**recalls: float) -> EvaluationResult:
    classes = tuple(ClassMetrics(name=name, precision=1, recall=r, f1=1, support=40) for name, r in recalls.items())
    return EvaluationResult(
        run_id="r", checkpoint="c", step=1, num_examples=1, metrics={}, classes=classes, confusion_matrix=(),
        strategy="one_device", lower_is_better=(), outputs="mlruns/runs/r/evaluation/1.npz", outputs_sha256="",
        test_rows="",
    )  # fmt: skip


def load(*overrides: str) -> config.Settings:
    return config.load(None, overrides, Path(__file__).parents[2])


def guesses(generator: np.random.Generator, labels: np.ndarray, accuracy: float) -> np.ndarray:
    """Logits that are right for such a share, by chance."""
    wrong = (labels + generator.integers(1, 10, len(labels))) % 10
    taken = np.where(generator.random(len(labels)) < accuracy, labels, wrong)
    return np.eye(10, dtype=np.float32)[taken]


def judged(settings: config.Settings, target: Target, labels: np.ndarray, before: np.ndarray, after: np.ndarray):
    champion = gate.Champion("7", Predictions(labels, before))
    return gate.judge(settings, prepared(target), evaluation(), Predictions(labels, after), champion)


def of_classes(seed: int, before: float, after: float) -> tuple[np.ndarray, ...]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, 500)
    return labels, guesses(generator, labels, before), guesses(generator, labels, after)


def of_numbers(seed: int, before: float, after: float) -> tuple[np.ndarray, ...]:
    """What is wrong by the normal distribution, the more the less it is worth."""
    generator = np.random.default_rng(seed)
    labels = generator.normal(size=(500, 1)).astype(np.float32)
    return labels, *(labels + generator.normal(0, 2 - one, (500, 1)).astype(np.float32) for one in (before, after))


@pytest.mark.in_ci(0)
@pytest.mark.parametrize(
    ("metric", "target", "made"),
    [
        pytest.param("accuracy", CLASSES, of_classes, id="accuracy"),
        pytest.param("loss", CLASSES, of_classes, id="loss"),
        pytest.param("mae", NUMBERS, of_numbers, id="mae", marks=pytest.mark.slow),
        pytest.param("macro_f1", CLASSES, of_classes, id="macro_f1", marks=pytest.mark.exhaustive),
    ],
)
def test_noise_is_promoted_no_more_often_than_is_said_and_a_real_gain_is(metric: str, target: Target, made) -> None:
    """Two models that are equally good differ on a test split by chance; 1 in 20 may pass."""
    settings = load(f"register.metric=test/{metric}")
    promoted = [judged(settings, target, *made(seed, 0.93, 0.93)).promoted for seed in range(SIMULATIONS)]
    assert sum(promoted) <= SIMULATIONS * (1 - settings.register_.confidence)
    assert all(judged(settings, target, *made(seed, 0.6, 0.97)).promoted for seed in range(10))


def test_the_sentence_has_the_figures() -> None:
    labels, before, after = of_classes(0, 0.90, 0.97)
    found = judged(load(), CLASSES, labels, before, after)
    right = [float((outputs.argmax(1) == labels).mean()) for outputs in (before, after)]
    assert (found.champion, found.candidate) == tuple(right)
    assert found.difference == pytest.approx(right[1] - right[0])
    assert found.interval[0] < found.difference < found.interval[1]
    assert (found.test, found.num_examples, found.against, found.promoted) == ("McNemar", 500, "7", True)
    assert found.told == f"this version: {found.reason}"
    assert f"test/accuracy {right[1]:.4f} against {right[0]:.4f} of version 7 is better by +0." in found.reason
    assert f"McNemar p = {found.p_value:.2g}, 500 test rows)" in found.reason


@pytest.mark.parametrize(
    ("overrides", "accuracies", "reason"),
    [
        ([], (0.97, 0.90), ": it is no better"),
        ([], (0.90, 0.95), "): this could be chance: p must be at most 0.05 (register.confidence = 0.95)"),
        (["register.confidence=0.999999999999"], (0.92, 0.96), "this could be chance: p must be at most 1e-12"),
        (["register.min_improvement=0.2"], (0.90, 0.97), ": register.min_improvement = 0.2 is not reached"),
    ],
)
def test_why_a_model_is_not_the_champion(overrides: list[str], accuracies: tuple[float, float], reason: str) -> None:
    found = judged(load(*overrides), CLASSES, *of_classes(0, *accuracies))
    assert not found.promoted
    assert reason in found.reason
    assert f" {'is better' if found.difference > 0 else 'differs'} by {found.difference:+.4f} (" in found.reason
    assert found.told.startswith("version 7: test/accuracy 0.")
    by_force = gate.forced(found)
    assert (by_force.promoted, by_force.forced) == (True, True)
    assert by_force.reason == f"--force, against the evidence: {found.reason}"


def test_a_gain_that_is_as_large_as_is_asked_for_is_enough() -> None:
    labels = np.arange(100) % 10
    right = np.eye(10, dtype=np.float32)[labels]
    before, after = right.copy(), right.copy()
    before[:20] = np.roll(before[:20], 1, axis=1)
    after[:10] = np.roll(after[:10], 1, axis=1)
    assert judged(load("register.min_improvement=0.1"), CLASSES, labels, before, after).promoted, "0.9 - 0.8"


def test_a_slice_below_its_floor() -> None:
    settings = load("register.floors={3: 0.8, 5: 0.9}")
    labels, before, after = of_classes(0, 0.90, 0.97)
    arguments = settings, prepared(CLASSES)
    champion = gate.Champion("7", Predictions(labels, before))
    for recalls, reason in (
        ({"3": 0.8, "5": 0.9, "9": 0.1}, None),
        ({"3": 0.79, "5": 0.9}, "register.floors: '3' has a recall of 0.7900 among 40 examples and needs 0.8"),
        (
            {"3": 0.7, "5": 0.8},
            "among 40 examples and needs 0.8; '5' has a recall of 0.8000 among 40 examples and needs",
        ),
    ):
        for of in (champion, None):
            found = gate.judge(*arguments, evaluation(**recalls), Predictions(labels, after), of)
            assert found.promoted == (reason is None)
            assert (reason or "") in found.reason


@pytest.fixture
def towns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[PreparedDataset, Predictions]:
    """Data of the report's tests: 200 rows, five of them without a town, and a model that is wrong for Basel's."""
    monkeypatch.chdir(made_up.project(tmp_path / "project"))
    labels = np.arange(200) % 2
    outputs = np.eye(2, dtype=np.float32)[labels]
    features = made_up.arrays(200)
    features["categories"][:, 0] = np.where(np.arange(200) < 5, 0, np.where(np.arange(200) < 45, 3, 2))
    outputs[5:25] = outputs[5:25, ::-1]
    run = made_up.run(labels, outputs, features)
    known = material.load(run)
    assert known.prepared is not None
    assert "town: Basel" in str(sections.by_slice(known)), "the gate takes the names that the report shows"
    return known.prepared, known.predicted


@pytest.mark.parametrize(
    ("floors", "reason"),
    [
        ("'town: Bern': 1", None),
        ("'town: Basel': 0.5", None),
        (
            "'town: Basel': 0.51",
            "register.floors: 'town: Basel' has an accuracy of 0.5000 among 40 examples and needs 0.51",
        ),
        ("'class: class 0': 0.91", "register.floors: 'class: class 0' has an accuracy of 0.9000 among 100 examples"),
        (
            "'class 0': 0.95, 'town: Basel': 0.6",
            "register.floors: 'class 0' has a recall of 0.9000 among 40 examples and needs 0.95; 'town: Basel' has an "
            "accuracy of 0.5000 among 40 examples and needs 0.6",
        ),
    ],
)
def test_any_slice_of_the_report_may_have_a_floor(towns, floors: str, reason: str | None) -> None:
    data, given = towns
    settings = load(f"register.floors={{{floors}}}")
    gate.check(settings, data)
    found = gate.judge(settings, data, evaluation(**{"class 0": 0.9}), given, None)
    assert found.promoted == (reason is None)
    assert (reason or "") in found.reason


@pytest.mark.parametrize(
    ("floors", "said"),
    [
        (
            "'town: Basle': 0.8",
            ["unknown slice in register.floors 'town: Basle': did you mean 'town: Basel'?", "'town: Bern'", "report"],
        ),
        ("'town: missing': 0.8", ["register.floors = 'town: missing': the slice has 5 test examples", "needs 10"]),
        ("'clas 0': 0.8", ["unknown class in register.floors 'clas 0': did you mean 'class 0'?"]),
    ],
)
def test_a_floor_of_no_slice_is_refused_before_anything_is_trained(towns, floors: str, said: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        gate.check(load(f"register.floors={{{floors}}}"), towns[0])
    for text in said:
        assert text in str(refused.value)


def of_towns(monkeypatch: pytest.MonkeyPatch, folder: Path, labels: np.ndarray, outputs: np.ndarray):
    """Data whose first 40 test rows are Basel's and whose others are Bern's, and what a model gives for them."""
    monkeypatch.chdir(made_up.project(folder / "project"))
    features = made_up.arrays(len(labels), ("categories",))
    features["categories"][:, 0] = np.where(np.arange(len(labels)) < 40, 3, 2)
    known = material.load(made_up.run(labels, outputs, features))
    assert known.prepared is not None
    return known.prepared, known.predicted


@pytest.mark.parametrize(
    ("ceilings", "reason"),
    [
        ("'town: Bern': 1", None),
        ("'town: Basel': 3", None),
        (
            "'town: Basel': 2.5, 'town: Bern': 0.25",
            "register.ceilings: 'town: Bern' has a mean absolute error of 1 among 160 examples and may have at most "
            "0.25; 'town: Basel' has a mean absolute error of 3 among 40 examples and may have at most 2.5",
        ),
        ("'target: lowest quarter': 0.1", "register.ceilings: 'target: lowest quarter' has a mean absolute error of"),
    ],
)
def test_a_slice_of_a_regression_may_have_a_ceiling(monkeypatch, tmp_path, ceilings: str, reason: str | None) -> None:
    labels = np.linspace(0, 50, 200, dtype=np.float32)[:, None]
    outputs = labels + np.where(np.arange(200) < 40, 3, -1)[:, None].astype(np.float32)
    data, given = of_towns(monkeypatch, tmp_path, labels, outputs)
    settings = load(f"register.ceilings={{{ceilings}}}", "register.metric=test/mae")
    gate.check(settings, data)
    found = gate.judge(settings, data, evaluation(), given, None)
    assert found.promoted == (reason is None)
    assert (reason or "") in found.reason


def test_a_small_error_above_its_ceiling_is_not_told_as_0(monkeypatch, tmp_path) -> None:
    labels = np.linspace(0, 1e-3, 200)[:, None]
    data, given = of_towns(monkeypatch, tmp_path, labels, labels + 1.25e-5)
    found = gate.judge(
        load("register.ceilings={'town: Bern': 1e-5}", "register.metric=test/mae"), data, evaluation(), given, None
    )
    assert "'town: Bern' has a mean absolute error of 1.25e-05 among 160 examples and may have at most" in found.reason


def test_a_ceiling_of_no_slice_is_refused(monkeypatch, tmp_path) -> None:
    labels = np.linspace(0, 50, 200, dtype=np.float32)[:, None]
    data, _ = of_towns(monkeypatch, tmp_path, labels, labels)
    for name, said in (
        ("town: Basle", "unknown slice in register.ceilings 'town: Basle': did you mean 'town: Basel'?"),
        ("Basel", "unknown slice in register.ceilings 'Basel'"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            gate.check(load(f"register.ceilings={{'{name}': 8}}", "register.metric=test/mae"), data)


def test_of_several_labels_a_slice_has_a_share_of_right_ones(monkeypatch, tmp_path) -> None:
    labels = np.tile(np.array([1, 0], np.uint8), (200, 1))
    outputs = np.where(labels == 1, 1.0, -1.0).astype(np.float32)
    outputs[:20, 0] = -1
    data, given = of_towns(monkeypatch, tmp_path, labels, outputs)
    settings = load("register.floors={'town: Basel': 0.8}", "register.metric=test/micro_f1")
    assert gate.judge(settings, data, evaluation(), given, None).reason == (
        "register.floors: 'town: Basel' has 0.7500 of its labels right among 40 examples and needs 0.8"
    )


def test_a_slice_of_test_rows_that_are_gone_is_not_above_its_floor(towns) -> None:
    data, given = towns
    Path(data.splits["test"].features["categories"]).unlink()
    found = gate.judge(load("register.floors={'town: Bern': 0.5}"), data, evaluation(), given, None)
    assert (found.promoted, found.reason) == (False, "register.floors: these test rows have no slice 'town: Bern'")


def test_a_metric_that_says_nothing_is_no_evidence() -> None:
    labels = np.zeros(50, int)
    outputs = np.eye(10, dtype=np.float32)[labels]
    assert metrics.find_metric("auc").of_predictions(labels, outputs) is None
    assert not judged(load("register.metric=test/auc"), CLASSES, labels, outputs, outputs).promoted


@pytest.mark.parametrize(
    ("overrides", "target", "said"),
    [
        (["register.floors={11: 0.8}"], CLASSES, ["unknown class in register.floors '11'", "Allowed: 0, 1"]),
        (["register.floors={sevn: 0.8}"], Target.of_classes(["six", "seven"]), ["did you mean 'seven'?"]),
        (["register.floors={a: 0.8}", "register.metric=test/mae"], NUMBERS, ["a regression has no", "r.ceilings"]),
        (["register.ceilings={'a: b': 8}"], CLASSES, ["'a: b': 8.0}: a classification has", "register.floors"]),
        (["register.metric=test/mae"], CLASSES, ["register.metric = 'test/mae'", "is a classification", "accuracy"]),
        (["register.metric=test/accuracy"], NUMBERS, ["is a regression", "mae"]),
    ],
)  # fmt: skip
def test_a_gate_that_says_nothing_about_the_data_is_refused(
    overrides: list[str], target: Target, said: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        gate.check(load(*overrides), prepared(target))
    for text in said:
        assert text in str(refused.value)
    gate.check(load("register.floors={a: 0.5}", "register.metric=test/micro_f1"), prepared(SEVERAL))
