"""The input pipeline alone, beside the tutorial's, TFDS' own records and plain NumPy."""

import json
import statistics
import sys

from benchmarks import measure
from benchmarks.reading import STEPS_PER_EXECUTION
from tasks import config
from tasks.process.environment import stage_environment

BATCH_SIZES = (64, 256)
PASSES = 4


def read(way: str, dataset: str, batch_size: int) -> dict[str, list[float] | float]:
    """Read the data by one way in a process of its own."""
    environment = stage_environment(config.load())
    command = [sys.executable, "-m", "benchmarks.reading", way, dataset, str(batch_size), str(PASSES)]
    _, output = measure.run(command, environment)
    return json.loads(output.splitlines()[-1])


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section."""
    memory: dict[str, list[float]] = {}

    def later(way: str, batch_size: int) -> float:
        found = read(way, dataset, batch_size)
        memory.setdefault(way, []).append(found["memory_bytes"] / 1e6)
        return statistics.median(found["examples_per_second"][1:])  # The first pass traces, and fills the cache.

    def first(way: str) -> float:
        return read(way, dataset, BATCH_SIZES[0])["examples_per_second"][0]

    variants, questions = {}, []
    for size in BATCH_SIZES:
        for way in (
            "ours, NumPy",
            "ours, in the step",
            "ours, tf.data",
            "tutorial",
            "tutorial with prefetch",
            "tf.data without data",
            "numpy",
        ):
            variants[f"{way}, {size} a batch"] = lambda way=way, size=size: later(way, size)
        wanted = 6 if size == BATCH_SIZES[0] else 5
        for way in ("ours, NumPy", "ours, in the step", "ours, tf.data"):
            mine = f"{way}, {size} a batch"
            questions += [
                measure.Question(
                    f"examples/s, {mine} / tutorial", mine, f"tutorial, {size} a batch", "at least", wanted
                ),
                measure.Question("... / NumPy's recipe", mine, f"numpy, {size} a batch", "at least", 0.7),
            ]
    for way in ("ours, from records", "TFDS records"):
        variants[f"{way}, first pass"] = lambda way=way: first(way)
    questions.append(
        measure.Question(
            "examples/s from records, first pass: `input.source=stream` / `tfds.load().map().batch()`",
            "ours, from records, first pass",
            "TFDS records, first pass",
            "at least",
            3,
        )
    )
    speeds = measure.alternate("inputs", repeats, variants)
    questions_of_memory = [
        measure.Question("memory of the data: ours / tutorial", "ours, tf.data", "tutorial", "at most", 0.3)
    ]
    lines = [
        "## Input",
        "",
        f"{measure.machine('tensorflow', 'tensorflow-datasets')}. Dataset {dataset}, {repeats} repeats: each variant "
        f"is a process of its own, and they take turns; median (range). Each reads {PASSES} passes of shuffled batches "
        "in a loop inside one `tf.function` (NumPy: in Python) that only counts them. The first pass, which traces and "
        "fills caches, is left out, but for the last two variants.",
        "",
        "| variant | examples/s |",
        "|---|---|",
        *(f"| {name} | {measure.spread(values, 0)} |" for name, values in speeds.items()),
        "",
        "| memory after that, MB | |",
        "|---|---|",
        *(f"| {way} | {measure.spread(memory[way], 0)} |" for way in ("ours, tf.data", "tutorial")),
        "",
        *measure.answers(questions, speeds),
        *measure.answers(questions_of_memory, memory)[2:],
        "",
        "The tutorial's pipeline is `map(scale).cache().shuffle(10000).batch()`, which shuffles within 10,000 examples "
        "and yields float32; ours shuffles all of them and yields the pixels as bytes, which the model's first layer "
        "scales. NumPy's recipe does a permutation, a gather and a cast to float32 in one thread; `ours, NumPy` is "
        "cast here too, and gathers in a second thread. `fit` reads `ours, tf.data` on TensorFlow and `ours, NumPy` on "
        "JAX, every evaluation the latter; the custom loop gathers its batches inside the step (`ours, in the step`, "
        f"{STEPS_PER_EXECUTION} steps a call). `tf.data without data` takes as many elements, each a single number, in "
        "the same loop: no pipeline that hands over a batch an element can be faster there.",
        "",
    ]
    return "\n".join(lines)
