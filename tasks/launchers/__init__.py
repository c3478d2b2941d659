"""Launchers by name: which processes of a cluster this command starts, and what the environment of each says.

The file is the key: `strategy.launcher` names it (`config.Cluster`), and it has what a `Launcher` has. `local` makes a
cluster on this machine; `tf_config` takes this process's place in a cluster that someone else starts.
"""

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tasks import config
from tasks.launchers.isolation import Network


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


def find(cluster: config.Cluster) -> Launcher:
    """Return the launcher of a cluster."""
    name = cluster.launcher or ("tf_config" if os.environ.get("TF_CONFIG") else "local")
    found: Any = importlib.import_module(f"tasks.launchers.{name}")
    launcher: Launcher = found
    return launcher


def members(section: config.StrategySection) -> list[Member]:
    """Return the processes that this command starts; where the chief is among them, it is the first.

    Raises:
        UserError: not enough GPUs, a TF_CONFIG that cannot be used, or a port that is taken.
    """
    return [ALONE] if section.cluster is None else find(section.cluster).members(section)


def find_network(cluster: config.Cluster) -> Network | None:
    """Return the network that a cluster's members are to share, or say why others reach their servers, too."""
    found = find(cluster).network()
    if isinstance(found, Network):
        return found
    print(
        f"this cluster's servers let in whoever reaches this machine's ports, because {found}: TensorFlow asks no "
        "password, and who is in can read and write your files. Let a firewall admit the cluster's machines alone",
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
        importlib.import_module(f"tasks.launchers.{section.needs}").check(section)
    members(section)
