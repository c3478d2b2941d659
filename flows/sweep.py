"""The sweep flow: trains trials from a space, trains the best one again on all examples, and applies the gate.

Trials train in parallel batches, each in its own stage process. The settings of a whole batch are chosen before it
starts, and the next batch starts when it has ended. So a trial's settings do not depend on the speed of other trials,
and a sweep that was killed continues with the same trials.
"""

import contextvars
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event
from typing import Annotated, Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from pydantic import Field

from flows import reporting, stages, training
from flows.operate import deployed
from tasks import config, records, sweeps
from tasks.operations import dvc_data, pipeline, preconditions
from tasks.process import client
from tasks.process import stages as processes
from tasks.records import Limits, PreparedDataset, Run, Sweep, SweepPlan, TrainingResult, Trial
from tasks.reports.sweep import short_names, sweep_outcome, text_of
from tasks.runs import locks, outcome
from tasks.system import units
from tasks.system.errors import Interrupted, StratagemError, UserError

ASK_AGAIN_SECONDS = 10.0
INDENT = " " * 11


def _flow_run_name() -> str:
    return f"sweep of {flow_run.parameters['space']}"[:200]


@flow(name="sweep", flow_run_name=_flow_run_name)
def sweep(
    space: str,
    trials: Annotated[int, Field(ge=1)] = 20,
    parallel: Annotated[int, Field(ge=1, le=64)] = 1,
    fresh: bool = False,
    overrides: dict[str, Any] | None = None,
) -> Sweep:
    """Try settings from a space, train the best again on all examples, and register that model if it passes the gate.

    The same sweep continues if it was killed, or gets more trials.

    Args:
        space: a name in recipes/sweeps/, or the path of a YAML file.
        trials: number of trials, including those of an unfinished sweep.
        parallel: number of trials that train at the same time, each in its own process.
        fresh: start a new sweep even if one of this name is unfinished.
        overrides: single settings for all trials, which override the space's recipe and `set`: {"train.epochs": 3}.
    """

    def run() -> Sweep:
        root = config.project_root()
        deployed.check_file("space", space, sweeps.spaces(root), root / "recipes" / "sweeps")
        found = sweeps.load(space, None, overrides)
        deployed.check_named(found.example, lambda: sweeps.load(space).example)
        preconditions.check_settings(found.example)
        with locks.lock(sweeps.key_of(found), f"the sweep {found.name}", flow_run.id) as run_lock:
            client.start_processes(found.example, with_cluster=False)  # Imports its framework while DVC works.
            prepared = stages.data(found.example)
            fitted = sweeps.load(space, prepared, overrides)
            dvc_data.tell_choices(fitted.file.recipe, fitted.example, prepared)
            return _sweep(fitted, sweeps.plan_of(fitted, parallel), trials, prepared, run_lock, fresh)

    return reporting.reported(run)


def _sweep(
    space: sweeps.Space, plan: SweepPlan, number: int, prepared: PreparedDataset, run_lock: locks.RunLock, fresh: bool
) -> Sweep:
    began, settings = time.perf_counter(), space.example
    earlier = None if fresh else sweeps.find_sweep(plan, settings, prepared)
    if earlier is None:
        swept = list(space.parameters)
        run = processes.start_sweep(
            settings, prepared=prepared, key=run_lock.holder.key, name=space.name, swept=swept, flow_run_id=flow_run.id
        )
        outcome.save(run, plan)
    else:
        run = processes.resume_parent(settings, prepared=prepared, run=earlier, flow_run_id=flow_run.id)
        print(f"continuing sweep {run.run_id}; --fresh starts a new one", file=sys.stderr)
    run_lock.note(run_id=run.run_id)
    with pipeline.finishing(settings, run):
        with sweeps.Trials(config.project_root() / run.folder, space) as kept:
            train_all(Search(space, prepared, run, Event()), kept, number, plan.parallel)
            done = kept.all()
        result = summarise(space, plan, run, prepared, done, time.perf_counter() - began)
        processes.report_sweep(settings, run=run, sweep=result)
        if result.best is None:
            reasons = dict.fromkeys(one.reason or "" for one in done)
            raise StratagemError(f"no trial finished. {'; '.join(list(reasons)[:3])}")
        # An ordinary run: it continues if it was killed, and trains nothing if it has finished.
        print(f"training trial {result.best} again on the training and validation examples", file=sys.stderr)
        final = training.run_pipeline(space.file.recipe, result.best_settings, True, pipeline.Resumption())
        result = result.model_copy(update={"final": final, "seconds": round(time.perf_counter() - began, 3)})
        processes.report_sweep(settings, run=run, sweep=result)
        reporting.publish(sweep_outcome(result), key="sweep", description=run.name)
    return result


def summarise(
    space: sweeps.Space, plan: SweepPlan, run: Run, prepared: PreparedDataset, done: list[Trial], seconds: float
) -> Sweep:
    """Return the sweep as one record, before its best trial is trained again."""
    best = sweeps.best_of(done, space.lower_is_better)
    final = {}
    if best is not None:
        epochs = len(best.values)
        if space.settings(best.params).evaluate.checkpoint == "best":
            epochs = 1 + best.values.index(best.value)
        final = space.final_settings(best.params, epochs)
    return Sweep(
        **run.model_dump(include={"run_id", "folder", "flow_run_id"}),
        **run.lineage.model_dump(include={"git_commit", "data_version"}),
        dataset=prepared.name,
        model=space.example.model.name,
        plan=plan,
        trials=tuple(done),
        best=best.number if best is not None else None,
        importance=sweeps.importance(space, done),
        best_settings=final,
        seconds=round(seconds, 3),
        finished_at=records.now(),
    )


@dataclass(frozen=True)
class Search:
    """What all trials of a sweep share."""

    space: sweeps.Space
    prepared: PreparedDataset
    parent: Run
    stopped: Event
    """Set if no further stage may start."""

    def check_going_on(self) -> None:
        """Raise ``Interrupted`` if the sweep was stopped."""
        if self.stopped.is_set():
            raise Interrupted("the sweep was stopped")


def train_all(search: Search, trials: sweeps.Trials, number: int, parallel: int) -> None:
    """Train until ``trials`` holds ``number`` trials, including those of an earlier start; ``parallel`` at a time.

    Raises:
        Interrupted: the sweep was stopped; the same command resumes the trials that were training.
        UserError: another process trains one of the trials.
    """
    # Each thread keeps its stage process from trial to trial.
    with ThreadPoolExecutor(parallel, thread_name_prefix="trial") as workers:
        while (batch := sweeps.next_batch(known := trials.all(), number, parallel)) is not None:
            while len(known) < batch.stop:
                params = sweeps.next_params(search.space, known, batch.start)
                known.append(trials.begin(params))
            _train_batch(search, trials, known[: batch.start], known[batch.start :], workers)
    client.stop_other_threads()


def _train_batch(
    search: Search,
    trials: sweeps.Trials,
    before: Sequence[Trial],
    batch: Sequence[Trial],
    workers: ThreadPoolExecutor,
) -> None:
    """Train the trials of a batch that have not ended, and write each when it ends."""
    done = {one.number: one for one in [*before, *batch] if one.state != "running"}
    copies: list[tuple[Trial, int]] = []
    todo: list[tuple[Trial, Limits]] = []
    for one in batch:
        if one.number in done:
            continue
        same = next((other.number for other in [*before, *batch] if other.params == one.params), one.number)
        if same < one.number:
            copies.append((one, same))
        else:
            todo.append((one, sweeps.limits(search.space, one, before)))

    def keep(ended: Trial) -> None:
        trials.end(ended)
        done[ended.number] = ended
        tell(search, ended, list(done.values()))

    running = {workers.submit(contextvars.copy_context().run, trial, search, one, limits) for one, limits in todo}
    try:
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                keep(future.result())
    except BaseException:
        search.stopped.set()
        while running:  # A thread between two stages misses a signal, so repeat it.
            client.interrupt_other_threads()
            _, running = wait(running, ASK_AGAIN_SECONDS)
        raise
    for one, same in copies:
        result = done[same].model_dump(include={"state", "value", "values", "reason"})
        keep(one.model_copy(update={**result, "same_as": same}))


@task(name="trial", task_run_name="trial {one.number}", cache_policy=NO_CACHE)
def trial(search: Search, one: Trial, limits: Limits) -> Trial:
    """Train or resume one trial, to its end or its limits, and return its result.

    Raises:
        Interrupted: the sweep was stopped.
        UserError: another process trains this trial.
    """
    began = time.perf_counter()
    try:
        settings = search.space.settings(one.params)
    except UserError as error:
        return one.model_copy(update={"state": "failed", "reason": str(error)})
    key = f"{search.parent.key}-{one.number}"
    with locks.lock(key, f"trial {one.number} of {search.space.name}", search.parent.flow_run_id):
        run = sweeps.run_of(search.parent, settings)
        try:
            search.check_going_on()
            if run is None:
                run = processes.start_trial(
                    settings, prepared=search.prepared, run=search.parent, number=one.number, limits=limits
                )
            else:
                run = processes.resume_trial(
                    settings, prepared=search.prepared, run=run, limits=limits, flow_run_id=search.parent.flow_run_id
                )
            search.check_going_on()
            trained = outcome.load(run, TrainingResult)
            if trained is None:
                with stages.epochs_logged(run):
                    trained = client.train(settings, search.prepared, run)
        except Exception as error:
            if isinstance(error, Interrupted) or not isinstance(error, StratagemError):
                # The run may have started before this process received its id.
                begun = run or sweeps.run_of(search.parent, settings)
                if begun is not None:
                    pipeline.end_failed(settings, begun, error)
                raise
            found = {"state": "failed", "reason": " ".join(str(error).split())}
        else:
            found = judged(search.space, settings, run, trained)
        seconds = round(time.perf_counter() - began, 3)
        ended = one.model_copy(update={**found, "run_id": run and run.run_id, "seconds": seconds})
        if run is not None:
            processes.end_trial(settings, run=run, trial=ended)
        client.give_places_up(settings)  # Another trial of the batch may wait for them.
    return ended


def judged(space: sweeps.Space, settings: config.Settings, run: Run, trained: TrainingResult) -> dict[str, Any]:
    """Return how a trial has ended, with the value after its last epoch, or with the best value if the settings
    evaluate the best checkpoint."""
    values = trained.history[space.metric]
    if wrong := [epoch for epoch, value in enumerate(values, 1) if not math.isfinite(value)]:
        return {"state": "failed", "reason": f"{space.metric} was not a finite number after epoch {wrong[0]}"}
    limits = outcome.load(run, Limits)
    if limits is not None and (missed := limits.missed(values)) is not None:
        why = (
            f"{Trial.pruned_because} {missed}: {space.metric} {units.metric(values[missed - 1])}, and the limit "
            f"from earlier trials was {units.metric(limits.by_epoch[missed])}"
        )
        return {"state": "pruned", "value": values[-1], "values": values, "reason": why}
    better = min if space.lower_is_better else max
    value = better(values) if settings.evaluate.checkpoint == "best" else values[-1]
    return {"state": "complete", "value": value, "values": values}


def tell(search: Search, ended: Trial, done: Sequence[Trial]) -> None:
    """Print a line for a trial that has ended, with the best so far."""
    best = sweeps.best_of(done, search.space.lower_is_better)
    how = f"as trial {ended.same_as}" if ended.same_as is not None else ended.state
    value = units.metric(ended.value)
    so_far = "" if best is None else f"  best {units.metric(best.value)}, trial {best.number}"
    print(f"trial {ended.number:>3}  {how:<9} {value}{so_far}", file=sys.stderr)
    names = short_names(list(ended.params))
    shown = ", ".join(f"{name} {text_of(one)}" for name, one in zip(names, ended.params.values(), strict=True))
    more = [ended.reason or ""] if ended.state == "failed" else []
    width = shutil.get_terminal_size().columns
    for text in [shown, *more]:
        print(textwrap.fill(text, width, initial_indent=INDENT, subsequent_indent=INDENT), file=sys.stderr, flush=True)
