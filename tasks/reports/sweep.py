"""A sweep in a terminal, as a file, and as a page: what was tried, what it gave, and what became of the best."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from tasks.records import Sweep, Trial
from tasks.reports import svg
from tasks.reports.blocks import Block, Cell, Figure, ReportSection, TableBlock, Text, facts, render
from tasks.reports.tables import write_csv
from tasks.system import files

MOST_TRIALS = 20
"""Trials that are shown unfolded."""
MOST_CURVES = 200
COLOURS = "Blue: trained to its end. Orange: pruned, drawn where it ended. Green: the best."
MOST_NAMES = 8
"""The most choices whose names fit along an axis."""


def text_of(value: Any) -> str:
    """Return a parameter's value as short text for a table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)


def short_names(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, or the whole key where that is ambiguous."""
    last = [key.rpartition(".")[2] for key in keys]
    return [short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)]


def ranked(sweep: Sweep) -> list[Trial]:
    """Return the trials: complete ones, the best first; pruned ones, the longest trained first; then the others."""
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
            "-" if one.value is None else f"{one.value:.4f}",
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
    said = [f"{len(sweep.trials)} trials: {counted}" + (f", {copies} of them as an earlier one" if copies else "")]
    if sweep.importance:
        said.append(
            "of the differences between whole trials explain: "
            + ", ".join(f"{key} {share:.0%}" for key, share in sweep.importance.items())
        )
    said += [f"trial {one.number} failed: {one.reason}" for one in sweep.trials if one.state == "failed"]
    return said


def sweep_table(sweep: Sweep, path: Path) -> Path:
    """Write a sweep as CSV: one line per trial, numbers unrounded."""
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


def sweep_page(sweep: Sweep, path: Path) -> Path:
    """Write the page of a sweep as HTML; return where to."""
    best = _best(sweep)
    title = f"Sweep {sweep.plan.name} of {sweep.model} on {sweep.dataset}"
    if best is not None:
        title += f": {sweep.plan.metric} {best.value:.4f}"
    partial = "" if sweep.final is not None else "Partial: the best trial was not trained again on all examples yet."
    drawings = [_slice(sweep, key, one) for key, one in sweep.plan.space["space"].items()]
    slices = ReportSection("The values by each parameter", [Figure(drawings, COLOURS)])
    sections = [_outcome(sweep), _progress(sweep), _importance(sweep), slices, _trials(sweep), _space(sweep)]
    with files.replacing(path) as temporary:
        temporary.write_text(render(title, [one for one in sections if one is not None], partial), encoding="utf-8")
    return path


def _best(sweep: Sweep) -> Trial | None:
    return next((one for one in sweep.trials if one.number == sweep.best), None)


def _outcome(sweep: Sweep) -> ReportSection:
    best = _best(sweep)
    if best is None:
        return ReportSection("What was found", [Text("No trial was trained to its end.")])
    rows: dict[str, Cell] = {
        "best": f"trial {best.number} of {len(sweep.trials)}, {sweep.plan.metric} {best.value:.4f}",
        **{key: escape(text_of(value)) for key, value in best.params.items()},
        "run": best.run_id or "-",
    }
    blocks: list[Block] = [facts(rows)]
    told = (
        f"The best of {len(sweep.trials)} values looks better than it is: some of it is luck, and the more trials the "
        "more. So it is no measure of the model. "
    )
    if (final := sweep.final) is not None:
        told += (
            "Its settings were trained again on training and validation examples together; what follows was measured "
            "on the test split, which no trial has seen."
        )
        blocks.append(Text(told))
        model = f"{final.model_version} {' '.join(f'@{one}' for one in final.aliases)}"
        given = {**sweep.plan.space["set"], **best.params}
        changed = {key: v for key, v in sweep.best_settings.items() if key not in given or given[key] != v}
        blocks.append(
            facts(
                {
                    **{name: f"{value:.4f}" for name, value in final.metrics.items()},
                    "trained": f"{final.epochs} epochs, {final.steps:,} steps",
                    "what differs": escape(", ".join(f"{k}={text_of(v)}" for k, v in changed.items())),
                    "model": escape(model if final.model_version else f"not registered: {final.reason}"),
                    "champion": escape(final.judgement.told if final.judgement else "-"),
                    "run": final.run_id,
                    "report": f"mlruns/runs/{final.run_id}/report/report.html",
                },
                title="The model",
            )
        )
    else:
        blocks.append(Text(told + "What it is worth, the training on all examples shows."))
    return ReportSection("What was found", blocks)


def _progress(sweep: Sweep) -> ReportSection:
    """Return the values in the order of the trials with the best so far, and each trial's curve."""
    better = min if sweep.plan.lower_is_better else max
    whole = [(one.number, one.value) for one in sweep.trials if one.state == "complete" and one.value is not None]
    pruned = [(one.number, one.value) for one in sweep.trials if one.state == "pruned" and one.value is not None]
    so_far: list[tuple[float, float]] = []
    for number, value in whole:
        so_far.append((number, better(value, so_far[-1][1]) if so_far else value))
    shown = [*whole, *pruned]
    frame = svg.Frame(
        (0, max(len(sweep.trials) - 1, 1)), svg.limits(value for _, value in shown), "trial", sweep.plan.metric, True
    )
    frame.line(so_far, "c2")
    frame.dots(whole, "c0")
    frame.dots(pruned, "c1")
    frame.legend(["whole", "pruned", "best"])
    drawings = [frame.drawing(f"{sweep.plan.metric} of {len(shown)} trials, {len(pruned)} of them pruned")]
    curves = [one for one in sweep.trials if one.values and one.same_as is None][:MOST_CURVES]
    if curves:
        most = max(len(one.values) for one in curves)
        ends = svg.limits(value for one in curves for value in one.values)
        frame = svg.Frame((1, max(most, 2)), ends, "epoch", sweep.plan.metric, True)
        for one in curves:
            colour = "c2" if one.number == sweep.best else "c1" if one.state == "pruned" else "c0"
            frame.line(list(enumerate(one.values, start=1)), colour, dots=len(one.values) == 1)
        frame.legend(["whole", "pruned", "best"])
        drawings.append(frame.drawing(f"{sweep.plan.metric} after each epoch of {len(curves)} trials"))
    return ReportSection("Trials as they came", [Figure(drawings, COLOURS)])


def _importance(sweep: Sweep) -> ReportSection | None:
    if not sweep.importance:
        return None
    shown = {key.rpartition(".")[2]: share for key, share in sweep.importance.items()}
    drawing = svg.bars(f"share of the differences in {sweep.plan.metric}", shown, ".0%")
    told = (
        "What part of the differences between whole trials each parameter explains, all over its range (fANOVA; "
        "Hutter et al., 2014), by a forest that was fitted to them. Of few trials it is a rough guess."
    )
    return ReportSection("Which parameter matters", [Figure([drawing], told)])


def _slice(sweep: Sweep, key: str, parameter: Any) -> Markup:
    """Draw the value of each trial over what it had for a parameter."""
    shown = [one for one in sweep.trials if one.value is not None and one.state in ("complete", "pruned")]
    ends = svg.limits(one.value for one in shown if one.value is not None)
    name = key.rpartition(".")[2]
    if isinstance(parameter, dict):
        log, whole = (
            bool(parameter.get("log")),
            isinstance(parameter["low"], int) and isinstance(parameter["high"], int),
        )
        low, high = (math.log10(float(parameter[end])) if log else float(parameter[end]) for end in ("low", "high"))
        label = f"log10 of {name}" if log else name
        frame = svg.Frame((low, high), ends, label, sweep.plan.metric, whole and not log)
        places = {one.number: math.log10(one.params[key]) if log else float(one.params[key]) for one in shown}
    elif all(isinstance(choice, int | float) and not isinstance(choice, bool) for choice in parameter):
        frame = svg.Frame((min(parameter), max(parameter)), ends, name, sweep.plan.metric)
        places = {one.number: float(one.params[key]) for one in shown}
    else:
        names = list(map(text_of, parameter))
        ends_of = (-0.5, len(parameter) - 0.5)
        if len(names) <= MOST_NAMES and len(set(svg.along_axis(names))) == len(names):
            frame = svg.Frame(ends_of, ends, name, sweep.plan.metric, names=names)
        else:
            label = f"{name}: {svg.short(', '.join(names), 48)}"
            frame = svg.Frame(ends_of, ends, label, sweep.plan.metric, True)
        places = {one.number: float(parameter.index(one.params[key])) for one in shown}
    for state, colour in (("pruned", "c1"), ("complete", "c0")):
        frame.dots([(places[one.number], one.value or 0.0) for one in shown if one.state == state], colour)
    frame.dots([(places[one.number], one.value or 0.0) for one in shown if one.number == sweep.best], "c2")
    return frame.drawing(f"{sweep.plan.metric} by {key} of {len(shown)} trials")


def _trials(sweep: Sweep) -> ReportSection:
    keys, rows = sweep_cells(sweep, ranked(sweep))
    header = ["seconds" if name == "s" else name for name in short_names(keys)]
    cells: list[list[Cell]] = [[escape(text) for text in row] for row in rows]
    blocks: list[Block] = [TableBlock(tuple(header), cells[:MOST_TRIALS], 2)]
    if len(cells) > MOST_TRIALS:
        blocks.append(
            TableBlock(tuple(header), cells[MOST_TRIALS:], 2, f"{len(cells) - MOST_TRIALS} more", folded=True)
        )
    if any(one.same_as is not None for one in sweep.trials):
        blocks.append(Text("A trial that is the same as an earlier one has its values, and was not trained again."))
    failed: dict[str, Cell] = {
        f"trial {one.number}": escape(one.reason or "") for one in sweep.trials if one.state == "failed"
    }
    if failed:
        blocks.append(facts(failed, title="Why trials failed"))
    return ReportSection("All trials, the best first", blocks)


def _space(sweep: Sweep) -> ReportSection:
    plan = sweep.plan
    rows: dict[str, Cell] = {key: escape(text_of(one)) for key, one in plan.space["space"].items()}
    same: dict[str, Cell] = {key: escape(text_of(one)) for key, one in plan.space["set"].items()}
    how: dict[str, Cell] = {
        "recipe": escape(plan.space["recipe"] or "params.yaml"),
        "metric": f"{plan.metric}, {'lower' if plan.lower_is_better else 'higher'} is better",
        "sampler": f"{plan.sampler}, seed {plan.space['seed']}",
        "pruner": escape(text_of(plan.space["pruner"])),
        "side by side": str(plan.parallel),
        "data version": sweep.data_version or "not under DVC",
        "commit": sweep.git_commit or "-",
        "sweep": sweep.run_id,
    }
    return ReportSection(
        "What was tried",
        [facts(rows, "The space"), *([facts(same, "For all trials")] if same else []), facts(how, "How")],
    )
