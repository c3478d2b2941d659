"""The timeline of a short warm run, as docs/images/timeline.png: `python -m benchmarks.timeline`."""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.pipeline import SHORT, SHORT_EPOCHS, ours

PICTURE = measure.ROOT / "docs" / "images" / "timeline.png"
LANES = ("flow", "Prefect's API", "stages")
FIRST_STEP = "first step"


def watched(environment: dict[str, str] | None = None) -> tuple[float, list[dict[str, Any]]]:
    """Run the short run on unchanged data; return its seconds, and what its processes wrote down, from its start on."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spans"
        alone = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        began = time.monotonic()
        done, _ = ours(
            SHORT,
            {"train.epochs": SHORT_EPOCHS},
            "--fresh",
            environment={**(environment or alone), "STRATAGEM_TIMELINE": str(file)},
        )
        spans = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for span in spans:
        span["began"], span["ended"] = span["began"] - began, span["ended"] - began
    return done.seconds, spans


def first_step(spans: list[dict[str, Any]]) -> float:
    """Return the seconds from the command to the end of its first training step."""
    return float(next(span["ended"] for span in spans if span["what"] == FIRST_STEP))


def draw(seconds: float, spans: list[dict[str, Any]], path: Path) -> None:
    """Draw a bar for each span: a row for each process, those inside another one below it."""
    from matplotlib.figure import Figure

    rows: list[tuple[str, list[dict[str, Any]]]] = []
    for lane in LANES:
        levels: list[list[dict[str, Any]]] = []
        for span in sorted(
            (one for one in spans if one["process"] == lane), key=lambda one: (one["began"], -one["ended"])
        ):
            free = next((level for level in levels if level[-1]["ended"] <= span["began"] + 1e-3), None)
            if free is None:
                levels.append(free := [])
            free.append(span)
        rows += [(lane if number == 0 else "", level) for number, level in enumerate(levels)]
    figure = Figure(figsize=(11, 0.62 * len(rows) + 1.1), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(LANES, ("#4c72b0", "#dd8452", "#55a868"), strict=True))
    lane = ""
    for number, (name, level) in enumerate(rows):
        lane = name or lane
        for span in level:
            length = span["ended"] - span["began"]
            axes.barh(number, length, left=span["began"], height=0.82, color=colours[lane], edgecolor="white")
            if length > 0.12 * seconds:
                label, place = f"{span['what']} {length:.1f} s", span["began"] + length / 2
                axes.text(place, number, label, ha="center", va="center", fontsize=8, color="white")
            elif length > 0.01 * seconds:
                label, place = f"{span['what']} {length:.1f}", span["began"] + length / 2
                axes.text(place, number, label, ha="center", va="center", fontsize=6.5, rotation=30)
    end = first_step(spans)
    axes.axvline(end, color="#c44e52", linewidth=1)
    axes.text(end, -0.62, f"first step done: {end:.1f} s", fontsize=8, color="#c44e52", ha="center")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.9)
    axes.set_xlim(0, seconds)
    axes.set_xlabel("seconds since the command was given")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run, draw, and say when the first step was done."""
    seconds, spans = watched()
    draw(seconds, spans, PICTURE)
    print(f"{seconds:.1f} s, first step done after {first_step(spans):.1f} s: {PICTURE}")


if __name__ == "__main__":
    main()
