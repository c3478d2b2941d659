"""What `stratagem status` tells."""

from collections.abc import Mapping
from typing import Any

from flows.operate import notifications, operation
from tasks.records import ServiceState
from tasks.system.machine import find_process
from tasks.system.network import unreachable_reason

WAITING = ["SCHEDULED", "PENDING"]
MOST_LISTED = 20


def collect() -> dict[str, Any]:
    """Return what runs: `well`, whether all does; the services, the deployments with their next run, the flow runs that
    train and wait, and which notice was lost last, if any."""
    state = operation.load()
    up = operation.is_held()
    services = [_service(one, up) for one in state.services] if state else []
    prefect = next((one["address"] for one in services if one["name"] == "prefect" and one["answers"]), None)
    return {
        "up": up,
        "well": state is not None
        and up
        and state.phase == "ready"
        and bool(services)
        and all(one["answers"] for one in services),
        "phase": state.phase if state and up else None,
        "pid": state.pid if state and up else None,
        "since": state.since if state and up else None,
        "services": services,
        "deployments": _deployments(prefect) if prefect else [],
        "training": _flow_runs(prefect, ["RUNNING", "CANCELLING"]) if prefect else [],
        "waiting": _flow_runs(prefect, WAITING, asked_for=True) if prefect else [],
        "lost_notice": notifications.last_lost(),
    }


def _service(one: ServiceState, up: bool) -> dict[str, Any]:
    runs = up and find_process(one.pid, one.created) is not None
    health = f"{one.address}/api/health" if one.name == "prefect" else one.address
    answers = runs and (not health or unreachable_reason(health, operation.ANSWER_SECONDS) is None)
    told = one.model_dump(include={"name", "pid", "since", "restarts", "last_end", "address", "log"})
    return {**told, "runs": runs, "answers": answers}


def _deployments(prefect: str) -> list[dict[str, Any]]:
    found = operation.ask(prefect, "deployments/filter", {"sort": "NAME_ASC"}) or []
    following = operation.ask(
        prefect, "flow_runs/filter", {"flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}}, **_SOONEST}
    )
    runs = [run for run in following or [] if run.get("auto_scheduled")]
    return [
        {
            "name": one["name"],
            "paused": one.get("paused", False),
            "next": next((run["expected_start_time"] for run in runs if run["deployment_id"] == one["id"]), None),
        }
        for one in found
    ]


_SOONEST = {"sort": "EXPECTED_START_TIME_ASC", "limit": 200}


def _flow_runs(prefect: str, states: list[str], asked_for: bool = False) -> list[dict[str, Any]]:
    """Return the flow runs in one of these states, those of the future left out where only `asked_for` are wanted."""
    body = {"flow_runs": {"state": {"type": {"any_": states}}}, **_SOONEST}
    pool = {"work_pools": {"name": {"any_": [operation.POOL]}}}
    return [
        {"id": run["id"], "name": run["name"], "state": run["state_name"], "try": run["run_count"]}
        for run in operation.ask(prefect, "flow_runs/filter", body | pool) or []
        if not (asked_for and run["state_type"] == "SCHEDULED" and run["auto_scheduled"] and not _late(run))
    ]


def _late(run: Mapping[str, Any]) -> bool:
    return bool(run["state_name"] == "Late" or run["estimated_start_time_delta"] > 0)


def show(found: Mapping[str, Any]) -> None:
    """Print it, for 80 columns."""
    if not found["up"]:
        print("Nothing runs here: `stratagem up` starts it.")
    elif found["pid"] is None:
        print("It is being started; what it keeps is not written down yet.")
    else:
        print(f"up since {found['since']}, process {found['pid']}, {found['phase']}")
        for one in found["services"]:
            how = "answers" if one["answers"] else "runs, no answer" if one["runs"] else "is being started"
            count = "once" if one["restarts"] == 1 else f"{one['restarts']} times"
            again = f", restarted {count} (last: {one['last_end']})" if one["restarts"] else ""
            print(f"  {one['name']:9}{how:16}{one['address'] or one['log']}{again}")
        for one in found["deployments"]:
            when = "paused" if one["paused"] else f"next {one['next']}" if one["next"] else "when asked for"
            print(f"  {one['name']:20}{when}")
    for title in ("training", "waiting"):
        for one in found[title][:MOST_LISTED]:
            print(f"  {title:9}{one['name']}, {one['state']}, flow run {one['id']}")
        if len(found[title]) > MOST_LISTED:
            print(f"  {title:9}and {len(found[title]) - MOST_LISTED} more")
    if found["lost_notice"]:
        print("  the last notice was lost (STRATAGEM_NOTIFY): mlruns/notifications/lost")
