"""Launchers by name: which processes of a cluster this command starts, and what the environment of each says.

A launcher is a module with ``members(section) -> list[Member]``, called anew for each start; ``WHOLE``: whether these
are all of the cluster's, so that they can be started again together; and ``network()``: one that no other process is in
(see `isolation`), or why there is none. `local` makes a cluster on this machine; `tf_config` takes this process's place
in a cluster that someone else starts.
"""

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

from tasks import config


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


def find(section: config.Cluster) -> ModuleType:
    """Return the launcher of a cluster."""
    name = section.launcher or ("tf_config" if os.environ.get("TF_CONFIG") else "local")
    return importlib.import_module(f"tasks.launchers.{name}")


def members(section: config.AnyStrategy) -> list[Member]:
    """Return the processes that this command starts; where the chief is among them, it is the first.

    Raises:
        UserError: not enough GPUs, a TF_CONFIG that cannot be used, or a port that is taken.
    """
    if not isinstance(section, config.Cluster):
        return [Member("worker", 0, True, {})]
    found: list[Member] = find(section).members(section)
    return found


def visible_gpus() -> list[str]:
    """Return the GPUs that a process started now would see, as CUDA_VISIBLE_DEVICES spells them; no framework is
    asked."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:  # No driver.
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or not count:
        return [str(index) for index in range(count)]
    return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
