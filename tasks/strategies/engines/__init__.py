"""Launchers by name: which processes of a cluster this command starts, and what the environment of each says.

The file is the key: `strategy.launcher` names it (`config.Cluster`), and it has what a `Launcher` has. `local` makes a
cluster on this machine, `ray` one on the nodes of Ray's; the others take this process's place in a cluster that someone
else starts.
"""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tasks import config
from tasks.strategies.engines.isolation import Network


@dataclass(frozen=True)
class Member:
    """One process of a cluster."""

    job: str
    """`chief`, `worker` or `ps`, as in TF_CONFIG."""
    index: int
    is_chief: bool
    """Whether it runs the stages: it alone tracks, writes checkpoints and prints."""
    environment: Mapping[str, str]
    """What it needs beside the environment of every stage process."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.job} {self.index}"


# The process of a strategy that is no cluster.
ALONE = Member("worker", 0, True, {})


def threads_of(cores: int) -> dict[str, str]:
    """Return the environment by which a member uses a given number of cores, where the user has not set one.

    By default each member would start a thread for every core of the machine. The number of threads changes the last
    digits of what is computed: 840 steps of convnet2 end with other bits with two than with one.
    """
    # A step waits for its peers in a thread of the second pool; with one alone nothing else could go on meanwhile.
    wanted = {"TF_NUM_INTRAOP_THREADS": max(1, cores), "TF_NUM_INTEROP_THREADS": max(2, cores)}
    return {name: os.environ.get(name, str(count)) for name, count in wanted.items()}


class Launcher(Protocol):
    """What a module of this package has to have."""

    STARTS_ALL: bool
    """Whether its members are all of the cluster's, so that they can be started again together."""

    def members(self, section: Any) -> list[Member]:
        """Return the processes to start, anew for each start; where the chief is among them, it is the first.

        Args:
            section: the strategy's, a `config.Cluster`.

        Raises:
            UserError: the cluster cannot be made here: GPUs, ports, a variable.
        """

    def network(self) -> Network | str:
        """Return a network that no other process is in, see `isolation`; or why there is none."""


class Placed(NamedTuple):
    """Where an engine runs a member."""

    host: str
    port: int
    """Free for the member's server when it was looked at."""
    cores: int
    """What the member gets."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Placing(Launcher, Protocol):
    """What a module has beside, whose members an engine runs on other machines: they are known when it has placed them.

    `process.placed` runs its module `ENGINE` by itself to ask the engine.
    """

    ENGINE: str

    def request(self, section: Any, counts: Sequence[int], cpus: int | None) -> dict[str, Any]:
        """Return what is asked of the engine: places for one of these numbers of workers, the first that there is room
        for, with so many cores each; None leaves them to the engine."""

    def members_at(self, section: Any, places: Sequence[Placed]) -> list[Member]:
        """Return the members at the places that were found, the chief first."""


def find_placing(cluster: config.Cluster) -> Placing | None:
    """Return the launcher of a cluster whose members an engine runs on other machines; None for others."""
    found: Any = find(cluster)
    return found if hasattr(found, "members_at") else None


def find(cluster: config.Cluster) -> Launcher:
    """Return the launcher of a cluster."""
    found: Any = importlib.import_module(f"tasks.strategies.engines.{cluster.launcher or _launcher_of_environment()}")
    launcher: Launcher = found
    return launcher


def _launcher_of_environment() -> str:
    """Return the launcher of settings that name none."""
    if os.environ.get("TF_CONFIG"):
        return "tf_config"
    if os.environ.get("STRATAGEM_POD_ADDRESSES"):
        return "kubernetes"
    # A batch script is a step of one task, and starts what it starts itself.
    return "slurm" if int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1 else "local"


def members(section: config.StrategySection) -> list[Member]:
    """Return the processes that this command starts; where the chief is among them, it is the first.

    Raises:
        UserError: not enough GPUs, a TF_CONFIG that cannot be used, or a port that is taken.
    """
    return [ALONE] if section.cluster is None else find(section.cluster).members(section)


def find_network(cluster: config.Cluster) -> Network | None:
    """Return the network that a cluster's members share, or print why others reach their servers, too."""
    found = find(cluster).network()
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
    """Refuse a strategy that cannot be trained on this machine, as far as that shows without a framework.

    Raises:
        UserError: no TPU; or see `members`.
    """
    if section.needs is not None:
        importlib.import_module(f"tasks.strategies.engines.{section.needs}").check(section)
    members(section)
