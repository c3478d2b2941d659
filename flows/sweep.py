"""The sweep flow: trials out of a space, the best one trained again on all examples, and the gate."""

import sys
import time
from pathlib import Path
from threading import Event
from typing import Annotated

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from flows import reporting, stages, training, trials
from flows.operate import deployed, reconciliation
from flows.plan import plan_of_sweep
from tasks import config, runs, sweeps
from tasks.operations import dvc_data, pipeline, preconditions
from tasks.process import client
from tasks.process.environment import keep_private
from tasks.records import PreparedDataset, Run, RunSummary, Sweep, SweepPlan, Trial
from tasks.system import clock
from tasks.system.errors import StratagemError


def _flow_run_name() -> str:
    return f"sweep of {flow_run.parameters['space']}"[:200]


@flow(name="sweep", flow_run_name=_flow_run_name)
def sweep(
    space: str,
    trials: Annotated[int, Field(ge=1)] = 20,
    parallel: Annotated[int, Field(ge=1, le=64)] = 1,
    fresh: bool = False,
) -> Sweep:
    """Try settings out of a space, train the best again on all examples, and register it if the gate lets it.

    The same sweep goes on where it was killed, or with more trials.

    Args:
        space: a name in recipes/sweeps/, or the path of a YAML file.
        trials: how many, with those of an earlier start.
        parallel: so many train side by side, each in a process of its own.
        fresh: begin a new sweep in any case.
    """
    keep_private()
    root = config.project_root()
    deployed.check_file("space", space, sweeps.spaces(root), root / "recipes" / "sweeps")
    found = sweeps.load(space)
    sweeps.refuse_foreign_cluster(found, pipeline.in_foreign_cluster(found.example))
    preconditions.check_devices(found.example)
    reconciliation.end_crashed_flow_runs()
    return reporting.reported(lambda: _locked(space, trials, parallel, fresh))


def _locked(name: str, number: int, parallel: int, fresh: bool) -> Sweep:
    space = sweeps.load(name)
    with runs.lock(sweeps.key_of(space), f"the sweep {space.name}", flow_run.id) as run_lock:
        client.start_processes(space.example, with_cluster=False)  # Imports its framework while DVC looks at the data.
        prepared = stages.data(space.example)
        space = sweeps.load(name, prepared)
        dvc_data.tell_choices(space.file.recipe, space.example, prepared)
        plan = plan_of_sweep(space, parallel)
        return _sweep(space, plan, number, prepared, run_lock, fresh)


def _sweep(
    space: sweeps.Space, plan: SweepPlan, number: int, prepared: PreparedDataset, run_lock: runs.RunLock, fresh: bool
) -> Sweep:
    began, settings = time.perf_counter(), space.example
    earlier = None if fresh else sweeps.find_sweep(plan, settings, prepared)
    if earlier is None:
        swept = list(space.parameters)
        run = stages.start_sweep(
            settings, prepared=prepared, key=run_lock.holder.key, name=space.name, swept=swept, flow_run_id=flow_run.id
        )
        sweeps.save_plan(run, plan)
    else:
        run = stages.resume_sweep(settings, prepared=prepared, run=earlier, flow_run_id=flow_run.id)
        print(f"going on with sweep {run.run_id}; --fresh begins a new one", file=sys.stderr)
    run_lock.note(run_id=run.run_id)
    folder = config.project_root() / run.folder
    with stages.finishing(settings, run):
        with sweeps.Trials(folder, space.parameters, plan.lower_is_better) as kept:
            trials.train_all(trials.Search(space, plan, prepared, run, Event()), kept, number)
            done = kept.all()
        result = summarise(space, plan, run, prepared, done, time.perf_counter() - began)
        stages.report_sweep(settings, run=run, sweep=result)
        if result.best is None:
            reasons = dict.fromkeys(one.reason or "" for one in done)
            raise StratagemError(f"no trial was trained to its end. {'; '.join(list(reasons)[:3])}")
        final = _train_on_all(space, result)
        result = result.model_copy(update={"final": final, "seconds": round(time.perf_counter() - began, 3)})
        stages.report_sweep(settings, run=run, sweep=result)
        reporting.publish(result_page(result), key="sweep", description=run.name)
    return result


def _train_on_all(space: sweeps.Space, result: Sweep) -> RunSummary:
    """Train the best trial's settings on all examples, evaluate and register: an ordinary run, which goes on where it
    was killed, and is not done again where it is there."""
    print(f"trial {result.best} again, on training and validation examples together", file=sys.stderr)
    return training.run_pipeline(space.file.recipe, result.best_settings, True, pipeline.Resumption())


def summarise(
    space: sweeps.Space, plan: SweepPlan, run: Run, prepared: PreparedDataset, done: list[Trial], seconds: float
) -> Sweep:
    """Return the sweep as one record, before its best trial is trained again."""
    best = sweeps.best_of(done, plan.lower_is_better)
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
        importance=sweeps.importance(space.parameters, done, plan.lower_is_better),
        best_settings=final,
        seconds=round(seconds, 3),
        finished_at=clock.now(),
    )


def result_page(result: Sweep) -> str:
    """Return the result as Markdown, for Prefect's page of the flow run."""
    best = next(one for one in result.trials if one.number == result.best)
    rows = {
        "Best": f"trial {best.number} of {len(result.trials)}: {result.plan.metric} {best.value:.4f}",
        **{key: f"`{value}`" for key, value in best.params.items()},
    }
    if (final := result.final) is not None:
        rows |= {name: f"{value:.4f}" for name, value in final.metrics.items()}
        rows["Model"] = f"`{final.model_version or final.model_uri}`"
        rows |= {"Champion": final.judgement.told} if final.judgement else {}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    page = Path(result.folder) / "sweep.html"
    return f"# Sweep {result.plan.name}\n\n| | |\n|---|---|\n{table}\n\nThe page of it: `{page}`\n"
