"""This process's own place in a cluster whose other members someone else starts."""

import json
import socket
from collections.abc import Mapping, Sequence

from tasks import config
from tasks.strategies.engines import Member
from tasks.system.errors import UserError
from tasks.system.machine import gpus_in_words, visible_gpus


def member(
    section: config.AnyCluster,
    cluster: Mapping[str, Sequence[str]],
    job: str,
    index: int,
    source: str,
) -> Member:
    """Return the member that this process is, with its TF_CONFIG.

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
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As TensorFlow does: a port just closed is free.
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"{source}: {job} {index} is to serve at {address}, and port {port} cannot be had here "
                f"({error.strerror}). End the process that holds it, or let the members have other ports"
            ) from None
    environment = {"TF_CONFIG": json.dumps({"cluster": dict(cluster), "task": {"type": job, "index": index}})}
    gpus, wanted = visible_gpus(), section.gpus_per_worker
    if section.chief_gives_work and job != "worker":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # It would take the memory of the GPUs from a worker beside it.
    elif wanted is not None and (gpus or section.backend == "tensorflow"):  # JAX makes CPU devices where it has none.
        if wanted > len(gpus):
            raise UserError(
                f"strategy.devices = {wanted}: this machine has {gpus_in_words(gpus)}. Give fewer, or null for all"
            )
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[:wanted])
    first = ("chief" if "chief" in cluster else "worker", 0)
    return Member(job, index, (job, index) == first, environment)


def member_of_rank(section: config.AnyCluster, addresses: Sequence[str], rank: int, source: str) -> Member:
    """Return the member that this process is where processes have numbers only: the chief first, then workers, then
    parameter servers.

    Args:
        section: the strategy's.
        addresses: of all processes, `host:port`.
        rank: this process's number.
        source: who says so, for messages.

    Raises:
        UserError: too few or too many processes for the strategy; or see `member`.
    """
    count = len(addresses)
    if section.chief_gives_work and count != section.num_processes:
        raise UserError(
            f"strategy.workers = {section.workers} and strategy.ps = {section.jobs(section.workers)['ps']}: with the "
            f"chief these are {section.num_processes} processes, and {source} has {count}. Ask for as many, or give "
            "other settings"
        )
    jobs = section.jobs(count - (section.num_processes - section.workers))
    places = [(job, index) for job, number in jobs.items() for index in range(number)]
    of_place = dict(zip(places, addresses, strict=True))
    cluster = {job: [of_place[job, index] for index in range(number)] for job, number in jobs.items()}
    return member(section, cluster, *places[rank], source)
