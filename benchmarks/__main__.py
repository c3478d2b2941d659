"""`make bench`: measure ours and plain recipes in turn, and write the sections of docs/benchmarks.md.

Without a part it measures the default table, in at most 20 minutes. Sections that are not measured stay as they are.
"""

import argparse
import sys

from benchmarks import checkpoints, data, default_speed, defaults, measure, network, recipes, serving

HEADER = (
    "# Benchmarks\n\n```sh\nmake bench                         # the default table, in at most 20 minutes\n"
    "python -m benchmarks recipes best   # other parts: defaults, data, checkpoints, serving, network\n```\n\n"
    "This page compares Stratagem with what you could write yourself: scripts from the tutorials of TensorFlow and "
    "Keras, pandas, Pillow, scikit-learn, MLflow's server. Unless a section says otherwise, a figure is a median with "
    "its range in brackets, and the variants take turns, each in its own process. A ratio compares medians; its range "
    "is that of the single pairs.\n\n"
)
PARTS = {
    "default_speed": (default_speed.section, default_speed.HEADING),
    "defaults": (defaults.section, defaults.HEADING),
    "recipes": (recipes.section, recipes.HEADING),
    "best": (recipes.best_section, recipes.BEST_HEADING),
    "data": (data.section, data.HEADING),
    "checkpoints": (checkpoints.section, checkpoints.HEADING),
    "serving": (serving.section, serving.HEADING),
    "network": (network.section, network.HEADING),
}


def main() -> None:
    """Measure, print the sections and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    known = measure.ROOT / "data" / "mnist" / "prepared"
    parser.add_argument("parts", nargs="*", help=f"what to measure: {', '.join(PARTS)}; without, default_speed")
    parser.add_argument("--dataset", default="mnist" if known.is_dir() else "digits")
    parser.add_argument("--epochs", type=int, default=3, help="2 or more, because the first one traces")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    chosen = arguments.parts or ["default_speed"]
    if set(chosen) - set(PARTS) or arguments.epochs < 2:
        parser.error(f"choose from {', '.join(PARTS)}, and at least 2 epochs")

    for name in sorted({arguments.dataset, "digits"}):  # Some parts measure on digits, whatever is given.
        measure.watch(measure.stratagem("data", "prepare", settings={"dataset.name": name}))
    sections = []
    for part, (section, heading) in PARTS.items():
        if part in chosen:
            sections.append(section(arguments.dataset, arguments.epochs, arguments.repeats))
            print(sections[-1])
        else:
            sections.append(measure.kept(heading))
    measure.PAGE.write_text(HEADER + "\n".join(text for text in sections if text), encoding="utf-8")
    print(f"wrote {measure.PAGE}", file=sys.stderr)


if __name__ == "__main__":
    main()
