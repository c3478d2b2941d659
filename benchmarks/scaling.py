"""What each stage takes for more and more of what it is given, and whether that grows faster than the size does."""

import json
import math
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import measure
from tasks import config
from tasks.process.environment import stage_environment

HEADING = "## Growth\n"
LINEAR = 1.15
"""An exponent above that is more than linear: time^x on so few points is not known to a few hundredths."""


def exponent(seconds: dict[str, float]) -> float:
    """Return the power of the size that the time grows with, between the two largest sizes."""
    (less, before), (more, after) = list(seconds.items())[-2:]
    return math.log(after / before) / math.log(int(more) / int(less))


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section."""
    found: list[dict[str, dict[str, float]]] = []
    for repeat in range(repeats):
        print(f"scaling: repeat {repeat + 1} of {repeats}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            project = Path(folder)
            (project / ".dvc").mkdir()
            shutil.copy(measure.ROOT / "params.yaml", project)
            environment = stage_environment(config.load()) | {"PYTHONPATH": str(measure.ROOT)}
            _, output = measure.run([sys.executable, "-m", "benchmarks.sizes"], environment, project)
        found.append(json.loads(output.splitlines()[-1]))
    lines = [
        HEADING,
        f"{measure.machine('tensorflow', 'keras', 'mlflow')}. Random images in one channel, 28x28 pixels where the "
        "row does not say otherwise, 4,000 of them where the size is in pixels; a perceptron with 16 hidden units, "
        "a convnet for the step by pixels; 64 examples a step. Median milliseconds at each size.",
        "",
        "| what / of what | at each size | grows with the power | |",
        "|---|---|---|---|",
    ]
    for row, sizes in found[0].items():
        seconds = {size: statistics.median(one[row][size] for one in found) for size in sizes}
        steps = ", ".join(f"{int(size):,}: {1e3 * value:,.1f}" for size, value in seconds.items())
        power = exponent(seconds)
        lines.append(f"| {row} | {steps} | {power:.2f} | {'**more than linear**' if power > LINEAR else ''} |")
    lines += [
        "",
        "The power is that between the two largest sizes: 1 is linear, 0 is a cost that does not grow.",
        "",
    ]
    return "\n".join(lines)
