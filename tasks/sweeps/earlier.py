"""What an earlier sweep has left: whether the same command goes on with it, and the run of each of its trials."""

import hashlib
from collections.abc import Iterable
from typing import Any

from tasks import config, records, runs
from tasks.records import PreparedDataset, Run, SweepPlan, Trial
from tasks.runs import lineage
from tasks.sweeps.space import Space
from tasks.system.errors import UserError, shown

PLAN = "records/plan.json"
MOST_SHOWN = 3


def save_plan(run: Run, plan: SweepPlan) -> None:
    """Keep what makes a sweep the same one."""
    records.save(plan, config.project_root() / run.folder / PLAN)


def find_sweep(plan: SweepPlan, settings: config.Settings, prepared: PreparedDataset) -> Run | None:
    """Return the newest sweep of a space's name, if it is the same one, None where there is none to go on with.

    Args:
        plan: what is asked for.
        settings: of the trials, without what is swept.
        prepared: their data.

    Raises:
        UserError: it is unfinished, and another one by now; says what differs.
    """
    root = config.project_root()
    for run in runs.sweeps():
        if not (root / run.folder / PLAN).exists():
            continue  # Its process died before it had one, and no trial either.
        try:
            before = records.load(SweepPlan, root / run.folder / PLAN)
        except UserError:  # Damaged, or of another version: nothing goes on with it.
            continue
        if before.name != plan.name:
            continue
        other = _differences(before, plan, run, settings, prepared)
        if not other:
            return run
        ended = runs.status(run)
        if ended is not None and ended.status == "FINISHED":
            return None
        more = f"; and {len(other) - MOST_SHOWN} more" if len(other) > MOST_SHOWN else ""
        raise UserError(
            f"sweep {run.run_id} of {plan.name} is unfinished, and is another one by now: "
            f"{'; '.join(other[:MOST_SHOWN])}{more}. Give the same again to go on with it, or --fresh for a new one"
        )
    return None


def key_of(space: Space) -> str:
    """Return what two commands have in common that work on the sweep of one name: only one of them may."""
    return f"sweep-{hashlib.sha256(space.name.encode()).hexdigest()[:16]}"


def refuse_foreign_cluster(space: Space, foreign: bool) -> None:
    """Refuse members that someone else starts: they would wait for one training, and not for many.

    Raises:
        UserError: the processes of a trial are not started here.
    """
    if foreign:
        raise UserError(
            f"{space.path}: a sweep starts its processes itself, and this cluster was started by someone else: give "
            "`set: {strategy.launcher: local}`"
        )


def best_of(trials: Iterable[Trial], lower_is_better: bool) -> Trial | None:
    """Return the best trial of those that were trained to their end, the first one where several are as good."""
    whole = [one for one in trials if one.state == "complete" and one.value is not None]
    sign = 1 if lower_is_better else -1
    return min(whole, key=lambda one: (sign * (one.value or 0.0), one.number), default=None)


def run_of(parent: Run, settings: config.Settings) -> Run | None:
    """Return the run of a trial that was begun before: with the same settings, but for what changes no result, such as
    how it is tracked."""
    wanted = settings.digest()
    return next((run for run in runs.children(parent.run_id) if run.lineage.settings_digest == wanted), None)


def _differences(
    before: SweepPlan, plan: SweepPlan, run: Run, settings: config.Settings, prepared: PreparedDataset
) -> list[str]:
    traced = lineage.collect(settings, prepared.data_version)
    names = ("metric", "parallel", "sampler")
    then, now = ({**_of_result(one.space), **{name: getattr(one, name) for name in names}} for one in (before, plan))
    found = [
        f"{key} was {shown(then.get(key))} and is {shown(now.get(key))}"
        for key in dict.fromkeys([*then, *now])
        if then.get(key) != now.get(key)
    ]
    found += [
        f"{one.key} was {shown(one.before)} and is {shown(one.now)}"
        for one in runs.differences(run, settings)
        if one.mark.what == "result"
    ]
    if run.lineage.data_version != traced.data_version:
        found.append(f"the data version was {run.lineage.data_version} and is {traced.data_version}")
    if run.lineage.code_digest != traced.code_digest:
        found.append("the code of flows/, tasks/ or its model, or requirements.lock is not what it was")
    return found


def _of_result(space: dict[str, Any]) -> dict[str, Any]:
    """Return what a space says, one value for each key, without what changes no result."""
    marks, found = config.marks_of(config.Settings), dict[str, Any]()
    for name, value in space.items():
        if name == "space":
            found |= {f"space.{key}": one for key, one in value.items()}
        elif name == "set":
            fixed = {
                key: one for key, one in config.flat(value).items() if key not in marks or marks[key].what == "result"
            }
            found |= {f"set.{key}": one for key, one in fixed.items()}
        else:
            found[name] = value
    return found
