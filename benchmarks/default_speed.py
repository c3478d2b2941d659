"""What one gets without asking: the commands as a user types them, beside the tutorial; and the timeline's picture."""

import sys
from functools import partial

from benchmarks import measure, timeline
from benchmarks.pipeline import BIN, SHORT, SHORT_EPOCHS, ours_as_typed, prefect_server, tutorial
from benchmarks.strategies import one_process

HEADING = "## Default settings\n"
REPEATS = 3
EPOCHS = 2
CONVNET, PERCEPTRON = "`stratagem run mnist --set model.name=convnet`", "`stratagem run mnist --set model.name=mlp`"
CONVNET_TUTORIAL, PERCEPTRON_TUTORIAL = "tutorial, convnet", "tutorial, perceptron"
ALONE, SERVED, SCRIPT = "digits, no server up", "digits, server up", "digits, script"
FIRST, BARE, HELP = "to the first step", "import TensorFlow, trace, one step", "`stratagem --help`"
SPEEDS = [
    measure.Question("examples/s, convnet / the tutorial's `fit`", CONVNET, CONVNET_TUTORIAL, "at least", 1.6),
    measure.Question("examples/s, perceptron / the tutorial's `fit`", PERCEPTRON, PERCEPTRON_TUTORIAL, "at least", 2.8),
]
TIMES = [
    measure.Question("a whole run of digits, 2 epochs, no server up / script", ALONE, SCRIPT, "at most", 1.5),
    measure.Question("... with a Prefect server up / script", SERVED, SCRIPT, "at most", 1.25),
    measure.Question("to the first step, warm, server up / import TensorFlow and trace", FIRST, BARE, "at most", 1.2),
]


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure; return the page's section. The dataset is MNIST and the numbers are these, whatever is asked."""
    measure.run([str(BIN / "stratagem"), "prepare", "--set", f"dataset.name={SHORT}"])

    def speed(model: str) -> float:
        # The perceptron with the recipe's own five epochs, because how long a training is decides about XLA.
        _, record = ours_as_typed(
            "mnist", {"model.name": model, **({} if model == "mlp" else {"train.epochs": EPOCHS})}
        )
        return float(record["examples_per_second"])

    def short(environment: dict[str, str] | None = None) -> float:
        done, _ = ours_as_typed(None, {"train.epochs": SHORT_EPOCHS}, environment)
        return done.seconds

    with prefect_server() as served:
        measured = measure.alternate(
            "defaults",
            REPEATS,
            {
                CONVNET_TUTORIAL: lambda: tutorial("mnist", EPOCHS)[1]["examples_per_second"],
                CONVNET: partial(speed, "convnet"),
                PERCEPTRON_TUTORIAL: lambda: tutorial("mnist", EPOCHS, "--model", "mlp")[1]["examples_per_second"],
                PERCEPTRON: partial(speed, "mlp"),
                SCRIPT: lambda: tutorial(SHORT, SHORT_EPOCHS)[0].seconds,
                ALONE: short,
                SERVED: lambda: short(served),
                FIRST: lambda: timeline.first_step(timeline.watched(served)[1]),
                BARE: lambda: measure.run([sys.executable, "-m", "benchmarks.first_step"])[0],
                HELP: lambda: measure.run([str(BIN / "stratagem"), "--help"])[0],
            },
        )
    timeline.main()
    help_seconds = measured[HELP]
    speeds = [CONVNET_TUTORIAL, CONVNET, PERCEPTRON_TUTORIAL, PERCEPTRON]
    return "\n".join(
        [
            HEADING,
            f"{measure.machine('tensorflow', 'keras', 'prefect', 'mlflow', 'dvc')}. {REPEATS} repeats, alternated; "
            f"median (range). Commands as a user types them: nothing is set but the model and {EPOCHS} epochs, for the "
            "perceptron the recipe's 5.",
            "",
            "| what | examples/s after the first call |",
            "|---|---|",
            *(f"| {name} | {measure.spread(measured[name], 0)} |" for name in speeds),
            "",
            "| what | seconds |",
            "|---|---|",
            *(f"| {name} | {measure.spread(values)} |" for name, values in measured.items() if name not in speeds),
            "",
            *measure.answers([*SPEEDS, *TIMES], measured),
            f"| `stratagem --help`, seconds | {measure.spread(help_seconds)} | at most 0.3 | "
            f"{'yes' if sorted(help_seconds)[len(help_seconds) // 2] <= 0.3 else '**no**'} |",
            "",
            "One replica mirrored beside one device. " + one_process("mnist"),
            "",
        ]
    )
