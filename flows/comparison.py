"""The comparison flow: trains a model under several strategies, one after another, and tabulates the results."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean, median
from typing import Annotated, Any

import psutil
from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flows import reporting, stages
from flows.operate import deployed
from flows.pairs import LOOPS, ComparisonPlan, Pair, explain, plan
from tasks import config, records
from tasks.operations import dvc_data, pipeline
from tasks.process import client
from tasks.process import stages as processes
from tasks.records import Comparison, ComparisonProgress, ComparisonRow, PreparedDataset, Repeat, Run
from tasks.reports.comparison import base_of
from tasks.runs import locks, outcome, resume
from tasks.system import units
from tasks.system.errors import Interrupted, StratagemError, UserError
from tasks.system.machine import core_numbers, usable_cores

REPEATS = 2
LONG_SECONDS = 600.0
"""A round that takes longer is repeated only if ``repeats`` is given."""
BUSY_SHARE = 0.1
"""The note mentions other programs that use more than this share of the cores."""
FIGURES = (
    "examples_per_second", "seconds_per_epoch", "total_seconds", "start_up_seconds", "tracing_seconds",
    "peak_memory_bytes",
)  # fmt: skip


def _flow_run_name() -> str:
    return f"comparison of {', '.join(flow_run.parameters['strategies'])}"


@flow(name="comparison", flow_run_name=_flow_run_name)
def comparison(
    strategies: list[str],
    loops: list[str] | None = None,
    recipe: str | list[str] | None = None,
    overrides: dict[str, Any] | None = None,
    repeats: Annotated[int, Field(ge=1)] | None = None,
    fresh: bool = False,
) -> Comparison:
    """Train and evaluate one model under each strategy and loop, with the same data, seeds, epochs and global batch.

    If the same comparison was killed, it continues with the missing trainings.

    Args:
        strategies: kinds, such as ["one_device", "mirrored"].
        loops: the loops, by default all; unsupported combinations are skipped.
        recipe: a name in recipes/, which overrides params.yaml; or several, each overriding those before it.
        overrides: single settings: {"train.epochs": 3}. "strategy.devices" applies to each strategy that has this key,
            "strategy.mirrored.devices" to one.
        repeats: how often to train each, in rounds; null means twice, or once if a round takes over ten minutes. Each
            round has its own seed: `train.seed`, then the next numbers.
        fresh: start a new comparison even if the same one is unfinished.

    Raises:
        UserError: nothing can be started.
        StratagemError: no strategy worked; a UserError if it is the same mistake in each. If only some fail, each of
            them becomes a row with its reason.
    """
    began = time.perf_counter()

    def compare() -> Comparison:
        deployed.check_recipe(recipe)
        asked = strategies, loops or LOOPS, recipe, overrides or {}
        planned = plan(*asked)
        for settings in planned.trainable:
            deployed.check_named(settings, lambda: config.load(recipe))
        with locks.lock(planned.key, f"comparison of {', '.join(strategies)}", flow_run.id) as run_lock:
            serving = planned.trainable[0]
            client.start_processes(serving, with_cluster=False)  # Imports its framework while DVC works.
            prepared = stages.data(serving)
            fitted = planned.on(prepared, fresh)
            dvc_data.tell_choices(recipe, fitted.shared, prepared)
            if fitted.note is not None:
                print(fitted.note, file=sys.stderr)
            return _compare(fitted, prepared, repeats, run_lock, began)

    return reporting.reported(compare)


def _compare(
    planned: ComparisonPlan, prepared: PreparedDataset, repeats: int | None, run_lock: locks.RunLock, began: float
) -> Comparison:
    serving, rows = planned.trainable[0], []
    mistakes: set[str] = set()
    if planned.unfinished is None:
        run = processes.start_comparison(serving, prepared=prepared, key=run_lock.holder.key, flow_run_id=flow_run.id)
    else:
        run = processes.resume_parent(serving, prepared=prepared, run=planned.unfinished, flow_run_id=flow_run.id)
        rows = resume.measured_rows(run)
        print(
            f"resuming comparison {run.run_id}, which is unfinished: {units.count(len(rows), 'measured training')} "
            f"{'are' if len(rows) > 1 else 'is'} kept; --fresh starts a new one",
            file=sys.stderr,
        )
    run_lock.note(run_id=run.run_id)

    def rows_of(pair: Pair) -> list[ComparisonRow]:
        return [row for row in rows if (row.strategy, row.loop) == (pair.strategy, pair.loop)]

    try:
        for number in range(1, (repeats or REPEATS) + 1):
            # Reverse the order in each round, so that a machine that gets busier favours no row.
            for planned_pair in planned.pairs[:: 1 if number % 2 else -1]:
                pair, found = planned_pair.in_round(number), rows_of(planned_pair)
                refused = found and found[0].reason is not None
                if refused or number in {repeat.round for row in found for repeat in row.repeats}:
                    continue
                rows.append(_train(pair, prepared, run, number, mistakes))
                if pair.settings is not None and rows[-1].reason is None:
                    serving = pair.settings  # Its running process also reports for the comparison.
                    outcome.save(run, ComparisonProgress(rows=tuple(row for row in rows if row.reason is None)))
            took = sum(repeat.total_seconds for row in rows for repeat in row.repeats if repeat.round == number)
            if repeats is None and took > LONG_SECONDS:
                break
        seconds = time.perf_counter() - began
        rounds = max([number, *(repeat.round for row in rows for repeat in row.repeats)])
        medians = [median_row(rows_of(pair)) for pair in planned.pairs]
        result = summarise(planned, medians, prepared, run, seconds, rounds)
        result = processes.report_comparison(serving, run=run, comparison=result)
        page = config.project_root() / run.folder / "comparison.md"
        reporting.publish(page.read_text(encoding="utf-8"), key="comparison", description=run.name)
        if all(row.reason is not None for row in result.rows):
            reasons = {str(row.reason) for row in result.rows}
            if len(reasons) == 1 and reasons <= mistakes:
                raise UserError(reasons.pop())
            raise StratagemError(f"no strategy worked. {'; '.join(map(explain, result.rows))}")
    except BaseException as error:
        pipeline.end_failed(serving, run, error)
        raise
    processes.end_run(serving, run=run, status="FINISHED")
    return result


def _train(pair: Pair, prepared: PreparedDataset, parent: Run, number: int, mistakes: set[str]) -> ComparisonRow:
    """Start, train, evaluate and finish one pair in a round; a failure becomes a row with its reason, which is added to
    the mistakes if it is the user's."""
    row = ComparisonRow(strategy=pair.strategy, loop=pair.loop, reason=pair.reason)
    if pair.settings is None:
        return row
    print(f"\n{pair.strategy}, {pair.loop}{f', round {number}' if number > 1 else ''}", file=sys.stderr)
    client.stop_processes()  # Each starts new processes, so that none benefits from another's caches.
    before, began = _seconds_of_others(), time.perf_counter()
    run = None
    try:
        with locks.lock(locks.key_of(pair.settings), locks.describe(pair.settings), flow_run.id) as run_lock:
            run = processes.start_run(
                pair.settings, prepared=prepared, flow_run_id=flow_run.id, parent_run_id=parent.run_id
            )
            run_lock.note(run_id=run.run_id)
            start_seconds = time.perf_counter() - began
            with pipeline.finishing(pair.settings, run):
                trained = stages.train(pair.settings, prepared, run)
                evaluated = stages.evaluate(pair.settings, prepared, trained, run)
                total_seconds = round(time.perf_counter() - began - trained.traced_seconds, 3)
    except Interrupted:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"failed: {reason}", file=sys.stderr)
        mistakes.update([reason] if isinstance(error, UserError) else [])
        return row.model_copy(update={"reason": reason, "run_id": run and run.run_id})
    load = round(max(0.0, (_seconds_of_others() - before) / (time.perf_counter() - began)), 2)
    figures: dict[str, Any] = {
        "run_id": run.run_id,
        "examples_per_second": trained.examples_per_second,
        "total_seconds": total_seconds,
        "peak_memory_bytes": client.peak_memory_bytes(),
        "start_up_seconds": round(start_seconds + trained.setup_seconds, 3),
        "step_time": trained.step_time,
    }
    seconds_per_epoch = None
    if trained.epoch_seconds and trained.examples_per_second is not None:  # None if there was no second call.
        first, *others = trained.epoch_seconds
        seconds_per_epoch = fmean(others) if others else first - (trained.first_call_seconds or 0)
    return row.model_copy(
        update={
            **figures,
            **trained.model_dump(include={"num_replicas", "steps", "devices", "restarts"}),
            "repeats": (Repeat(**figures, round=number, load=load),),
            "metrics": evaluated.metrics,
            "seconds_per_epoch": seconds_per_epoch,
            "tracing_seconds": trained.first_call_seconds,
        }
    )


def _seconds_of_others() -> float:
    """Return the CPU seconds that other programs have used so far on the cores of this process, up to a constant.

    The children of this process must still run.
    """
    cores = [core for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in core_numbers()]
    busy = sum(core.user + core.nice + core.system for core in cores)
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            own = process.cpu_times()
            busy -= own.user + own.system + own.children_user + own.children_system
    return busy


def median_row(found: Sequence[ComparisonRow]) -> ComparisonRow:
    """Return one row for all rounds, with the medians and some ranges of their figures; the first row if all failed.

    Its metrics are those of the first round, which has the given seed.
    """
    worked = [row for row in found if row.reason is None] or found[:1]
    # A resumed comparison may have measured the first round last.
    first = min(worked, key=lambda row: row.repeats[0].round if row.repeats else 0)
    figures: dict[str, Any] = {}
    for name in FIGURES:
        values = [value for row in worked if (value := getattr(row, name)) is not None]
        figures[name] = median(values) if values else None
    if figures["peak_memory_bytes"] is not None:
        figures["peak_memory_bytes"] = round(figures["peak_memory_bytes"])
    steps = sorted((row.step_time for row in worked if row.step_time is not None), key=lambda one: one.total_ms)
    metrics = {name: [row.metrics[name] for row in worked] for name in first.metrics if len(worked) > 1}
    return first.model_copy(
        update={
            **figures,
            "metric_ranges": {name: (min(values), max(values)) for name, values in metrics.items()},
            # The step of one round: medians of the parts would not add up to a step.
            "step_time": steps[(len(steps) - 1) // 2] if steps else None,
            "repeats": tuple(repeat for row in worked for repeat in row.repeats),
            "restarts": tuple(why for row in worked for why in row.restarts),
            "failures": tuple(row.reason for row in found[1:] if row.reason is not None),
        }
    )


def summarise(
    planned: ComparisonPlan,
    rows: Sequence[ComparisonRow],
    prepared: PreparedDataset,
    run: Run,
    seconds: float,
    rounds: int,
) -> Comparison:
    """Return the whole comparison as one record."""
    train = planned.trainable[0].train
    num_cores = usable_cores()
    rows = [_against_baseline(row, rows) for row in rows]
    return Comparison(
        **run.model_dump(include={"run_id", "folder", "flow_run_id"}),
        **run.lineage.model_dump(include={"git_commit", "data_version"}),
        dataset=prepared.name,
        model=planned.trainable[0].model.name,
        seed=train.seed,
        epochs=train.epochs,
        global_batch_size=train.global_batch_size or 0,
        num_cores=num_cores,
        rounds=rounds,
        rows=tuple(rows),
        left_out=planned.left_out,
        note=_note(rows, num_cores),
        seconds=round(seconds, 3),
        finished_at=records.now(),
    )


def _against_baseline(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> ComparisonRow:
    """Return a row with its speed-up and efficiency over one device, compared per round, if one device was measured."""
    if (base := base_of(row, rows)) is None:
        return row
    speeds = {repeat.round: repeat.examples_per_second for repeat in base.repeats}
    ratios = [
        repeat.examples_per_second / speed
        for repeat in row.repeats
        if (speed := speeds.get(repeat.round)) and repeat.examples_per_second
    ]
    if not ratios:
        return row
    speed_up = median(ratios)
    span = (min(ratios), max(ratios)) if len(ratios) > 1 and row.run_id != base.run_id else None
    return row.model_copy(
        update={"speed_up": speed_up, "speed_up_range": span, "efficiency": speed_up / len(row.devices)}
    )


def _note(rows: Sequence[ComparisonRow], num_cores: int) -> str | None:
    """Return a note if the devices share one processor or other programs used it, else None."""
    said = []
    cores = units.count(num_cores, "processor core")
    shared = [row for row in rows if row.devices and all("cpu" in device.lower() for device in row.devices)]
    most = max((len(row.devices) for row in shared), default=0)
    if most > 1:
        gained = any(len(row.devices) > 1 and row.differs and (row.speed_up or 0) > 1 for row in shared)
        none = "more devices cannot explain a faster row" if gained else "expect no speed-up"
        said.append(f"{most} devices share {cores}, which one_device has to itself: {none}.")
    loads = [repeat.load for row in rows for repeat in row.repeats]
    if loads and max(loads) > BUSY_SHARE * num_cores:
        said.append(
            f"Other programs kept up to {max(loads):.1f} of {cores} busy during the measurement: repeat it on a quiet "
            "machine."
        )
    return " ".join(said) or None
