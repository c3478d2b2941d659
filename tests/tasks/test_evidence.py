"""Tests of two models against those of scipy, and against what chance does."""

import numpy as np
import pytest
from scipy import stats

from tasks.evaluation import evidence
from tasks.modeling import metrics


@pytest.mark.parametrize("seed", range(5))
def test_mcnemar_is_the_exact_binomial_test(seed: int) -> None:
    generator = np.random.default_rng(seed)
    before, after = generator.random((2, 300)) < [[0.8], [0.85]]
    won, lost = int((after & ~before).sum()), int((before & ~after).sum())
    expected = stats.binomtest(won, won + lost, 0.5, alternative="greater").pvalue
    assert evidence.mcnemar(before, after) == pytest.approx(expected, rel=1e-12)


def test_mcnemar_where_there_is_nothing_to_choose() -> None:
    right = np.array([True, False, True])
    assert evidence.mcnemar(right, right) == 1.0
    assert evidence.mcnemar(right, np.array([True, True, True])) == 0.5
    assert evidence.mcnemar(np.array([True, True, True]), right) == 1.0


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_a_paired_difference_is_scipys(better: str) -> None:
    generator = np.random.default_rng(3)
    labels = generator.normal(size=(300, 1))
    before, after = (labels + generator.normal(0, spread, (300, 1)) for spread in (1.0, 0.8))
    mae = metrics.find_metric("mae").of_predictions
    found = evidence.paired_bootstrap(mae, labels, before, after, better, 0.95, 0, 4000)
    errors = [abs(outputs - labels)[:, 0] for outputs in (before, after)]
    gains = errors[1] - errors[0] if better == "higher" else errors[0] - errors[1]
    assert found.value == pytest.approx(gains.mean())
    theirs = stats.bootstrap((gains,), np.mean, confidence_level=0.95, n_resamples=4000, method="percentile", rng=1)
    assert found.interval == pytest.approx(tuple(theirs.confidence_interval), abs=0.02)
    # The normal test of the mean of the gains, which is what the bootstrap's comes to.
    expected = stats.norm.sf(gains.mean() / (gains.std() / np.sqrt(300)))
    assert found.p_value == pytest.approx(expected, abs=0.01)


def test_the_same_outputs_are_no_evidence() -> None:
    labels = np.arange(50) % 10
    outputs = np.random.default_rng(0).normal(size=(50, 10))
    found = evidence.paired_bootstrap(metrics.find_metric("accuracy").of_predictions, labels, outputs, outputs)
    assert (found.value, found.interval, found.p_value) == (0.0, (0.0, 0.0), 1.0)
