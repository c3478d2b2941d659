"""How long the recipes train until they reach an accuracy, beside the recipes that a user would copy."""

import math
import statistics
import sys
from functools import partial
from typing import Any

from benchmarks import measure
from benchmarks.default_speed import tutorial
from tasks import config
from tasks.strategies.environment import stage_environment

Curve = list[list[float]]
"""Seconds since the imports, without evaluations, and test accuracy, after each epoch."""

TUTORIAL, COURSE = "tutorial", "course"
IMPROVED = " with prefetch and 20 steps per call"
_TUTORIAL = ("mnist", 12, ("--decay", "--curve"))  # As https://www.tensorflow.org/tutorials/distribute/keras has it.
# As https://www.tensorflow.org/tutorials/distribute/custom_training has it.
_COURSE = ("fashion_mnist", 10, ("--model", "convnet2", "--curve"))
PEERS = {TUTORIAL: _TUTORIAL, COURSE: _COURSE} | {
    name + IMPROVED: (of, epochs, (*options, "--improved"))
    for name, (of, epochs, options) in ((TUTORIAL, _TUTORIAL), (COURSE, _COURSE))
}
MINE = {"mnist-fast": "mnist", "fashion-fast": "fashion_mnist"}
PEER_REPEATS = 3
"""They train several times as long as ours."""
HEADING = "## Recipes\n"
BEST, BEST_ACCURACY, BEST_PARAMETERS = "fashion-best", 0.925, 100_000
BEST_HEADING = "## Best accuracy\n"


def ours(recipe: str, seed: int) -> dict[str, Any]:
    """Train a recipe of ours; return its curve and its number of parameters."""
    settings = config.load(recipe, {"train.seed": seed})
    found: dict[str, Any] = measure.read(measure.module("curve", recipe, seed), stage_environment(settings))
    return found


def peer(name: str) -> Curve:
    """Train a recipe that a user would copy."""
    dataset, epochs, options = PEERS[name]
    return tutorial(dataset, epochs, *options)[1]["curve"]


def seconds_to(curve: Curve, accuracy: float) -> float:
    """Return when a training reached an accuracy; infinity where it never did."""
    return next((seconds for seconds, reached in curve if reached >= accuracy), math.inf)


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section. Its datasets are those of the recipes; nothing where one is not prepared."""
    if missing := [name for name in MINE.values() if not (measure.ROOT / "data" / name / "prepared").is_dir()]:
        print(f"recipes: left out, because {' and '.join(missing)} are not prepared", file=sys.stderr)
        return measure.kept(HEADING)
    load = measure.Load()
    curves: dict[str, list[Curve]] = {name: [] for name in (*PEERS, *MINE)}
    for repeat in range(repeats):
        trainings = {name: lambda name=name, seed=repeat: ours(name, seed)["curve"] for name in MINE}
        if repeat < PEER_REPEATS:
            trainings = {name: partial(peer, name) for name in PEERS} | trainings
        for name, train in trainings.items():
            curves[name].append(train())
            seconds, accuracy = curves[name][-1][-1]
            print(
                f"recipes: repeat {repeat + 1} of {repeats}, {name}: {accuracy:.4f} in {seconds:.1f} s", file=sys.stderr
            )
    rows = []
    for what, name, peer_name, accuracy, peers_accuracy, bound in (
        ("98.5% on MNIST", "mnist-fast", TUTORIAL, 0.985, 0.985, 0.35),
        ("99.2% on MNIST / the tutorial's 12 epochs", "mnist-fast", TUTORIAL, 0.992, None, 0.7),
        ("89.3% on Fashion-MNIST", "fashion-fast", COURSE, 0.893, 0.893, 0.3),
    ):
        mine, improved = curves[name], peer_name + IMPROVED
        rows.append(_row(what, mine, curves[peer_name], accuracy, peers_accuracy, bound))
        rows.append(_row(f"... / {improved}", mine, curves[improved], accuracy, peers_accuracy, 1))
    about = (
        f"{repeats} repeats of ours, each with another seed, and {min(repeats, PEER_REPEATS)} of the peers. Seconds "
        "after the imports, with building and tracing but without evaluations. Ours read what `prepare` has decoded "
        "once; the peers decode in the first epoch of each training."
    )
    lines = [
        "| what | ours, s | peer, s | ratio | wanted | met |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        "| recipe | test accuracy at its end | seconds |",
        "|---|---|---|",
        *(
            f"| {name} | {measure.spread([curve[-1][1] for curve in found], 4)} "
            f"| {measure.spread([curve[-1][0] for curve in found], 1)} |"
            for name, found in curves.items()
        ),
        "",
        "`tutorial` is Conv32-Pool-Dense64 with the tutorial's learning rates, `course` Conv32-Conv64-Dense64 with "
        "Adam, both with `fit` and 64 examples per step (`benchmarks/tutorial.py`), as in their sources. Only this "
        "table uses the test split after each epoch; the recipes were chosen with 10,000 held-out training examples.",
    ]
    return measure.section(HEADING, ("tensorflow", "keras"), load.others(), about, lines)


def best_section(dataset: str, epochs: int, repeats: int) -> str:
    """Train the recipe that is to reach the most, once: it takes as long as all others; return the page's section."""
    if not (measure.ROOT / "data" / "fashion_mnist" / "prepared").is_dir():
        print("best: left out, because fashion_mnist is not prepared", file=sys.stderr)
        return measure.kept(BEST_HEADING)
    load = measure.Load()
    found = ours(BEST, 0)
    (seconds, accuracy), parameters = found["curve"][-1], found["num_parameters"]
    met = "yes" if accuracy >= BEST_ACCURACY and parameters <= BEST_PARAMETERS else "**no**"
    lines = [
        "| recipe | parameters | test accuracy at its end | wanted | met | seconds |",
        "|---|---|---|---|---|---|",
        f"| {BEST} | {parameters:,} | {accuracy:.4f} "
        f"| at least {BEST_ACCURACY}, at most {BEST_PARAMETERS:,} parameters | {met} | {seconds:,.0f} |",
    ]
    about = f"One training (seed 0) of the recipe `{BEST}`, {len(found['curve'])} epochs, in its own process."
    return measure.section(BEST_HEADING, ("tensorflow", "keras"), load.others(), about, lines)


def _row(
    what: str, mine: list[Curve], peers: list[Curve], accuracy: float, peers_accuracy: float | None, bound: float
) -> str:
    own = [seconds_to(curve, accuracy) for curve in mine]
    other = [curve[-1][0] if peers_accuracy is None else seconds_to(curve, peers_accuracy) for curve in peers]
    found = statistics.median(own) / statistics.median(other)
    # Those that ran one after the other; there are fewer peers.
    pairs = [a / b for a, b in zip(own, other, strict=False)]
    ratio = f"{found:.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
    met = "yes" if found <= bound else "**no**"
    return f"| {what} | {_spread(own)} | {_spread(other)} | {ratio} | at most {bound} | {met} |"


def _spread(values: list[float]) -> str:
    missed = sum(map(math.isinf, values))
    return measure.spread(values, 1) + (f"; {missed} of {len(values)} never reached it" if missed else "")
