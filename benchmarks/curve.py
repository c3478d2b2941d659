"""One training of a recipe by the project's own stage: seconds since the stage began, its imports left out, and test
accuracy after each epoch, with the number of parameters, as JSON.

`python -m benchmarks.curve RECIPE SEED`, in the environment of a stage process. Every epoch's checkpoint is kept, and
evaluated when the training is over.
"""

import itertools
import json
import sys

from benchmarks.training import trained
from tasks import config
from tasks.operations import dvc_data


def main(recipe: str, seed: int) -> None:
    """Train, evaluate each epoch, and print."""
    from tasks.evaluate import evaluate

    settings = config.load(recipe)
    epochs = settings.train.epochs
    overrides = {"train.seed": seed, "checkpoint.keep": epochs, "checkpoint.every_epochs": 1}
    with trained(overrides, recipe) as result:
        steps = result.steps // epochs
        accuracies = []
        for epoch in range(1, epochs + 1):
            at = config.load(recipe, {**overrides, "evaluate.checkpoint": epoch * steps})
            evaluated = evaluate(at, dvc_data.load_prepared(result.dataset), result)
            accuracies.append(evaluated.metrics["test/accuracy"])
    _, *seconds = itertools.accumulate([result.setup_seconds, *result.epoch_seconds])
    curve = list(zip(seconds, accuracies, strict=True))
    print(json.dumps({"curve": curve, "num_parameters": result.num_parameters}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
