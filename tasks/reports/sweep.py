"""What a sweep's trials say, in a terminal and as a file."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tasks.records import Sweep, Trial
from tasks.reports.tables import write_csv


def text_of(value: Any) -> str:
    """Return a parameter's value as a table has room for."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def short_names(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, the whole of those that have it in common."""
    last = [key.rpartition(".")[2] for key in keys]
    return [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]


def ranked(sweep: Sweep) -> list[Trial]:
    """Return the trials, the best first; then those that were pruned, the longest trained first; then the others."""
    sign = 1 if sweep.plan.lower_is_better else -1
    order = ("complete", "pruned", "running", "failed")

    def place(trial: Trial) -> tuple[int, int, float, int]:
        value = sign * trial.value if trial.value is not None else 0.0
        length = -len(trial.values) if trial.state == "pruned" else 0
        return order.index(trial.state), length, value, trial.number

    return sorted(sweep.trials, key=place)


def sweep_cells(sweep: Sweep, trials: Iterable[Trial]) -> tuple[list[str], list[list[str]]]:
    """Return the heading and a row a trial: number, state, metric, epochs, seconds, then each parameter."""
    keys = list(sweep.plan.space["space"])
    rows = [
        [
            str(one.number),
            f"same as {one.same_as}" if one.same_as is not None else one.state,
            "-" if one.value is None else f"{one.value:.4f}",
            str(len(one.values) or "-"),
            "-" if one.seconds is None else f"{one.seconds:,.1f}",
            *(text_of(one.params[key]) for key in keys),
        ]
        for one in trials
    ]
    return ["trial", "state", sweep.plan.metric, "epochs", "s", *keys], rows


def sweep_remarks(sweep: Sweep) -> list[str]:
    """Return what is said of a sweep as a whole."""
    states = Counter(one.state for one in sweep.trials)
    copies = sum(one.same_as is not None for one in sweep.trials)
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    said = [f"{len(sweep.trials)} trials: {counted}" + (f", {copies} of them as an earlier one" if copies else "")]
    if sweep.importance:
        said.append(
            "of the differences between whole trials explain: "
            + ", ".join(f"{key} {share:.0%}" for key, share in sweep.importance.items())
        )
    said += [f"trial {one.number} failed: {one.reason}" for one in sweep.trials if one.state == "failed"]
    return said


def sweep_table(sweep: Sweep, path: Path) -> Path:
    """Write a sweep as CSV: a line a trial, numbers as they are."""
    keys = list(sweep.plan.space["space"])
    header = ["trial", "state", "same_as", sweep.plan.metric, "epochs", "seconds", "run_id", *keys, "reason"]
    rows = [
        [
            one.number, one.state, one.same_as, one.value, len(one.values), one.seconds, one.run_id,
            *(one.params[key] if isinstance(one.params[key], int | float | str) else json.dumps(one.params[key])
              for key in keys),
            one.reason,
        ]
        for one in sweep.trials
    ]  # fmt: skip
    return write_csv(path, header, rows)
