"""A cluster on this machine: each member has a free port of 127.0.0.1 and a share of the cores and GPUs; the members
share a private network."""

import os

from tasks import config
from tasks.strategies.engines import Member, isolation, members_at
from tasks.system import units
from tasks.system.errors import UserError
from tasks.system.machine import free_ports, usable_cores, visible_gpus

SHARED_NETWORK = None
STARTS_ALL = True


def members(section: config.AnyCluster) -> list[Member]:
    """Return the members; each call chooses new ports.

    Raises:
        UserError: the workers need more GPUs than there are.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(section.num_processes)]
    found = members_at(section, addresses, usable_cores() // section.workers)
    gpus = _gpus_of_workers(section)
    for member in found if gpus else ():
        if member.job == "worker":
            member.environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[member.index])
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
            f"{len(gpus)}. Use fewer, or null to share all of them"
        )
    if gpus and not share:
        raise UserError(
            f"strategy.workers = {workers}: this machine has {units.count(len(gpus), 'GPU')}, but each worker "
            f"needs one of its own. Set strategy.workers={len(gpus)}, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    return [gpus[worker * share : (worker + 1) * share] for worker in range(workers)] if gpus else []
