"""The comparison flow: the same training under several strategies, one after another, then the table."""

import os
import sys
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from flows import reconciliation, stages
from flows.plan import LOOPS, Pair, Plan, explain, plan
from tasks import config, processes, runs
from tasks.errors import Interrupted, StratagemError
from tasks.process.environment import keep_private
from tasks.records import Comparison, ComparisonRow, PreparedDataset, Run, TrainingResult


def _flow_run_name() -> str:
    return f"comparison of {', '.join(flow_run.parameters['strategies'])}"


@flow(name="comparison", flow_run_name=_flow_run_name)
def comparison(
    strategies: list[str],
    loops: list[str] | None = None,
    recipe: str | None = None,
    overrides: dict[str, Any] | None = None,
) -> Comparison:
    """Train and evaluate one model under each strategy and loop, with the same data, seed, epochs and global batch.

    Args:
        strategies: kinds, such as ["one_device", "mirrored"].
        loops: which loops, or all; a pair that does not exist is left out.
        recipe: a name in recipes/, laid over params.yaml.
        overrides: single settings: {"train.epochs": 3}. "strategy.devices" goes to each strategy that has this key,
            "strategy.mirrored.devices" to one.

    Raises:
        UserError: nothing could be begun.
        StratagemError: no strategy worked. One that failed beside others that worked is a row with its reason.
    """
    keep_private()
    began = time.perf_counter()
    planned = plan(strategies, loops or LOOPS, recipe, overrides or {})
    reconciliation.end_abandoned_flow_runs()
    serving = planned.trainable[0]
    key = f"comparison-{uuid.uuid4().hex[:16]}"
    try:
        with runs.hold(key, f"comparison of {', '.join(strategies)}", flow_run.id) as held:
            return _compare(planned, serving, held, began)
    except Interrupted as interrupted:
        stopped: Comparison = stages.cancelled(interrupted)  # Which Prefect takes for the run's state.
        return stopped


def _compare(planned: Plan, serving: config.Settings, held: runs.Hold, began: float) -> Comparison:
    processes.start(serving, whole=False)  # Imports its framework while DVC looks at the data.
    prepared = stages.data(serving)
    run = stages.start_comparison(serving, prepared, held.holder.key, flow_run.id)
    held.note(run_id=run.run_id)
    try:
        rows = []
        for pair in planned.pairs:
            rows.append(_train(pair, prepared, run))
            if pair.settings is not None and rows[-1].reason is None:
                serving = pair.settings  # Its process, which is there already, also speaks for the comparison.
        result = summarise(planned, rows, prepared, run, time.perf_counter() - began)
        stages.report_comparison(serving, run, result)
        page = config.project_root() / run.folder / "comparison.md"
        create_markdown_artifact(page.read_text(encoding="utf-8"), key="comparison", description=run.name)
        if all(row.reason is not None for row in rows):
            raise StratagemError(f"no strategy worked. {'; '.join(map(explain, rows))}")
    except BaseException as error:
        stages.fail(serving, run, error)
        raise
    stages.finish(serving, run, "FINISHED")
    return result


def _train(pair: Pair, prepared: PreparedDataset, parent: Run) -> ComparisonRow:
    """Start, train, evaluate and finish one pair; a failure is a row with its reason."""
    row = ComparisonRow(strategy=pair.strategy, loop=pair.loop, reason=pair.reason)
    if pair.settings is None:
        return row
    print(f"\n{pair.strategy}, {pair.loop}", file=sys.stderr)
    processes.stop()  # Each has processes of its own, so that none starts with what another left warm.
    began = time.perf_counter()
    run = None
    try:
        with runs.hold(runs.key_of(pair.settings), runs.describe(pair.settings), flow_run.id) as held:
            run = stages.start(pair.settings, prepared, flow_run.id, parent.run_id)
            held.note(run_id=run.run_id)
            start_seconds = time.perf_counter() - began
            with stages.finishing(pair.settings, run):
                trained = stages.train(pair.settings, prepared, run)
                evaluated = stages.evaluate(pair.settings, prepared, trained, run)
    except Interrupted:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"failed: {reason}", file=sys.stderr)
        return row.model_copy(update={"reason": reason, "run_id": run and run.run_id})
    return ComparisonRow(
        strategy=pair.strategy,
        loop=pair.loop,
        run_id=run.run_id,
        devices=trained.devices,
        num_replicas=trained.num_replicas,
        steps=trained.steps,
        metrics=evaluated.metrics,
        examples_per_second=trained.examples_per_second,
        seconds_per_epoch=seconds_per_epoch(trained),
        start_seconds=round(start_seconds, 3),
        setup_seconds=trained.setup_seconds,
        tracing_seconds=trained.first_call_seconds,
        restarts=trained.restarts,
    )


def seconds_per_epoch(trained: TrainingResult) -> float | None:
    """Return the mean of the epochs without the first call of the step function; None when there was no other call, or
    no whole epoch."""
    if not trained.epoch_seconds or trained.examples_per_second is None:
        return None
    first, *others = trained.epoch_seconds
    return fmean(others) if others else first - (trained.first_call_seconds or 0)


def summarise(
    planned: Plan, rows: Sequence[ComparisonRow], prepared: PreparedDataset, run: Run, seconds: float
) -> Comparison:
    """Return the whole comparison as one record."""
    train = planned.trainable[0].train
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Comparison(
        run_id=run.run_id,
        folder=run.folder,
        flow_run_id=run.flow_run_id,
        git_commit=run.lineage.git_commit,
        data_version=run.lineage.data_version,
        dataset=prepared.name,
        model=planned.trainable[0].model.name,
        seed=train.seed,
        epochs=train.epochs,
        global_batch_size=train.global_batch_size or 0,
        num_cores=num_cores,
        rows=tuple(_against_one_device(row, rows) for row in rows),
        left_out=planned.left_out,
        note=_note(rows, num_cores),
        seconds=round(seconds, 3),
        finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _against_one_device(row: ComparisonRow, rows: Sequence[ComparisonRow]) -> ComparisonRow:
    """Return a row with its speed-up and efficiency, where there is a row to hold it against."""
    base = [other for other in rows if other.strategy == "one_device" and other.examples_per_second]
    base.sort(key=lambda other: other.loop != row.loop)
    if not base or not row.examples_per_second:
        return row
    speed_up = row.examples_per_second / (base[0].examples_per_second or 1)
    return row.model_copy(update={"speed_up": speed_up, "efficiency": speed_up / len(row.devices)})


def _note(rows: Sequence[ComparisonRow], num_cores: int) -> str | None:
    """Return what must be said when devices are shares of one processor."""
    most = max((len(row.devices) for row in rows if all("cpu" in device.lower() for device in row.devices)), default=0)
    if most < 2:
        return None
    cores = f"{num_cores} processor core{'s' * (num_cores > 1)}"
    return f"{most} devices share {cores}, which one_device has for itself alone: no speed-up is to be expected."
