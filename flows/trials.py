"""The trials of a sweep: in batches of those that train side by side, each in a stage process of its own.

A batch is suggested as a whole before it begins, and ends before the next one does. So what a trial is given depends
on no trial's speed, and a sweep that was killed goes on with the trials that it would have had.
"""

import contextvars
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows.training_log import epochs_logged
from tasks import reports, runs, sweeps
from tasks.operations import pipeline
from tasks.process import client, stages
from tasks.records import Limits, PreparedDataset, Run, SweepPlan, TrainingResult, Trial
from tasks.system.errors import Interrupted, StratagemError, UserError

ASK_AGAIN_SECONDS = 10.0
INDENT = " " * 11


@dataclass(frozen=True)
class Search:
    """What all trials of a sweep have in common."""

    space: sweeps.Space
    plan: SweepPlan
    prepared: PreparedDataset
    parent: Run
    stopped: Event
    """Set when no stage is to begin any more."""


def train_all(search: Search, trials: sweeps.Trials, number: int) -> None:
    """Train until there are so many trials, with those of an earlier start.

    Raises:
        Interrupted: somebody stopped it; what was at work is resumed by the same command.
        UserError: another process trains one of them.
    """
    parallel = search.plan.parallel
    with _workers(parallel) as workers:
        while True:
            known = trials.all()
            batch = sweeps.next_batch(known, number, parallel)
            if batch is None:
                return
            while len(known) < batch.stop:
                params = sweeps.next_params(search.space, known, batch.start, search.plan.lower_is_better)
                known.append(trials.begin(params))
            _train_batch(search, trials, known[: batch.start], known[batch.start :], workers)


def _train_batch(
    search: Search,
    trials: sweeps.Trials,
    before: Sequence[Trial],
    batch: Sequence[Trial],
    workers: ThreadPoolExecutor | None,
) -> None:
    """Train the trials of a batch that have not ended; each is written as it ends."""
    done = {one.number: one for one in [*before, *batch] if one.state != "running"}
    copies: list[tuple[Trial, int]] = []
    todo: list[Trial] = []
    for one in batch:
        if one.number in done:
            continue
        same = next((other.number for other in [*before, *batch] if other.params == one.params), one.number)
        if same < one.number:
            copies.append((one, same))
        else:
            todo.append(one)
    limits = {one.number: _limits(search, before, one) for one in todo}

    def keep(ended: Trial) -> None:
        trials.end(ended)
        done[ended.number] = ended
        tell(search, ended, list(done.values()))

    if workers is None:
        for one in todo:
            keep(trial(search, one, limits[one.number]))
    else:
        _side_by_side(search, [(one, limits[one.number]) for one in todo], workers, keep)
    for one, same in copies:
        result = done[same].model_dump(include={"state", "value", "values", "reason"})
        keep(one.model_copy(update={**result, "values": done[same].values, "same_as": same}))


def _limits(search: Search, before: Sequence[Trial], one: Trial) -> Limits:
    plan = search.plan
    try:
        epochs = search.space.settings(one.params).train.epochs
    except UserError:  # The trial itself says so.
        epochs = 1
    earlier = [other.values for other in before if other.same_as is None]
    return sweeps.limits(search.space.pruner, one.number, epochs, earlier, plan.metric, plan.lower_is_better)


@contextmanager
def _workers(parallel: int) -> Iterator[ThreadPoolExecutor | None]:
    """Give threads for trials side by side, whose stage processes live from trial to trial; None for one at a time."""
    if parallel == 1:
        yield None
        return
    try:
        with ThreadPoolExecutor(parallel, thread_name_prefix="trial") as workers:
            yield workers
    finally:
        client.stop_other_threads()


def _side_by_side(
    search: Search,
    todo: Sequence[tuple[Trial, Limits]],
    workers: ThreadPoolExecutor,
    keep: Callable[[Trial], None],
) -> None:
    futures: set[Future[Trial]] = {
        workers.submit(contextvars.copy_context().run, trial, search, one, limits) for one, limits in todo
    }
    try:
        while futures:
            ended, futures = wait(futures, return_when=FIRST_COMPLETED)
            for future in ended:
                keep(future.result())
    except BaseException:
        search.stopped.set()
        while futures:  # A signal between two stages is heard by none.
            client.interrupt_other_threads()
            _, futures = wait(futures, ASK_AGAIN_SECONDS)
        raise


@task(name="trial", task_run_name="trial {one.number}", cache_policy=NO_CACHE)
def trial(search: Search, one: Trial, limits: Limits) -> Trial:
    """Train one trial, or train it on, to its end or its limits; return how it ended.

    Raises:
        Interrupted: somebody stopped it.
        UserError: another process trains it.
    """
    began = time.perf_counter()
    try:
        settings = search.space.settings(one.params)
    except UserError as error:
        return one.model_copy(update={"state": "failed", "reason": str(error)})
    key = f"{search.parent.key}-{one.number}"
    with runs.lock(key, f"trial {one.number} of {search.plan.name}", search.parent.flow_run_id):
        run = sweeps.run_of(search.parent, settings)
        try:
            _go_on(search)
            if run is None:
                run = stages.start_trial(
                    settings, prepared=search.prepared, run=search.parent, number=one.number, limits=limits
                )
            else:
                run = stages.resume_trial(
                    settings, prepared=search.prepared, run=run, limits=limits, flow_run_id=search.parent.flow_run_id
                )
            _go_on(search)
            trained = runs.load_result(run, TrainingResult)
            if trained is None:
                with epochs_logged(run, settings.train.epochs):
                    trained = client.train(settings, search.prepared, run)
        except Exception as error:
            if isinstance(error, Interrupted) or not isinstance(error, StratagemError):
                # It may have been begun, and the answer that names it was not waited for.
                begun = run or sweeps.run_of(search.parent, settings)
                if begun is not None:
                    pipeline.end_failed(settings, begun, error)
                raise
            failed = {"state": "failed", "reason": " ".join(str(error).split()), "run_id": run and run.run_id}
            ended = one.model_copy(update={**failed, "seconds": _since(began)})
        else:
            ended = judged(one, search, run, trained, began)
        if run is not None:
            client.end_trial(settings, run, ended)
        client.give_places_up(settings)  # Another trial of the batch may wait for them.
    return ended


def _go_on(search: Search) -> None:
    if search.stopped.is_set():
        raise Interrupted("the sweep was stopped")


def judged(one: Trial, search: Search, run: Run, trained: TrainingResult, began: float) -> Trial:
    """Return a trial with what its training gave: the value after its last epoch, or the best, as the settings say
    which model is evaluated."""
    values = trained.history[search.plan.metric]
    if wrong := [epoch for epoch, value in enumerate(values, 1) if not math.isfinite(value)]:
        why = f"{search.plan.metric} was not a finite number after epoch {wrong[0]}"
        return one.model_copy(update={"state": "failed", "reason": why, "run_id": run.run_id, "seconds": _since(began)})
    limits = runs.load_limits(run)
    missed = limits.missed(values) if limits is not None else None
    better = min if search.plan.lower_is_better else max
    value = better(values) if search.space.settings(one.params).evaluate.checkpoint == "best" else values[-1]
    found = {"state": "complete", "value": value, "values": values, "run_id": run.run_id, "seconds": _since(began)}
    if missed is not None and limits is not None:
        why = (
            f"pruned after epoch {missed}: {search.plan.metric} {values[missed - 1]:.4f}, and the limit of the trials "
            f"before it was {limits.by_epoch[missed]:.4f}"
        )
        found |= {"state": "pruned", "value": values[-1], "reason": why}
    return one.model_copy(update=found)


def _since(began: float) -> float:
    return round(time.perf_counter() - began, 3)


def tell(search: Search, ended: Trial, done: Sequence[Trial]) -> None:
    """Print a line for a trial that has ended, with the best so far."""
    best = sweeps.best_of(done, search.plan.lower_is_better)
    how = f"as trial {ended.same_as}" if ended.same_as is not None else ended.state
    value = "-" if ended.value is None else f"{ended.value:.4f}"
    so_far = "" if best is None else f"  best {best.value:.4f}, trial {best.number}"
    print(f"trial {ended.number:>3}  {how:<9} {value}{so_far}", file=sys.stderr)
    names = reports.short_names(list(ended.params))
    shown = ", ".join(f"{name} {reports.text_of(one)}" for name, one in zip(names, ended.params.values(), strict=True))
    more = [ended.reason or ""] if ended.state == "failed" else []
    width = shutil.get_terminal_size().columns
    for text in [shown, *more]:
        print(textwrap.fill(text, width, initial_indent=INDENT, subsequent_indent=INDENT), file=sys.stderr, flush=True)
