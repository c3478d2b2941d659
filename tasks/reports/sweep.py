"""The tables, remarks, charts and page of a sweep: its trials, their values, and the final training."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tasks import config
from tasks.records import Sweep, Trial
from tasks.reports import charts
from tasks.reports.blocks import Block, Figure, ReportSection, TableBlock, Text, as_markdown, facts, write
from tasks.reports.charts import Chart, Series
from tasks.reports.tables import summary_rows
from tasks.system import units

MOST_TRIALS = 20
"""The number of trials that are not folded."""
MOST_CURVES = 200
STATES = {"complete": ("whole", 0), "pruned": ("pruned", 1), "best": ("best", 2)}
"""The label and the colour of the trials in charts."""


def text_of(value: Any) -> str:
    """Return a parameter's value as short text for a table."""
    return units.number(value, 4) if isinstance(value, float) else config.written(value)


def short_names(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, or the whole key if that part is ambiguous."""
    last = [key.rpartition(".")[2] for key in keys]
    return [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]


def ranked(sweep: Sweep) -> list[Trial]:
    """Return the trials: the complete ones from the best, the pruned ones from the longest, then the others."""
    sign = 1 if sweep.plan.lower_is_better else -1
    order = ("complete", "pruned", "running", "failed")

    def place(trial: Trial) -> tuple[int, int, float, int]:
        value = sign * trial.value if trial.value is not None else 0.0
        length = -len(trial.values) if trial.state == "pruned" else 0
        return order.index(trial.state), length, value, trial.number

    return sorted(sweep.trials, key=place)


def sweep_cells(sweep: Sweep, trials: Iterable[Trial]) -> tuple[list[str], list[list[str]]]:
    """Return the heading and one row per trial: number, state, metric, epochs, seconds, then each parameter."""
    keys = list(sweep.plan.space["space"])
    rows = [
        [
            str(one.number),
            f"same as {one.same_as}" if one.same_as is not None else one.state,
            units.metric(one.value),
            str(len(one.values) or "-"),
            "-" if one.seconds is None else f"{one.seconds:,.1f}",
            *(text_of(one.params[key]) for key in keys),
        ]
        for one in trials
    ]
    return ["trial", "state", sweep.plan.metric, "epochs", "s", *keys], rows


def sweep_remarks(sweep: Sweep) -> list[str]:
    """Return remarks on the sweep as a whole."""
    states = Counter(one.state for one in sweep.trials)
    copies = sum(one.same_as is not None for one in sweep.trials)
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    said = [f"{len(sweep.trials)} trials: {counted}" + (f", {copies} of them repeated" if copies else "")]
    if sweep.importance:
        said.append(
            "share of the differences between complete trials: "
            + ", ".join(f"{key} {share:.0%}" for key, share in sweep.importance.items())
        )
    said += [f"trial {one.number} failed: {one.reason}" for one in sweep.trials if one.state == "failed"]
    return said


def sweep_page(sweep: Sweep, path: Path) -> Path:
    """Write the page of a sweep as HTML; return its path."""
    best = _best(sweep)
    title = f"Sweep {sweep.plan.name} of {sweep.model} on {sweep.dataset}"
    if best is not None:
        title += f": {sweep.plan.metric} {units.metric(best.value)}"
    partial = "" if sweep.final is not None else "Partial: the best trial has not been trained on all examples yet."
    by_parameter = [_slice(sweep, key, one) for key, one in sweep.plan.space["space"].items()]
    slices = ReportSection("The values by each parameter", [Figure(by_parameter)])
    sections = [_outcome(sweep), _progress(sweep), _importance(sweep), slices, _trials(sweep), _space(sweep)]
    return write(path, title, [one for one in sections if one is not None], partial)


def sweep_outcome(sweep: Sweep) -> str:
    """Return the outcome of a sweep as Markdown."""
    return as_markdown(f"Sweep {sweep.plan.name}", [_outcome(sweep)])


def _best(sweep: Sweep) -> Trial | None:
    return next((one for one in sweep.trials if one.number == sweep.best), None)


def _outcome(sweep: Sweep) -> ReportSection:
    best = _best(sweep)
    if best is None:
        return ReportSection("Result", [Text("No trial was completed.")])
    rows = {
        "best": f"trial {best.number} of {len(sweep.trials)}, {sweep.plan.metric} {units.metric(best.value)}",
        **{key: text_of(value) for key, value in best.params.items()},
        "run": best.run_id or "-",
    }
    blocks: list[Block] = [facts(rows)]
    told = (
        f"The best of {len(sweep.trials)} values looks better than it is, because part of it is luck, so it does not "
        "measure the model. "
    )
    if (final := sweep.final) is not None:
        told += (
            "The model below was trained with its settings on the training and validation examples together, and "
            "measured on the test split, which no trial used."
        )
        blocks.append(Text(told))
        given = {**sweep.plan.space["set"], **best.params}
        changed = {key: v for key, v in sweep.best_settings.items() if key not in given or given[key] != v}
        blocks.append(
            facts(
                {
                    **summary_rows(final),
                    "what differs": ", ".join(f"{k}={text_of(v)}" for k, v in changed.items()),
                    "report": f"mlruns/runs/{final.run_id}/report/report.html",
                },
                title="The model",
            )
        )
    else:
        blocks.append(Text(told + "The training on all examples will measure it."))
    return ReportSection("Result", blocks)


def _dots(sweep: Sweep, place_of: Callable[[Trial], float]) -> list[Series]:
    """Return a series of dots for each state: the value of each trial at ``place_of``."""
    dots = []
    for state, (label, colour) in STATES.items():
        own = [
            (place_of(one), one.value) for one in sweep.trials if _state(sweep, one) == state and one.value is not None
        ]
        dots.append(Series([place for place, _ in own], [value for _, value in own], label, colour, "dots"))
    return dots


def _state(sweep: Sweep, trial: Trial) -> str:
    """Return the key of a trial in ``STATES``; a running or failed one has none."""
    return "best" if trial.number == sweep.best else trial.state


def _progress(sweep: Sweep) -> ReportSection:
    """Return the values in the order of the trials, the best so far, and each trial's curve."""
    better, metric = (min if sweep.plan.lower_is_better else max), sweep.plan.metric
    whole = [(one.number, one.value) for one in sweep.trials if one.state == "complete" and one.value is not None]
    best = list(itertools.accumulate((value for _, value in whole), better))
    so_far = Series([number for number, _ in whole], best, "best so far", 3, "line")
    dots = _dots(sweep, lambda one: one.number)
    alt = f"{metric} of {sum(len(one.x) for one in dots)} trials, {len(dots[1].x)} of them pruned"
    drawn = [charts.plot("trial", metric, [so_far, *dots], alt, whole=True)]
    trials = [one for one in sweep.trials if one.values and one.same_as is None][:MOST_CURVES]
    lines = []
    for one in trials:
        label, colour = STATES.get(_state(sweep, one), STATES["complete"])
        lines.append(Series(range(1, len(one.values) + 1), one.values, label, colour, "line"))
    if lines:
        alt = f"{metric} after each epoch of {len(lines)} trials"
        drawn.append(charts.plot("epoch", metric, lines, alt, whole=True))
    told = "The line of a pruned trial stops where the trial was pruned."
    return ReportSection("Trials in order", [Figure(drawn, told)])


def _importance(sweep: Sweep) -> ReportSection | None:
    if not sweep.importance:
        return None
    shown = {key.rpartition(".")[2]: share for key, share in sweep.importance.items()}
    drawn = charts.bars(f"share of the differences in {sweep.plan.metric}", shown, ".0%")
    told = (
        "The share of the differences between completed trials that each parameter explains over its whole range "
        "(fANOVA with a random forest; Hutter et al., 2014). With few trials it is a rough estimate."
    )
    return ReportSection("Which parameter matters", [Figure([drawn], told)])


def _slice(sweep: Sweep, key: str, parameter: Any) -> Chart:
    """Draw the value of each trial against its value of a parameter."""
    name, metric = key.rpartition(".")[2], sweep.plan.metric

    def draw(place_of: Callable[[Trial], float], **options: Any) -> Chart:
        dots = _dots(sweep, place_of)
        alt = f"{metric} by {key} of {sum(len(one.x) for one in dots)} trials"
        return charts.plot(name, metric, dots, alt, **options)

    if isinstance(parameter, dict):
        whole = isinstance(parameter["low"], int) and isinstance(parameter["high"], int)
        return draw(lambda one: float(one.params[key]), log=bool(parameter.get("log")), whole=whole)
    if all(isinstance(choice, int | float) and not isinstance(choice, bool) for choice in parameter):
        return draw(lambda one: float(one.params[key]))
    return draw(lambda one: parameter.index(one.params[key]), names=list(map(text_of, parameter)))


def _trials(sweep: Sweep) -> ReportSection:
    keys, rows = sweep_cells(sweep, ranked(sweep))
    header = ["seconds" if name == "s" else name for name in short_names(keys)]
    blocks: list[Block] = [TableBlock(tuple(header), rows[:MOST_TRIALS], 2)]
    if len(rows) > MOST_TRIALS:
        blocks.append(TableBlock(tuple(header), rows[MOST_TRIALS:], 2, f"{len(rows) - MOST_TRIALS} more", folded=True))
    if any(one.same_as is not None for one in sweep.trials):
        blocks.append(Text("A trial with the parameters of an earlier one copies its values and is not trained again."))
    failed = {f"trial {one.number}": one.reason or "" for one in sweep.trials if one.state == "failed"}
    if failed:
        blocks.append(facts(failed, title="Why trials failed"))
    return ReportSection("All trials, the best first", blocks)


def _space(sweep: Sweep) -> ReportSection:
    plan = sweep.plan
    rows = {key: text_of(one) for key, one in plan.space["space"].items()}
    same = {key: text_of(one) for key, one in plan.space["set"].items()}
    how = {
        "recipe": plan.space["recipe"] or "params.yaml",
        "metric": f"{plan.metric}, {'lower' if plan.lower_is_better else 'higher'} is better",
        "sampler": f"{plan.sampler}, seed {plan.space['seed']}",
        "pruner": text_of(plan.space["pruner"]),
        "trained in parallel": str(plan.parallel),
        "data version": sweep.data_version or "not under DVC",
        "commit": sweep.git_commit or "-",
        "sweep": sweep.run_id,
    }
    return ReportSection(
        "What was tried",
        [facts(rows, "The space"), *([facts(same, "For all trials")] if same else []), facts(how, "How")],
    )
