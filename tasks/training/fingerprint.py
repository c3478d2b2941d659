"""What every member of a cluster must have in common: a worker that has something else is refused by name, before it
makes a model whose sums the others would wait for."""

import json

from tasks import config
from tasks.records import PreparedDataset
from tasks.runs import lineage
from tasks.system import machine
from tasks.system.errors import UserError

COMMON_PACKAGES = ("tensorflow", "keras", "jax", "numpy")
"""Of one version on all members of a cluster: TensorFlow's protocol and kernels, and what draws the batches."""


def of(settings: config.Settings, prepared: PreparedDataset) -> bytes:
    """Return what every member of a cluster must have in common, as JSON: names to words."""
    versions = {name: text for name, text in machine.surroundings().items() if name in COMMON_PACKAGES}
    common = {
        "settings": settings.digest("result", "speed"),
        "data": str(prepared.data_version),
        "code": lineage.code_of(settings)[:12],
        **versions,
    }
    return json.dumps(common).encode()


def refuse_other(own: bytes, chiefs: bytes, worker: int) -> None:
    """Refuse to train with a chief that was started with something else, and name each thing.

    Raises:
        UserError: see above.
    """
    if own == chiefs:
        return
    mine = json.loads(own)
    try:
        theirs = dict(json.loads(chiefs))
    except ValueError:  # Of a version that told settings and data in one sentence.
        theirs = dict.fromkeys(mine, "of another version of Stratagem")
    other = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    own_words, chiefs_words = (
        ", ".join(f"{name} {one.get(name, 'not installed')}" for name in other) for one in (mine, theirs)
    )
    raise UserError(
        f"worker {worker} was started with {own_words}, and the chief with {chiefs_words}: give every member of the "
        "cluster the same command, the same code and packages, and the same data"
    )
