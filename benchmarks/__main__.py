"""`make bench`: alternate our runs and the plain recipes' in one go, and write docs/benchmarks.md.

Every figure is of whole processes, started in turn on the same machine; ratios are of medians, with the range of the
single ones. `python -m benchmarks strategies` measures one part alone and leaves the other one's section as it is.
"""

import argparse
import sys

from benchmarks import (
    checkpoints,
    data,
    default_speed,
    defaults,
    evidence,
    inputs,
    measure,
    network,
    on_jax,
    pipeline,
    recipes,
    scaling,
    serving,
    speed,
    strategies,
)

HEADER = "# Benchmarks\n\nWritten by `make bench` (`python -m benchmarks`), which measures anew.\n\n"
PARTS = {
    "default_speed": (default_speed.section, default_speed.HEADING),
    "defaults": (defaults.section, defaults.HEADING),
    "short": (pipeline.short_section, pipeline.SHORT_HEADING),
    "long": (pipeline.long_section, pipeline.LONG_HEADING),
    "speed": (speed.section, "## Training\n"),
    "jax": (on_jax.section, on_jax.HEADING),
    "inputs": (inputs.section, "## Input\n"),
    "data": (data.section, data.HEADING),
    "recipes": (recipes.section, recipes.HEADING),
    "best": (recipes.best_section, recipes.BEST_HEADING),
    "strategies": (strategies.section, "## Strategies\n"),
    "checkpoints": (checkpoints.section, "## Checkpoints and tracking\n"),
    "evidence": (evidence.section, evidence.HEADING),
    "history": (evidence.history_section, evidence.HISTORY_HEADING),
    "serving": (serving.section, serving.HEADING),
    "scaling": (scaling.section, scaling.HEADING),
    "network": (network.section, network.HEADING),
}


def main() -> None:
    """Measure, print the sections and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    known = measure.ROOT / "data" / "mnist" / "prepared"
    parser.add_argument("parts", nargs="*", help=f"what to measure: {', '.join(PARTS)}; all without")
    parser.add_argument("--dataset", default="mnist" if known.is_dir() else "digits")
    parser.add_argument("--epochs", type=int, default=3, help="the first call of the first one traces: 2 or more")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    wrong = [part for part in arguments.parts if part not in PARTS]
    if wrong or arguments.epochs < 2:
        parser.error(f"choose from {', '.join(PARTS)}, and at least 2 epochs")

    for name in sorted({arguments.dataset, "digits"}):  # Some parts measure on digits, whatever is given.
        measure.run([str(pipeline.BIN / "stratagem"), "prepare", "--set", f"dataset.name={name}"])
    sections = []
    for part, (section, heading) in PARTS.items():
        if part in (arguments.parts or PARTS):
            sections.append(section(arguments.dataset, arguments.epochs, arguments.repeats))
            print(sections[-1])
        else:
            sections.append(measure.kept(heading))
    measure.PAGE.write_text(HEADER + "\n".join(text for text in sections if text), encoding="utf-8")
    print(f"wrote {measure.PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
