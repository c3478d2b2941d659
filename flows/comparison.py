"""The comparison flow: the same training under several strategies, one after another, then the table."""

import sys
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Annotated, Any, TypeVar

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flows import reconciliation, reporting, stages
from flows.machine_load import MachineLoad
from flows.plan import LOOPS, Pair, Plan, explain, plan
from tasks import config, runs
from tasks.errors import Interrupted, StratagemError
from tasks.machine import usable_cores
from tasks.process import client
from tasks.process.environment import keep_private
from tasks.records import Comparison, ComparisonRow, PreparedDataset, Repeat, Run, TrainingResult

T = TypeVar("T")
REPEATS = 2
LONG_SECONDS = 600.0
"""A round that takes longer is not done again unless it is asked for."""
BUSY_SHARE = 0.1
"""Others that use more than this share of the cores are pointed out."""
FIGURES = (
    "examples_per_second", "seconds_per_epoch", "total_seconds", "start_seconds", "setup_seconds", "tracing_seconds",
)  # fmt: skip


def _flow_run_name() -> str:
    return f"comparison of {', '.join(flow_run.parameters['strategies'])}"


@flow(name="comparison", flow_run_name=_flow_run_name)
def comparison(
    strategies: list[str],
    loops: list[str] | None = None,
    recipe: str | None = None,
    overrides: dict[str, Any] | None = None,
    repeats: Annotated[int, Field(ge=1)] | None = None,
) -> Comparison:
    """Train and evaluate one model under each strategy and loop, with the same data, seed, epochs and global batch.

    Args:
        strategies: kinds, such as ["one_device", "mirrored"].
        loops: which loops, or all; a pair that does not exist is left out.
        recipe: a name in recipes/, laid over params.yaml.
        overrides: single settings: {"train.epochs": 3}. "strategy.devices" goes to each strategy that has this key,
            "strategy.mirrored.devices" to one.
        repeats: how often each is trained, in rounds; null is twice, and once where a round takes over ten minutes.

    Raises:
        UserError: nothing could be started.
        StratagemError: no strategy worked. One that failed beside others that worked is a row with its reason.
    """
    keep_private()
    began = time.perf_counter()
    planned = plan(strategies, loops or LOOPS, recipe, overrides or {})
    reconciliation.end_crashed_flow_runs()
    serving = planned.trainable[0]
    key = f"comparison-{uuid.uuid4().hex[:16]}"

    def compare() -> Comparison:
        with runs.lock(key, f"comparison of {', '.join(strategies)}", flow_run.id) as run_lock:
            return _compare(planned, repeats, serving, run_lock, began)

    return reporting.reported(compare)


def _compare(
    planned: Plan, repeats: int | None, serving: config.Settings, run_lock: runs.RunLock, began: float
) -> Comparison:
    client.start_processes(serving, with_cluster=False)  # Imports its framework while DVC looks at the data.
    prepared = stages.data(serving)
    run = stages.start_comparison(serving, prepared, run_lock.holder.key, flow_run.id)
    run_lock.note(run_id=run.run_id)
    try:
        rows: list[list[ComparisonRow]] = [[] for _ in planned.pairs]
        first_round_began, rounds = time.perf_counter(), 0
        while rounds < (repeats or REPEATS):
            rounds += 1
            for pair, found in in_order_of(rounds, list(zip(planned.pairs, rows, strict=True))):
                if found and found[0].reason is not None:
                    continue  # It was refused, or it failed.
                found.append(_train(pair, prepared, run, rounds))
                if pair.settings is not None and found[-1].reason is None:
                    serving = pair.settings  # Its process, which is there already, also speaks for the comparison.
            if repeats is None and time.perf_counter() - first_round_began > LONG_SECONDS:
                break
        result = summarise(
            planned, [median_row(found) for found in rows], prepared, run, time.perf_counter() - began, rounds
        )
        stages.report_comparison(serving, run, result)
        page = config.project_root() / run.folder / "comparison.md"
        reporting.publish(page.read_text(encoding="utf-8"), key="comparison", description=run.name)
        if all(row.reason is not None for row in result.rows):
            raise StratagemError(f"no strategy worked. {'; '.join(map(explain, result.rows))}")
    except BaseException as error:
        stages.end_failed(serving, run, error)
        raise
    stages.end_run(serving, run, "FINISHED")
    return result


def in_order_of(number: int, rows: Sequence[T]) -> Sequence[T]:
    """Return rows there and back, by the number of a round: a machine that grows busier is no row's advantage."""
    return rows[:: 1 if number % 2 else -1]


def _train(pair: Pair, prepared: PreparedDataset, parent: Run, number: int) -> ComparisonRow:
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
            run = stages.start_run(pair.settings, prepared, flow_run.id, parent.run_id)
            run_lock.note(run_id=run.run_id)
            start_seconds = time.perf_counter() - began
            with stages.finishing(pair.settings, run):
                trained = stages.train(pair.settings, prepared, run)
                evaluated = stages.evaluate(pair.settings, prepared, trained, run)
                total_seconds = round(time.perf_counter() - began, 3)
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
    )
    return ComparisonRow(
        strategy=pair.strategy,
        loop=pair.loop,
        run_id=run.run_id,
        repeats=(repeat,),
        **trained.model_dump(include={"devices", "num_replicas", "steps", "examples_per_second", "restarts"}),
        metrics=evaluated.metrics,
        seconds_per_epoch=seconds_per_epoch(trained),
        total_seconds=total_seconds,
        start_seconds=round(start_seconds, 3),
        setup_seconds=trained.setup_seconds,
        tracing_seconds=trained.first_call_seconds,
    )


def median_row(found: Sequence[ComparisonRow]) -> ComparisonRow:
    """Return one row of those of all rounds: the medians of their figures. The first one failed, or counts."""
    first, *_ = worked = [row for row in found if row.reason is None] or found[:1]
    figures: dict[str, Any] = {}
    for name in FIGURES:
        values = [value for row in worked if (value := getattr(row, name)) is not None]
        figures[name] = median(values) if values else None
    return first.model_copy(
        update={
            **figures,
            "metrics": {name: median(row.metrics[name] for row in worked) for name in first.metrics},
            "repeats": tuple(repeat for row in worked for repeat in row.repeats),
            "restarts": tuple(why for row in worked for why in row.restarts),
            "failures": tuple(row.reason for row in found[1:] if row.reason is not None),
        }
    )


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
    rows = [_against_one_device(row, rows) for row in rows]
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
        finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _against_one_device(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> ComparisonRow:
    """Return a row with its speed-up and efficiency, where there is a row to hold it against: round by round."""
    base = [other for other in rows if other.strategy == "one_device" and other.examples_per_second]
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
    return " ".join(said) or None
