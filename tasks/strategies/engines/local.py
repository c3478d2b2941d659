"""A cluster on this machine: each member has a free port of 127.0.0.1 and a share of the cores and GPUs; the members
share a private network."""

import os

from tasks import config
from tasks.strategies.engines import Member, by_job, environment_of, isolation, tasks_of, threads_of
from tasks.system.errors import UserError
from tasks.system.machine import free_ports, gpus_in_words, usable_cores, visible_gpus

SHARED_NETWORK = None
STARTS_ALL = True


def members(section: config.AnyCluster) -> list[Member]:
    """Return the members; each call chooses new ports.

    Raises:
        UserError: the workers need more GPUs than there are.
    """
    tasks = tasks_of(section, section.workers)
    cluster = by_job(tasks, [f"127.0.0.1:{port}" for port in free_ports(len(tasks))])
    gpus = _gpus_of_workers(section)
    found = []
    for job, index in tasks:
        environment = {**environment_of(cluster, job, index), **threads_of(usable_cores() // section.workers)}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index]) if job == "worker" else ""
        found.append(Member(job, index, (job, index) == tasks[0], environment))
    return found


def make_network() -> isolation.Network | str:
    """Return a private network for the members, or the reason why there is none."""
    if os.environ.get("STRATAGEM_CLUSTER_NETWORK") == "host":
        return "STRATAGEM_CLUSTER_NETWORK = host"
    if not (os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:").startswith("sqlite:"):
        return "the chief has to reach the server of MLFLOW_TRACKING_URI"
    try:
        return isolation.make()
    except OSError as error:
        return f"the kernel does not allow a private network ({error})"


def _gpus_of_workers(section: config.AnyCluster) -> list[list[str]]:
    """Return the GPUs of each worker; an empty list if the workers use the CPU."""
    gpus, workers, wanted = visible_gpus(), section.workers, section.gpus_per_worker
    if section.backend == "jax" and (not gpus or os.environ.get("JAX_PLATFORMS") == "cpu"):
        return []  # JAX makes as many CPU devices as the settings ask for.
    share = wanted or len(gpus) // workers
    if wanted and wanted * workers > len(gpus):
        raise UserError(
            f"strategy.devices = {wanted}: {workers} workers need {wanted * workers} GPUs, and this machine has "
            f"{len(gpus)}. Give fewer, or null to share all of them"
        )
    if gpus and not share:
        raise UserError(
            f"strategy.workers = {workers}: this machine has {gpus_in_words(gpus)}, and each worker needs one of "
            f"its own. Give strategy.workers={len(gpus)}, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    return [gpus[worker * share : (worker + 1) * share] for worker in range(workers)] if gpus else []
