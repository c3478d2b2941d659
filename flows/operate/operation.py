"""The files of `stratagem up` in mlruns/up/, and how other commands find it and query its servers.

Only the user may enter the folder, whatever the mode of mlruns/: it holds the password of the servers and Prefect's
database. `up` runs if its lock is held; the kernel frees the lock when the process dies.
"""

import re
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.operate import notifications, servers
from flows.operate.prefect_server import make_password
from tasks import config, records
from tasks.records import Operation
from tasks.runs import entries, listing
from tasks.system import errors, files
from tasks.system.errors import StratagemError
from tasks.system.machine import find_process

POOL = "local-process"
"""The work pool of prefect.yaml."""
WORKER = "up"
# A training has 15 s to save its step, its flow run a minute to record how it ended, and its leftovers another minute.
END_SECONDS = 300.0
ANSWER_SECONDS = 10.0
TRAINING, WAITING = ("RUNNING", "CANCELLING"), ("SCHEDULED", "PENDING")
FAILED = ("FAILED", "CRASHED")
PREFIX = re.compile(r"^Flow run encountered an exception: \w+: ")


def folder() -> Path:
    """Return mlruns/up, which only this user may enter; create it if needed."""
    path = config.project_root() / "mlruns" / "up"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def is_held() -> bool:
    """Return whether `stratagem up` runs in this project."""
    try:
        return files.is_locked(config.project_root() / "mlruns" / "up" / "lock")
    except OSError:
        return False


def load() -> Operation | None:
    """Return the record of what `stratagem up` runs in this project, or ran last; None if no record is readable."""
    return records.load_or_none(Operation, config.project_root() / "mlruns" / "up" / "state.json")


def private_key() -> str:
    """Return the ``user:password`` of the servers. It stays the same after a restart, because a browser and a shell may
    still use it."""
    path = folder() / "key"
    if not path.exists():
        write_private(path, f"{make_password()}\n")
    return path.read_text(encoding="utf-8").strip()


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read."""
    with files.replacing(path) as temporary:
        temporary.touch(0o600)
        temporary.write_text(text, encoding="utf-8")


def take_down() -> bool:
    """End `stratagem up` and wait; False if it does not run.

    Raises:
        StratagemError: it does not end, or it runs on another machine.
    """
    told, end = False, time.monotonic() + END_SECONDS
    while is_held():
        state = load()
        if state is not None and state.host != socket.gethostname():
            raise StratagemError(f"`stratagem up` runs on {state.host}, which shares {folder()}: stop it there")
        if time.monotonic() > end:
            raise StratagemError(f"`stratagem up` did not stop: see {folder()}/up.log")
        # An `up` that has just started has not written its state yet; a second signal would end it at once.
        if not told and state is not None and (process := find_process(state.pid, state.created)) is not None:
            if state.phase != "ending":
                process.send_signal(signal.SIGTERM)
            told = True
        time.sleep(0.2)
    return told


def ask(address: str, path: str, body: dict[str, Any]) -> Any:
    """Return the answer of `up`'s Prefect server to a POST below /api/; None if it does not answer."""
    import requests  # Takes 0.05 s, which `stratagem status` need not wait for if nothing runs.

    user, _, password = private_key().partition(":")
    try:
        answer = requests.post(
            f"{address}/api/{path}", json=body, auth=(user, password), timeout=ANSWER_SECONDS, allow_redirects=False
        )
        answer.raise_for_status()
        return answer.json()
    except (requests.RequestException, ValueError):
        return None


def collect() -> dict[str, Any]:
    """Return what runs: `well` (whether everything runs), the services, the deployments with their next run, the flow
    runs that train and wait, those of the last 24 hours that failed before they became runs, the progress and results
    of runs, and the last notice if it was lost."""
    up = is_held()
    state = load() if up else None
    services = []
    for one in state.services if state else ():
        runs = find_process(one.pid, one.created) is not None
        answers = runs and servers.server_answers(one.name, one.address, ANSWER_SECONDS)
        told = one.model_dump(include={"name", "pid", "since", "restarts", "last_end", "address", "log"})
        services.append({**told, "runs": runs, "answers": answers})
    prefect = next((one["address"] for one in services if one["name"] == "prefect" and one["answers"]), None)
    deployments = ask(prefect, "deployments/filter", {"sort": "NAME_ASC"}) or [] if prefect else []
    wanted = {"work_pools": {"name": {"any_": [POOL]}}, "sort": "EXPECTED_START_TIME_ASC"}
    unfinished = {"flow_runs": {"state": {"type": {"any_": [*TRAINING, *WAITING]}}}}
    flow_runs = ask(prefect, "flow_runs/filter", wanted | unfinished) or [] if prefect else []
    day_before = records.at(time.time() - 24 * 3600)
    bad = {"flow_runs": {"state": {"type": {"any_": FAILED}}, "end_time": {"after_": day_before}}}
    failed = ask(prefect, "flow_runs/filter", wanted | bad) or [] if prefect else []
    started = {run.flow_run_id for run in entries.find_runs("runs") if run.parent_run_id is None}
    planned = [run for run in flow_runs if _is_planned(run)]
    nexts = {run["deployment_id"]: run["expected_start_time"] for run in reversed(planned)}
    return {
        "up": up,
        "well": state is not None and state.phase == "ready" and all(one["answers"] for one in services),
        "phase": state.phase if state else None,
        "pid": state.pid if state else None,
        "since": records.at(state.created) if state else None,
        "services": services,
        "deployments": [
            {
                "name": one["name"],
                "paused": one["paused"],
                "scheduled": any(schedule["active"] for schedule in one["schedules"]),
                "next": nexts.get(one["id"]),  # Prefect plans it up to a minute after it was deployed.
            }
            for one in deployments
        ],
        "training": [_flow_run(run) for run in flow_runs if run["state_type"] in TRAINING],
        "waiting": [_flow_run(run) for run in flow_runs if run["state_type"] in WAITING and run not in planned],
        "failed": [
            {**_flow_run(run), "reason": errors.cut(PREFIX.sub("", (run["state"] or {}).get("message") or ""))}
            for run in failed
            if run["id"] not in started
        ],
        "runs": listing.recent_runs().model_dump(mode="json"),
        "lost_notice": notifications.last_lost(),
    }


def _is_planned(run: Mapping[str, Any]) -> bool:
    """Return whether a schedule created a flow run and its time has not come."""
    late = run["state_name"] == "Late" or run["estimated_start_time_delta"] > 0
    return bool(run["state_type"] == "SCHEDULED" and run["auto_scheduled"] and not late)


def _flow_run(run: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": run["id"], "name": run["name"], "state": run["state_name"], "try": run["run_count"]}
