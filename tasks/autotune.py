"""Choose by a short measured trial how many steps a call does and whether XLA compiles them.

Neither changes what is learned, beyond rounding. Which is faster depends on the model, the batch and the machine: on
two CPU cores XLA made a perceptron 1.8 times faster, and a convnet 7 times slower.
"""

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from tasks import config, lineage, records
from tasks.errors import UserError
from tasks.records import Measurement, Tuning

# A call must not take so long that a signal waits for it, nor the bar stand still.
CALL_SECONDS = 0.25
MAX_STEPS = 200
# Where one step a call takes so many times as long with XLA, many are not tried: of a convnet they took 10 seconds.
TOO_SLOW = 2.0
PACKAGES = ("jax", "keras", "numpy", "tensorflow")

log = logging.getLogger(__name__)

Trial = Callable[[config.Train, float], tuple[float, float]]
"""Trains a new model for a moment, a shorter one where a step takes more than so many seconds; returns the seconds of a
step, and the examples per second."""


def key_of(settings: config.Settings, image_shape: tuple[int, ...], devices: tuple[str, ...], num_steps: int) -> str:
    """Return what a choice holds for, as a sha256: model, batch, input, strategy, an epoch's steps as far as they bound
    a call, machine, code and versions."""
    train = settings.train.model_dump(mode="json")
    decide = ("loop", "loss", "per_replica_batch_size", "global_batch_size", "dtype_policy", "deterministic")
    values = settings.to_json()
    known = [
        *(values[name] for name in ("model", "optimizer", "strategy", "input")),
        {name: train[name] for name in decide},
        image_shape,
        devices,
        min(num_steps, MAX_STEPS),
        _processor(),
        lineage.code_digest(settings.model.name),
        [version(package) for package in PACKAGES],
    ]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def choose(settings: config.Settings, key: str, num_steps: int, own: Path, cache: Path, trial: Trial) -> Tuning:
    """Return the fastest of what the strategy offers: that of the run, of the cache, or measured now.

    Args:
        settings: ``train`` and ``strategy`` say what there is to choose from.
        key: see ``key_of``.
        num_steps: in an epoch; no call does more.
        own: the run's record, which a resumed run goes by. Written if it is not there.
        cache: folder of the choices that were measured before.
        trial: measures one choice.
    """
    # On JAX every step is compiled, and with deterministic kernels Keras compiles none.
    offered = settings.strategy.backend == "tensorflow" and "train.jit_compile" not in settings.strategy.refuses
    offered = offered and not settings.train.deterministic
    for path in (own, cache / f"{key[:16]}.json"):
        try:
            found = records.load(Tuning, path)
        except UserError:
            continue
        # A run may be resumed under another strategy, which need not offer what was chosen.
        if found.key == key or (path == own and (offered or not found.jit_compile)):
            records.save(found, own)
            log.info("autotune  %s, measured before", describe(found))
            return found

    def measure(steps: int, jit_compile: bool, too_long: float = math.inf) -> float:
        section = settings.train.model_copy(update={"steps_per_execution": steps, "jit_compile": jit_compile})
        seconds, speed = trial(section, too_long)
        measured.append(Measurement(steps_per_execution=steps, jit_compile=jit_compile, examples_per_second=speed))
        return seconds

    measured: list[Measurement] = []
    seconds = measure(1, False)  # As Keras trains where nobody asks for more.
    compiled = offered and measure(1, True, TOO_SLOW * seconds) < TOO_SLOW * seconds
    many = min(round(CALL_SECONDS / seconds), MAX_STEPS, num_steps)
    if many > 1:
        measure(many, False)
    if many > 1 and compiled:
        measure(many, True)
    best = max(measured, key=lambda one: one.examples_per_second)
    tuning = Tuning(
        key=key,
        steps_per_execution=best.steps_per_execution,
        jit_compile=best.jit_compile,
        measured=tuple(measured),
    )
    for path in (own, cache / f"{key[:16]}.json"):
        records.save(tuning, path)
    log.info("autotune  %s; it was the fastest of %d", describe(tuning), len(measured))
    return tuning


def describe(tuning: Tuning) -> str:
    """Return the choice in the spelling of ``--set``."""
    xla = str(tuning.jit_compile).lower()
    return f"train.steps_per_execution={tuning.steps_per_execution} train.jit_compile={xla}"


def _processor() -> str:
    """Return the processor's model, where the system tells, and how many of its cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.processor()} {cores}"
    return f"{next((line.partition(':')[2] for line in lines if 'model name' in line), '')} {cores}"
