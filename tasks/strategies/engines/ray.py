"""A cluster whose members Ray places on its nodes and watches there. Training, checkpoints and restarts are ours.

Nothing here imports Ray: ``ray_places`` does, in a process of its own.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from tasks import config
from tasks.strategies.engines import Member, Placed, by_job, environment_of, tasks_of, threads_of
from tasks.system.errors import UserError
from tasks.system.network import connection_error

STARTS_ALL = True
ENGINE = "tasks.strategies.engines.ray_places"
ADDRESS = "RAY_ADDRESS"
"""Ray's own variable: `host:port` of the head node; without it Ray finds a cluster that runs on this machine."""
ANSWER_SECONDS = 5.0


def members(section: config.Cluster) -> list[Member]:
    """Return the members without their environment: `members_at` adds it when Ray has placed them.

    Raises:
        UserError: Ray is not installed, or nothing answers at its address.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "strategy.launcher = 'ray': the package ray is not installed. It is the extra 'ray': "
            "`pip install -e '.[ray]'` in the project's folder, on each node"
        )
    _check_address(os.environ.get(ADDRESS, ""))
    return [Member(job, index, place == 0, {}) for place, (job, index) in enumerate(tasks_of(section, section.workers))]


def network() -> str:
    """Return why the members have no network for themselves alone."""
    return "Ray puts them on one that its nodes share"


def request(section: config.Cluster, counts: Sequence[int], cpus: int | None) -> dict[str, Any]:
    """Return the request to Ray for as many places as `members_at` takes.

    Args:
        section: the strategy's.
        counts: allowed numbers of workers, the largest first.
        cpus: cores of each process; None shares those of the nodes.
    """
    others = section.num_processes - section.workers
    return {
        "counts": list(counts),
        "others": others,
        "cpus": cpus,
        "gpus": section.gpus_per_worker,
        # JAX makes as many CPU devices where there are no GPUs.
        "or_cpus": isinstance(section, config.OnJax),
        "umask": _umask(),
    }


def members_at(section: config.Cluster, places: Sequence[Placed]) -> list[Member]:
    """Return the members at their places, the chief first."""
    tasks = tasks_of(section, len(places) - (section.num_processes - section.workers))
    cluster = by_job(tasks, [place.address for place in places])
    found = []
    for (job, index), place in zip(tasks, places, strict=True):
        environment = {**environment_of(cluster, job, index), **threads_of(place.cores)}
        if section.chief_gives_work and job != "worker":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        found.append(Member(job, index, (job, index) == tasks[0], environment))
    return found


def _check_address(address: str) -> None:
    if address in ("", "auto"):
        return
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdecimal():
        raise UserError(
            f"{ADDRESS} = '{address}': give host:port of the cluster's head node, such as 10.0.0.1:6379, on a machine "
            "that is one of its nodes (`ray start --address=HOST:PORT` makes it one)"
        )
    if (error := connection_error(host, int(port), ANSWER_SECONDS)) is not None:
        raise UserError(
            f"{ADDRESS} = '{address}': no Ray cluster answers there ({error}). Start one (`ray start --head`), or give "
            "the address of one that runs"
        )


def _umask() -> int:
    now = os.umask(0o077)
    os.umask(now)
    return now
