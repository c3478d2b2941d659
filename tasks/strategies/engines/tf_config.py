"""This process's own place in a cluster that someone else starts, as the variable TF_CONFIG describes it."""

import json
import os
from typing import Any

from tasks import config
from tasks.strategies.engines import Member, joined_member
from tasks.system.errors import UserError, one_of

STARTS_ALL = False
EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'


def members(section: config.AnyCluster) -> list[Member]:
    """Return the one member that this process is.

    Raises:
        UserError: TF_CONFIG cannot be read or does not fit the strategy, its port is taken, or there are fewer GPUs
            than the settings ask for.
    """
    return [joined_member(section, *_read_tf_config(section), source="TF_CONFIG")]


def network() -> str:
    """Return why the members have no network for themselves alone."""
    return "TF_CONFIG puts them on one that this machine shares"


def _read_tf_config(section: config.AnyCluster) -> tuple[dict[str, list[str]], str, int]:
    """Return the addresses by job, this process's job, and its index."""
    text = os.environ.get("TF_CONFIG")
    if not text:
        raise UserError(f"strategy.launcher = 'tf_config': TF_CONFIG is not set. Set it, such as TF_CONFIG='{EXAMPLE}'")
    try:
        values = json.loads(text)
    except ValueError as error:
        raise _refusal(f"it is not JSON ({error})", text) from None
    cluster, task = (values.get("cluster"), values.get("task")) if isinstance(values, dict) else (None, None)
    if not isinstance(cluster, dict) or not isinstance(task, dict) or not cluster:
        raise _refusal("it must hold the two mappings `cluster` and `task`", text)
    _check_cluster(cluster, section, text)
    job, index = task.get("type"), task.get("index")
    if not isinstance(job, str) or job not in cluster:
        raise UserError("TF_CONFIG: " + one_of("task.type", job, cluster))
    num_tasks = len(cluster[job])
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < num_tasks:
        raise UserError(
            f"TF_CONFIG: task.index = {index!r} of task.type = '{job}': the cluster has {num_tasks} of them, so give a "
            f"number from 0 to {num_tasks - 1}"
        )
    return cluster, job, index


def _check_cluster(cluster: dict[str, Any], section: config.AnyCluster, text: str) -> None:
    # The job, and how many of it there can be.
    known = {"chief": (1, 1), "worker": (1, None), "ps": (1, None)} if section.chief_gives_work else {
        "chief": (0, 1), "worker": (0, None)
    }  # fmt: skip
    for job, addresses in cluster.items():
        if job not in known:
            jobs = ", ".join(known)
            raise UserError(
                f"TF_CONFIG: cluster has '{job}', and strategy.kind={section.kind} knows {jobs}. Take it out"
            )
        if not isinstance(addresses, list) or not addresses or not all(map(_is_address, addresses)):
            raise _refusal(f"cluster.{job} must be a list of addresses such as host1:2222", text)
    every = [address for addresses in cluster.values() for address in addresses]
    twice = sorted({address for address in every if every.count(address) > 1})
    if twice:
        raise UserError(f"TF_CONFIG: {', '.join(twice)} is given to two tasks: give each an address of its own")
    for job, (least, most) in known.items():
        count = len(cluster.get(job, ()))
        if count < least or (most is not None and count > most):
            wanted = f"exactly {least}" if most == least else f"at least {least}" if most is None else f"at most {most}"
            raise UserError(f"TF_CONFIG: cluster has {count} '{job}', and strategy.kind={section.kind} needs {wanted}")


def _is_address(address: object) -> bool:
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    return bool(host and colon) and port.isdecimal() and 0 < int(port) < 2**16


def _refusal(reason: str, text: str) -> UserError:
    return UserError(f"TF_CONFIG = '{text}': {reason}. Write it as {EXAMPLE}")
