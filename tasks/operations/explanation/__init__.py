"""What a command would do: its steps, what of them is there already and why or why not, and each setting's source.

Nothing is started, and nothing but what makes the next look quicker (mlruns/code.json) is written.
What the command would refuse is refused.
"""

from tasks.operations.explanation.changes import cancel, pull, push, reconcile, remove, rollback
from tasks.operations.explanation.datasets import add
from tasks.operations.explanation.trainings import STAGES, comparison, explain, sweep
from tasks.operations.explanation.uses import evaluate, export, predict, register, report, serve

__all__ = [
    "STAGES",
    "add",
    "cancel",
    "comparison",
    "evaluate",
    "explain",
    "export",
    "predict",
    "pull",
    "push",
    "reconcile",
    "register",
    "remove",
    "report",
    "rollback",
    "serve",
    "sweep",
]
