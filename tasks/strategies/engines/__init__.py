"""Launchers by name: which processes of a cluster this command starts, and the environment of each.

`strategy.launcher` names a file of this folder. `local` makes a cluster on this machine (`isolation` its network),
`ray` on the nodes of a Ray cluster (`remote_members` calls it); the other launchers find this process's place in a
cluster that someone else starts. Each launcher has

- `members(section)`: the processes to start, new in each call; the chief, if included, is the first;
- `STARTS_ALL`: whether these are all members of the cluster, so that this command can restart it;
- `SHARED_NETWORK`: why other processes can reach the members; None if `local.make_network` makes a private network.
"""

import importlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from tasks import config
from tasks.strategies import tasks_of
from tasks.system import units
from tasks.system.errors import UserError
from tasks.system.machine import visible_gpus

if TYPE_CHECKING:
    from tasks.strategies.engines.isolation import Network


OF_A_NODE = frozenset({"CUDA_VISIBLE_DEVICES", "HOSTNAME"})
"""Variables of which a member on another machine has the machine's values, as of TMPDIR; all others come from this
command, as with `sbatch`."""


@dataclass(frozen=True)
class Member:
    """One process of a cluster."""

    job: str
    """`chief`, `worker` or `ps`, as in TF_CONFIG."""
    index: int
    is_chief: bool
    """Whether it runs the stages; only the chief tracks, writes checkpoints and prints."""
    environment: dict[str, str]
    """Variables added to the environment of every stage process."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.job} {self.index}"


# The only process of a strategy without a cluster.
ALONE = Member("worker", 0, True, {})


def threads_of(cores: int) -> dict[str, str]:
    """Return the environment that limits a member to a number of cores, unless the user has set these variables.

    By default each member starts a thread for every core of the machine. The number of threads changes the last digits
    of results: after 840 steps of convnet2 the bits differ between one thread and two.
    """
    # A step waits for its peers in a thread of the second pool: a single thread would block everything else.
    wanted = {"TF_NUM_INTRAOP_THREADS": max(1, cores), "TF_NUM_INTEROP_THREADS": max(2, cores)}
    return {name: os.environ.get(name, str(count)) for name, count in wanted.items()}


def cluster_of(section: config.Cluster, addresses: Sequence[str]) -> dict[str, list[str]]:
    """Return the `cluster` of TF_CONFIG for processes at these addresses, the chief first."""
    left = iter(addresses)
    workers = len(addresses) - (section.num_processes - section.workers)
    return {job: list(islice(left, count)) for job, count in section.jobs(workers).items()}


def member_at(section: config.Cluster, cluster: Mapping[str, Sequence[str]], job: str, index: int) -> Member:
    """Return the member with this place in a cluster."""
    environment = {"TF_CONFIG": json.dumps({"cluster": dict(cluster), "task": {"type": job, "index": index}})}
    if section.chief_gives_work and job != "worker":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # It would take GPU memory from a worker on the same machine.
    return Member(job, index, (job, index) == tasks_of(cluster)[0], environment)


def members_at(section: config.Cluster, addresses: Sequence[str], cores: int) -> list[Member]:
    """Return all members of a cluster at their addresses, the chief first, with ``cores`` cores each."""
    cluster = cluster_of(section, addresses)
    found = [member_at(section, cluster, *task) for task in tasks_of(cluster)]
    for member in found:
        member.environment.update(threads_of(cores))
    return found


def find_placing(cluster: config.Cluster) -> str | None:
    """Return the module that talks to an engine which chooses other machines for the members, else None.

    The launcher of such an engine, such as `ray`, also has `ENGINE`, the name of this module, which
    `remote_members` runs in a separate process.
    """
    found: str | None = getattr(find_launcher(cluster), "ENGINE", None)
    return found


def find_launcher(cluster: config.Cluster) -> Any:
    """Return the launcher of a cluster."""
    return importlib.import_module(f"tasks.strategies.engines.{cluster.launcher or _launcher_of_environment()}")


def is_foreign(cluster: config.Cluster | None) -> bool:
    """Return whether someone else starts the members of a cluster and this command only joins it."""
    return cluster is not None and not find_launcher(cluster).STARTS_ALL


def _launcher_of_environment() -> str:
    """Return the name of the launcher that the environment implies, if the settings do not name one."""
    if os.environ.get("TF_CONFIG"):
        return "tf_config"
    # A batch script is a step with a single task; it starts its own members.
    return "slurm" if int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1 else "local"


def members(section: config.StrategySection) -> list[Member]:
    """Return the processes that this command starts; the chief, if included, is the first.

    Raises:
        UserError: too few GPUs, an unusable TF_CONFIG, or a port that is taken.
    """
    found: list[Member] = [ALONE] if section.cluster is None else find_launcher(section.cluster).members(section)
    return found


def find_network(cluster: config.Cluster) -> "Network | None":
    """Return the private network of a cluster's members, or print a warning that others can reach their servers."""
    found: Network | str | None = find_launcher(cluster).SHARED_NETWORK
    if found is None:
        from tasks.strategies.engines import local

        found = local.make_network()
    if not isinstance(found, str):
        return found
    danger = "TensorFlow requires no password, so anyone who connects can read and write your files"
    if cluster.backend == "jax":
        danger = "JAX requires no password, so anyone who connects can disturb the training"
    print(
        f"this cluster's servers accept everyone who can reach this machine's ports, because {found}: {danger}. Let a "
        "firewall admit only the cluster's machines",
        file=sys.stderr,
        flush=True,
    )
    return None


def joined_member(
    section: config.AnyCluster,
    cluster: Mapping[str, Sequence[str]],
    job: str,
    index: int,
    source: str,
) -> Member:
    """Return this process's member of a cluster whose other members someone else starts.

    Args:
        section: the strategy's settings.
        cluster: the addresses of all members, `host:port`, by job.
        job: this process's job: `chief`, `worker` or `ps`.
        index: its number in the job.
        source: the origin of these values, for messages.

    Raises:
        UserError: the port is taken, the machine has fewer GPUs than the settings ask for, or the number of processes
            is not the one that a strategy on JAX needs.
    """
    count = sum(map(len, cluster.values()))
    if section.backend == "jax" and count != section.num_processes:
        raise UserError(
            f"strategy.workers = {section.workers}: {source} has {count} process{'es' * (count > 1)}. Set "
            f"strategy.workers={count}, or start as many processes as the settings require"
        )
    address = cluster[job][index]
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        # As TensorFlow does: a port that was just closed is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"{source}: {job} {index} must serve at {address}, but port {port} is not available here "
                f"({error.strerror}). Stop the process that uses it, or give the members other ports"
            ) from None
    member, gpus, wanted = member_at(section, cluster, job, index), visible_gpus(), section.gpus_per_worker
    # JAX makes CPU devices where there are no GPUs.
    if wanted is not None and (gpus or section.backend == "tensorflow"):
        if wanted > len(gpus):
            raise UserError(
                f"strategy.devices = {wanted}: this machine has {units.count(len(gpus), 'GPU')}. Use fewer, or "
                "null for all"
            )
        member.environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:wanted])
    return member
