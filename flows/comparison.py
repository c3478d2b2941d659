"""The comparison flow: the same training under several strategies, one after another, then the table."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean, median
from typing import Annotated, Any, TypeVar

import psutil
from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flows import reporting, stages
from flows.operate import deployed, reconciliation
from flows.plan import LOOPS, Pair, Plan, explain, plan
from tasks import config, runs
from tasks.operations import dvc_data
from tasks.process import client
from tasks.process.environment import keep_private
from tasks.records import (
    Comparison,
    ComparisonProgress,
    ComparisonRow,
    PreparedDataset,
    Repeat,
    Run,
    StepTime,
    TrainingResult,
)
from tasks.system import clock
from tasks.system.errors import Interrupted, StratagemError
from tasks.system.machine import core_numbers, usable_cores

T = TypeVar("T")
REPEATS = 2
LONG_SECONDS = 600.0
"""A round that takes longer is not done again unless it is asked for."""
BUSY_SHARE = 0.1
"""Others that use more than this share of the cores are pointed out."""
FIGURES = (
    "examples_per_second", "seconds_per_epoch", "total_seconds", "start_seconds", "setup_seconds", "start_up_seconds",
    "tracing_seconds", "peak_memory_bytes",
)  # fmt: skip
RANGES = {"start_up_seconds": "start_up_range", "peak_memory_bytes": "peak_memory_range"}
"""Which key has what the rounds span of a figure."""


def _flow_run_name() -> str:
    return f"comparison of {', '.join(flow_run.parameters['strategies'])}"


@flow(name="comparison", flow_run_name=_flow_run_name)
def comparison(
    strategies: list[str],
    loops: list[str] | None = None,
    recipe: str | None = None,
    overrides: dict[str, Any] | None = None,
    repeats: Annotated[int, Field(ge=1)] | None = None,
    fresh: bool = False,
) -> Comparison:
    """Train and evaluate one model under each strategy and loop, with the same data, seed, epochs and global batch.

    A comparison of the same that was killed goes on with the trainings that are missing.

    Args:
        strategies: kinds, such as ["one_device", "mirrored"].
        loops: which loops, or all; a pair that does not exist is left out.
        recipe: a name in recipes/, laid over params.yaml.
        overrides: single settings: {"train.epochs": 3}. "strategy.devices" goes to each strategy that has this key,
            "strategy.mirrored.devices" to one.
        repeats: how often each is trained, in rounds; null is twice, and once where a round takes over ten minutes.
        fresh: start a new one, also where one of the same is unfinished.

    Raises:
        UserError: nothing could be started.
        StratagemError: no strategy worked. One that failed beside others that worked is a row with its reason.
    """
    keep_private()
    began = time.perf_counter()
    deployed.check_recipe(recipe)
    asked = strategies, loops or LOOPS, recipe, overrides or {}
    planned = plan(*asked)
    for settings in planned.trainable:
        deployed.check_named(settings, recipe)
    reconciliation.end_crashed_flow_runs()

    def compare() -> Comparison:
        with runs.lock(planned.key, f"comparison of {', '.join(strategies)}", flow_run.id) as run_lock:
            serving = planned.trainable[0]
            client.start_processes(serving, with_cluster=False)  # Imports its framework while DVC looks at the data.
            prepared = stages.data(serving)
            fitted = plan(*asked, prepared)
            dvc_data.tell_choices(recipe, fitted.shared, prepared)
            return _compare(fitted, prepared, repeats, fresh, run_lock, began)

    return reporting.reported(compare)


def _compare(
    planned: Plan, prepared: PreparedDataset, repeats: int | None, fresh: bool, run_lock: runs.RunLock, began: float
) -> Comparison:
    serving = planned.trainable[0]
    run, progress = stages.start_or_resume_comparison(serving, prepared, run_lock, fresh, flow_run.id)
    try:
        rows = [[row for row in progress.rows if _is_of(row, pair)] for pair in planned.pairs]
        rounds = 0
        while rounds < (repeats or REPEATS):
            rounds += 1
            for pair, found in in_order_of(rounds, list(zip(planned.pairs, rows, strict=True))):
                if found and found[0].reason is not None:
                    continue  # It was refused, or it failed.
                if rounds in {repeat.round for row in found for repeat in row.repeats}:
                    continue  # It was measured before the comparison was killed.
                found.append(_train(pair, prepared, run, rounds, progress.sitting))
                if pair.settings is not None and found[-1].reason is None:
                    serving = pair.settings  # Its process, which is there already, also speaks for the comparison.
                    kept = tuple(row for one in rows for row in one if row.reason is None)
                    progress = progress.model_copy(update={"rows": kept})
                    runs.save_progress(run, progress)
            if repeats is None and _seconds_of_round(progress, rounds) > LONG_SECONDS:
                break
        seconds = time.perf_counter() - began
        rounds = max([rounds, *(repeat.round for row in progress.rows for repeat in row.repeats)])  # Kept ones count.
        result = summarise(planned, [median_row(found) for found in rows], prepared, run, seconds, rounds)
        result = stages.report_comparison(serving, run=run, comparison=result)
        page = config.project_root() / run.folder / "comparison.md"
        reporting.publish(page.read_text(encoding="utf-8"), key="comparison", description=run.name)
        if all(row.reason is not None for row in result.rows):
            raise StratagemError(f"no strategy worked. {'; '.join(map(explain, result.rows))}")
    except BaseException as error:
        stages.end_failed(serving, run, error)
        raise
    stages.end_run(serving, run, "FINISHED")
    return result


def _is_of(row: ComparisonRow, pair: Pair) -> bool:
    return (row.strategy, row.loop) == (pair.strategy, pair.loop)


def _seconds_of_round(progress: ComparisonProgress, number: int) -> float:
    return sum(repeat.total_seconds for row in progress.rows for repeat in row.repeats if repeat.round == number)


def in_order_of(number: int, rows: Sequence[T]) -> Sequence[T]:
    """Return rows there and back, by the number of a round: a machine that grows busier is not a row's advantage."""
    return rows[:: 1 if number % 2 else -1]


def _train(pair: Pair, prepared: PreparedDataset, parent: Run, number: int, sitting: int) -> ComparisonRow:
    """Start, train, evaluate and finish one pair in a round; a failure is a row with its reason."""
    row = ComparisonRow(strategy=pair.strategy, loop=pair.loop, reason=pair.reason)
    if pair.settings is None:
        return row
    print(f"\n{pair.strategy}, {pair.loop}{f', round {number}' if number > 1 else ''}", file=sys.stderr)
    client.stop_processes()  # Each has processes of its own, so that none starts with what another left warm.
    load = MachineLoad()
    began = time.perf_counter()
    run = None
    try:
        with runs.lock(runs.key_of(pair.settings), runs.describe(pair.settings), flow_run.id) as run_lock:
            run = stages.start_run(
                pair.settings, prepared=prepared, flow_run_id=flow_run.id, parent_run_id=parent.run_id
            )
            run_lock.note(run_id=run.run_id)
            start_seconds = time.perf_counter() - began
            with stages.finishing(pair.settings, run):
                trained = stages.train(pair.settings, prepared, run)
                evaluated = stages.evaluate(pair.settings, prepared, trained, run)
                total_seconds = round(time.perf_counter() - began - trained.traced_seconds, 3)
    except Interrupted:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"failed: {reason}", file=sys.stderr)
        return row.model_copy(update={"reason": reason, "run_id": run and run.run_id})
    repeat = Repeat(
        run_id=run.run_id,
        round=number,
        examples_per_second=trained.examples_per_second,
        total_seconds=total_seconds,
        load=load.of_others(),
        sitting=sitting,
        peak_memory_bytes=client.peak_memory_bytes(),
        start_up_seconds=round(start_seconds + trained.setup_seconds, 3),
        step_time=trained.step_time,
    )
    return ComparisonRow(
        strategy=pair.strategy,
        loop=pair.loop,
        run_id=run.run_id,
        repeats=(repeat,),
        **trained.model_dump(include={"devices", "num_replicas", "steps", "examples_per_second", "restarts"}),
        metrics=evaluated.metrics,
        peak_memory_bytes=repeat.peak_memory_bytes,
        step_time=repeat.step_time,
        seconds_per_epoch=seconds_per_epoch(trained),
        total_seconds=total_seconds,
        start_seconds=round(start_seconds, 3),
        setup_seconds=trained.setup_seconds,
        start_up_seconds=repeat.start_up_seconds,
        tracing_seconds=trained.first_call_seconds,
    )


class MachineLoad:
    """How busy other programs keep the processor cores of this process, since this object was made."""

    def __init__(self) -> None:
        # This takes a while on a busy machine: it comes first at both ends, so that both are as late.
        self._own = self._of_family()
        self._began, self._all = time.perf_counter(), self._busy()

    def of_others(self) -> float:
        """Return how many cores others kept busy on average; what this process started must still be there."""
        own = self._of_family()
        seconds, used_by_all = time.perf_counter() - self._began, self._busy() - self._all
        mine = sum(used - self._own.get(pid, 0.0) for pid, used in own.items())
        return round(max(0.0, used_by_all - mine) / max(seconds, 1e-9), 2)

    @staticmethod
    def _busy() -> float:
        """Return the seconds that all programs have used these cores."""
        cores, mine = psutil.cpu_times(percpu=True), core_numbers()
        idle = (times.idle + getattr(times, "iowait", 0.0) for times in cores)
        return sum(sum(times) - lazy for i, (times, lazy) in enumerate(zip(cores, idle, strict=True)) if i in mine)

    @staticmethod
    def _of_family() -> dict[int, float]:
        """Return the seconds that this process and those below it have used, by pid."""
        used = {}
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                used[process.pid] = times.user + times.system
        return used


def median_row(found: Sequence[ComparisonRow]) -> ComparisonRow:
    """Return one row of those of all rounds: the medians of their figures, and what some span. The first one failed,
    or counts."""
    first, *_ = worked = [row for row in found if row.reason is None] or found[:1]
    figures: dict[str, Any] = {}
    for name in FIGURES:
        values = [value for row in worked if (value := getattr(row, name)) is not None]
        figures[name] = median(values) if values else None
        if name in RANGES and len(values) > 1:
            figures[RANGES[name]] = (min(values), max(values))
    if figures["peak_memory_bytes"] is not None:
        figures["peak_memory_bytes"] = round(figures["peak_memory_bytes"])
    return first.model_copy(
        update={
            **figures,
            "metrics": {name: median(row.metrics[name] for row in worked) for name in first.metrics},
            "step_time": _median_step([row.step_time for row in worked if row.step_time is not None]),
            "repeats": tuple(repeat for row in worked for repeat in row.repeats),
            "restarts": tuple(why for row in worked for why in row.restarts),
            "failures": tuple(row.reason for row in found[1:] if row.reason is not None),
        }
    )


def _median_step(found: Sequence[StepTime]) -> StepTime | None:
    """Return the one of which half are no longer: medians of the parts would not add up to a step."""
    return sorted(found, key=lambda one: one.total_ms)[(len(found) - 1) // 2] if found else None


def seconds_per_epoch(trained: TrainingResult) -> float | None:
    """Return the mean of the epochs without the first call of the step function; None when there was no other call, or
    no whole epoch."""
    if not trained.epoch_seconds or trained.examples_per_second is None:
        return None
    first, *others = trained.epoch_seconds
    return fmean(others) if others else first - (trained.first_call_seconds or 0)


def summarise(
    planned: Plan, rows: Sequence[ComparisonRow], prepared: PreparedDataset, run: Run, seconds: float, rounds: int
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
        finished_at=clock.now(),
    )


def _against_baseline(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> ComparisonRow:
    """Return a row with its speed-up and efficiency, where there is a row to hold it against: round by round."""
    base = [
        other for other in rows if config.strategy_kinds()[other.strategy].is_baseline and other.examples_per_second
    ]
    base.sort(key=lambda other: other.loop != row.loop)
    if not base:
        return row
    speeds = {repeat.round: repeat.examples_per_second for repeat in base[0].repeats}
    ratios = [
        repeat.examples_per_second / speed
        for repeat in row.repeats
        if (speed := speeds.get(repeat.round)) and repeat.examples_per_second
    ]
    if not ratios:
        return row
    speed_up = median(ratios)
    span = (min(ratios), max(ratios)) if len(ratios) > 1 and row.run_id != base[0].run_id else None
    return row.model_copy(
        update={"speed_up": speed_up, "speed_up_range": span, "efficiency": speed_up / len(row.devices)}
    )


def _note(rows: Sequence[ComparisonRow], num_cores: int) -> str | None:
    """Return what must be said when devices are shares of one processor, or others used it too."""
    said = []
    cores = f"{num_cores} processor core{'s' * (num_cores > 1)}"
    shared = [row for row in rows if row.devices and all("cpu" in device.lower() for device in row.devices)]
    most = max((len(row.devices) for row in shared), default=0)
    if most > 1:
        gained = any(len(row.devices) > 1 and row.differs and (row.speed_up or 0) > 1 for row in shared)
        none = "more devices cannot be why a row is faster" if gained else "no speed-up is to be expected"
        said.append(f"{most} devices share {cores}, which one_device has for itself alone: {none}.")
    loads = [repeat.load for row in rows for repeat in row.repeats]
    if loads and max(loads) > BUSY_SHARE * num_cores:
        said.append(
            f"Other programs kept {min(loads):.1f} to {max(loads):.1f} of {cores} busy meanwhile: measure again on a "
            "quiet machine."
        )
    sittings: dict[int, set[int]] = {}
    for row in rows:
        for repeat in row.repeats:
            sittings.setdefault(repeat.round, set()).add(repeat.sitting)
    if apart := [str(number) for number, found in sorted(sittings.items()) if len(found) > 1]:
        said.append(
            f"The comparison was stopped and went on: what round {' and '.join(apart)} measured lies further apart in "
            "time."
        )
    return " ".join(said) or None
