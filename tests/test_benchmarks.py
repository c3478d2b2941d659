"""What decides the claims of docs/benchmarks.md, by hand-made figures."""

import math
import subprocess
import sys

import pytest

from benchmarks import defaults, measure, recipes

MEASURED = {"ours": [2.0, 4.0, 3.0], "peer": [1.0, 1.0, 3.0]}
OURS, PEER = "3.00 (2.00 to 4.00)", "1.00 (1.00 to 3.00)"


@pytest.mark.parametrize(
    ("ours", "peer", "word", "bound", "line"),
    [
        ("ours", "peer", "at least", 3.0, f"| {OURS} | peer: {PEER} | 3.00 (1.00 to 4.00) | at least 3.0 | yes |"),
        ("ours", "peer", "at least", 3.1, f"| {OURS} | peer: {PEER} | 3.00 (1.00 to 4.00) | at least 3.1 | **no** |"),
        ("peer", "ours", "at most", 0.34, f"| {PEER} | ours: {OURS} | 0.33 (0.25 to 1.00) | at most 0.34 | yes |"),
        ("peer", None, "at most", 0.9, f"| {PEER} | - | - | at most 0.9 | **no** |"),
    ],
)
def test_a_question_is_answered_by_the_ratio_of_the_medians(ours, peer, word, bound, line):
    question = measure.Question("what", ours, peer, word, bound)
    assert measure.answers([question], MEASURED)[2:] == [f"| what {line}"]


@pytest.mark.parametrize(
    ("metric", "mine", "peer", "behind"),
    [
        ("r2", [0.5, 0.6, 0.7], [0.6, 0.7, 0.81], True),
        ("r2", [0.6, 0.7, 0.8], [0.5, 0.6, 0.7], False),
        ("accuracy", [0.9, 0.9, 0.9], [0.9, 0.95, 0.9], False),  # Within the spread.
        ("accuracy", [0.9, 0.8, 0.7], [0.9, 0.8, 0.7], False),
        ("mae", [1.1, 2.1, 3.2], [1.0, 2.0, 3.0], True),
        ("mae", [1.0, 2.0, 3.0], [1.1, 2.1, 3.2], False),
    ],
)
def test_defaults_lag_by_more_than_the_spread_on_the_same_rows(metric, mine, peer, behind):
    assert defaults.lags(metric, mine, peer) is behind


def test_defaults_and_their_peers_get_the_same_rows():
    table = defaults.TABLES["wine"]
    first, again, other = (defaults.split(table, seed) for seed in (0, 0, 1))
    assert first["split"].tolist() == again["split"].tolist() != other["split"].tolist()
    assert first["split"].value_counts().to_dict() == {"train": 142, "test": 36}
    found = defaults.peers(table, first, 0)
    assert {name: list(figures) for name, figures in found.items()} == {
        "boosting": ["accuracy"], "linear": ["accuracy"],
    }  # fmt: skip
    assert min(figures["accuracy"] for figures in found.values()) > 0.9


WATCH = """
from benchmarks import measure
large = "x = bytearray(200_000_000); x[::4096] = bytes(len(x[::4096]))"
done = measure.watch(["bash", "-c", f"python3 -c '{large}'; echo done"])
print(done.output.strip(), done.peak_megabytes)
"""


def test_the_largest_process_counts():
    # Not from here: what is started counts no less memory than who starts it, and this process has gigabytes by now.
    output = subprocess.run([sys.executable, "-c", WATCH], cwd=measure.ROOT, capture_output=True, text=True, check=True)
    done, megabytes = output.stdout.split()
    assert done == "done"
    assert 200 < float(megabytes) < 300


def test_the_time_to_an_accuracy_is_that_of_the_first_epoch_that_has_it():
    curve = [[10.0, 0.97], [20.0, 0.985], [30.0, 0.984]]
    assert [recipes.seconds_to(curve, wanted) for wanted in (0.97, 0.98, 0.985, 0.99)] == [10, 20, 20, math.inf]


def test_a_recipe_that_seldom_gets_there_has_not_met_the_target():
    quick, slow, never = [[1.0, 0.99]], [[10.0, 0.99]], [[2.0, 0.9]]
    row = recipes._row("what", [quick, never, never], [slow] * 3, 0.985, 0.985, 0.35)
    assert row.endswith("| inf (0.10 to inf) | at most 0.35 | **no** |")
    assert "2 of 3 never reached it" in row
    row = recipes._row("what", [quick, quick, never], [slow] * 3, 0.985, None, 0.35)
    assert row.endswith("| 0.10 (0.10 to inf) | at most 0.35 | yes |")
