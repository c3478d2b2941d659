"""Strategies by kind: the file is the key, and its ``build`` makes a ``Strategy`` from its section of the settings."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tasks import config


@dataclass(frozen=True)
class Strategy:
    """Where a training runs."""

    kind: str
    num_replicas: int
    devices: tuple[str, ...]
    """Names of the devices that hold a replica, as the backend spells them."""
    scope: Callable[[], AbstractContextManager[Any]]
    """Variables (model, optimizer, metrics) are made inside it."""
    distribute: Callable[[Any], Any]
    """Takes a ``tf.data.Dataset`` whose elements are per-replica batches, in the replicas' order; returns one that
    gives each replica its own."""

    def describe(self) -> str:
        """Return one line: the kind, the replicas and the devices they really lie on."""
        return f"{self.kind}, {self.num_replicas} replica{'s' * (self.num_replicas > 1)} on {', '.join(self.devices)}"


@lru_cache(maxsize=1)
def build(section: config.OneDevice | config.Mirrored) -> Strategy:
    """Return the strategy of a section; it takes hold of the devices, once for the whole process.

    Raises:
        UserError: a device that the section names does not exist.
    """
    strategy: Strategy = importlib.import_module(f"tasks.strategies.{section.kind}").build(section)
    return strategy
