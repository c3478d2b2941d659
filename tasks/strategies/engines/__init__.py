"""Launchers by name: which processes of a cluster this command starts, and the environment of each.

`strategy.launcher` names a file here, which has what a `Launcher` has. `local` makes a cluster on this machine, `ray`
one on the nodes of a Ray cluster; the others find this process's place in a cluster that someone else starts.
"""

import importlib
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tasks import config
from tasks.strategies.engines.isolation import Network
from tasks.system.errors import UserError
from tasks.system.machine import gpus_in_words, visible_gpus


@dataclass(frozen=True)
class Member:
    """One process of a cluster."""

    job: str
    """`chief`, `worker` or `ps`, as in TF_CONFIG."""
    index: int
    is_chief: bool
    """Whether it runs the stages: it alone tracks, writes checkpoints and prints."""
    environment: Mapping[str, str]
    """Added to the environment of every stage process."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.job} {self.index}"


# The only process of a strategy without a cluster.
ALONE = Member("worker", 0, True, {})


def threads_of(cores: int) -> dict[str, str]:
    """Return the environment by which a member uses a given number of cores, where the user has not set one.

    By default each member starts a thread for every core of the machine. The number of threads changes the last digits
    of results: 840 steps of convnet2 end with other bits with two threads than with one.
    """
    # A step waits for its peers in a thread of the second pool: a single one would block everything else.
    wanted = {"TF_NUM_INTRAOP_THREADS": max(1, cores), "TF_NUM_INTEROP_THREADS": max(2, cores)}
    return {name: os.environ.get(name, str(count)) for name, count in wanted.items()}


def tasks_of(section: config.Cluster, workers: int) -> list[tuple[str, int]]:
    """Return the (job, index) of each process of a cluster with a number of workers, the chief first."""
    return [(job, index) for job, count in section.jobs(workers).items() for index in range(count)]


def by_job(tasks: Sequence[tuple[str, int]], addresses: Sequence[str]) -> dict[str, list[str]]:
    """Return the addresses of the tasks, which are in the same order, as the `cluster` of TF_CONFIG."""
    cluster: dict[str, list[str]] = {}
    for (job, _), address in zip(tasks, addresses, strict=True):
        cluster.setdefault(job, []).append(address)
    return cluster


def environment_of(cluster: Mapping[str, Sequence[str]], job: str, index: int) -> dict[str, str]:
    """Return the environment that tells a process its place in a cluster."""
    return {"TF_CONFIG": json.dumps({"cluster": dict(cluster), "task": {"type": job, "index": index}})}


class Launcher(Protocol):
    """What a module of this package must have."""

    STARTS_ALL: bool
    """Whether it starts all members of the cluster, and so can start all of them again."""

    def members(self, section: Any) -> list[Member]:
        """Return the processes to start, new ones in each call; the chief, if it is one of them, is the first.

        Args:
            section: the strategy's, a `config.Cluster`.

        Raises:
            UserError: the cluster cannot be made here: GPUs, ports, a variable.
        """

    def network(self) -> Network | str:
        """Return a network without any other process, see `isolation`; or why there is none."""


class Placed(NamedTuple):
    """Where an engine of other machines runs a member."""

    host: str
    port: int
    """Was free for the member's server."""
    cores: int
    """That the member may use."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Placing(Launcher, Protocol):
    """What a launcher has as well whose engine runs the members on other machines, which it chooses.

    `process.remote_members` runs the module `ENGINE` in a process of its own, which asks the engine.
    """

    ENGINE: str

    def request(self, section: Any, counts: Sequence[int], cpus: int | None) -> dict[str, Any]:
        """Return the request to the engine: places for the first of these numbers of workers that it has room for.

        Args:
            section: the strategy's.
            counts: allowed numbers of workers, the largest first.
            cpus: cores of each process; None leaves them to the engine.
        """

    def members_at(self, section: Any, places: Sequence[Placed]) -> list[Member]:
        """Return the members at the places that the engine found, the chief first."""


def find_placing(cluster: config.Cluster) -> Placing | None:
    """Return the launcher of a cluster if its engine runs the members on other machines, else None."""
    found: Any = find_launcher(cluster)
    return found if hasattr(found, "members_at") else None


def find_launcher(cluster: config.Cluster) -> Launcher:
    """Return the launcher of a cluster."""
    found: Any = importlib.import_module(f"tasks.strategies.engines.{cluster.launcher or _launcher_of_environment()}")
    launcher: Launcher = found
    return launcher


def _launcher_of_environment() -> str:
    """Return the name of the launcher where the settings leave it open."""
    if os.environ.get("TF_CONFIG"):
        return "tf_config"
    if os.environ.get("STRATAGEM_POD_ADDRESSES"):
        return "kubernetes"
    # A batch script is a step of one task; it starts its members itself.
    return "slurm" if int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1 else "local"


def members(section: config.StrategySection) -> list[Member]:
    """Return the processes that this command starts; the chief, if it is one of them, is the first.

    Raises:
        UserError: not enough GPUs, a TF_CONFIG that cannot be used, or a port that is taken.
    """
    return [ALONE] if section.cluster is None else find_launcher(section.cluster).members(section)


def find_network(cluster: config.Cluster) -> Network | None:
    """Return the network that a cluster's members share, or print why others reach their servers, too."""
    found = find_launcher(cluster).network()
    if isinstance(found, Network):
        return found
    danger = "TensorFlow asks no password, and who is in can read and write your files"
    if cluster.backend == "jax":
        danger = "JAX asks no password, and who is in can disturb the training"
    print(
        f"this cluster's servers let in whoever reaches this machine's ports, because {found}: {danger}. Let a "
        "firewall admit the cluster's machines alone",
        file=sys.stderr,
        flush=True,
    )
    return None


def check(section: config.StrategySection) -> None:
    """Refuse a strategy that this machine cannot train, as far as that shows without a framework.

    Raises:
        UserError: no TPU; or see `members`.
    """
    if section.needs is not None:
        importlib.import_module(f"tasks.strategies.engines.{section.needs}").check(section)
    members(section)


def joined_member(
    section: config.AnyCluster,
    cluster: Mapping[str, Sequence[str]],
    job: str,
    index: int,
    source: str,
) -> Member:
    """Return the member that this process is in a cluster whose other members someone else starts.

    Args:
        section: the strategy's.
        cluster: the addresses of all members, `host:port`, by job.
        job: this process's: `chief`, `worker` or `ps`.
        index: its number in the job.
        source: who says so, for messages.

    Raises:
        UserError: its port is taken, there are fewer GPUs than the settings ask for, or not as many processes as a
            strategy on JAX needs.
    """
    count = sum(map(len, cluster.values()))
    if section.backend == "jax" and count != section.num_processes:
        raise UserError(
            f"strategy.workers = {section.workers}: {source} has {count} process{'es' * (count > 1)}. Give "
            f"strategy.workers={count}, or start as many processes as the settings say"
        )
    address = cluster[job][index]
    port = int(address.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # As TensorFlow does: a port that was just closed is free.
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"{source}: {job} {index} is to serve at {address}, and port {port} cannot be had here "
                f"({error.strerror}). End the process that holds it, or let the members have other ports"
            ) from None
    environment = environment_of(cluster, job, index)
    gpus, wanted = visible_gpus(), section.gpus_per_worker
    if section.chief_gives_work and job != "worker":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # It would take GPU memory from a worker on the same machine.
    elif wanted is not None and (
        gpus or section.backend == "tensorflow"
    ):  # JAX makes CPU devices where there are no GPUs.
        if wanted > len(gpus):
            raise UserError(
                f"strategy.devices = {wanted}: this machine has {gpus_in_words(gpus)}. Give fewer, or null for all"
            )
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:wanted])
    first = ("chief" if "chief" in cluster else "worker", 0)
    return Member(job, index, (job, index) == first, environment)


def member_of_rank(section: config.AnyCluster, addresses: Sequence[str], rank: int, source: str) -> Member:
    """Return the member that this process is in a cluster whose processes have only numbers: first the chief, then
    workers, then parameter servers.

    Args:
        section: the strategy's.
        addresses: of all processes, `host:port`.
        rank: this process's number.
        source: who says so, for messages.

    Raises:
        UserError: too few or too many processes for the strategy; or see `joined_member`.
    """
    count = len(addresses)
    if section.chief_gives_work and count != section.num_processes:
        raise UserError(
            f"strategy.workers = {section.workers} and strategy.ps = {section.jobs(section.workers)['ps']}: with the "
            f"chief these are {section.num_processes} processes, and {source} has {count}. Ask for as many, or give "
            "other settings"
        )
    tasks = tasks_of(section, count - (section.num_processes - section.workers))
    return joined_member(section, by_job(tasks, addresses), *tasks[rank], source)
