"""The places that Ray reserves on its nodes for the processes of a training: what each takes, how many there is room
for, and with how many workers the training goes on where there is not room for all."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# After how many seconds of waiting the command is told.
TELL_SECONDS = 5.0
# How long nodes that are missing are waited for: one that has just been started takes a few seconds to come.
MISSING_SECONDS = 20.0
# And how long nodes that others use, before the training goes on with fewer workers, where it may.
BUSY_SECONDS = 30.0


class Refused(Exception):
    """What was asked for cannot be had, in words for the user."""


def reserve(asked: Mapping[str, Any], tell: Callable[[str], None]) -> tuple[Any, dict[str, int], int]:
    """Reserve places for as many workers as there is room for, of the numbers that are allowed; return the group, what
    each place has, and how many there are.

    Nodes that are missing are waited for a little, those that others use as long as it takes.

    Args:
        asked: see `ray.request`.
        tell: is given a sentence once, when it takes longer.

    Raises:
        Refused: the cluster has too few nodes.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    counts, others = list(asked["counts"]), asked["others"]
    began, told = time.monotonic(), False
    while True:
        nodes = _nodes()
        bundle = find_bundle(asked, nodes, counts[0] + others)
        room = count_places(nodes, bundle) - others
        count = next((one for one in counts if one <= room), None)
        if count is None:
            if time.monotonic() - began > MISSING_SECONDS:
                raise Refused(_too_few(counts, others, bundle, nodes))
            time.sleep(1)
            continue
        group = placement_group([bundle] * (count + others), strategy="SPREAD")
        tried = time.monotonic()
        while not group.wait(1):
            if count_places(_nodes(), bundle) - others < count:
                break
            if time.monotonic() - tried > BUSY_SECONDS and count > counts[-1]:
                counts = [one for one in counts if one < count]
                break
            if not told and time.monotonic() - began > TELL_SECONDS:
                told = True
                tell(
                    f"others use the nodes of Ray's cluster: waiting for {count + others} places of {_in_words(bundle)}"
                )
        else:
            return group, bundle, count + others
        remove_placement_group(group)


def _nodes() -> list[dict[str, float]]:
    """Return what each node that is alive has in all."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def find_bundle(asked: Mapping[str, Any], nodes: Sequence[Mapping[str, float]], processes: int) -> dict[str, int]:
    """Return what a process takes."""
    gpus = asked["gpus"]
    if gpus is None:  # One each, where there are so many.
        gpus = int(sum(node.get("GPU", 0) for node in nodes) >= processes)
    elif asked["or_cpus"] and count_places(nodes, {"GPU": gpus}) < processes:
        gpus = 0
    cpus = asked["cpus"] or _cores(nodes, processes)
    return {"CPU": cpus, **({"GPU": gpus} if gpus else {})}


def _cores(nodes: Sequence[Mapping[str, float]], processes: int) -> int:
    """Return how many cores each process can have: those of a node, where there are as many nodes as processes."""
    cores = sorted((int(node.get("CPU", 0)) for node in nodes), reverse=True)
    cores = [number for number in cores if number]  # The head node often has none to give.
    if len(cores) >= processes:
        return cores[processes - 1]
    fitting = (each for each in range(1, max(cores, default=0) + 1) if sum(n // each for n in cores) >= processes)
    return max(fitting, default=1)


def count_places(nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, int]) -> int:
    """Return how many places the nodes have in all."""
    return sum(min(int(node.get(name, 0) // number) for name, number in bundle.items()) for node in nodes)


def _in_words(bundle: Mapping[str, int]) -> str:
    return " and ".join(f"{number} {name}" for name, number in bundle.items())


def _too_few(
    counts: Sequence[int], others: int, bundle: Mapping[str, int], nodes: Sequence[Mapping[str, float]]
) -> str:
    least = counts[-1] + others
    fewer = "" if len(counts) > 1 else ", or strategy.min_workers to train with fewer"
    return (
        f"strategy.launcher = 'ray': {least} processes of {_in_words(bundle)} each are needed, and the "
        f"{len(nodes)} nodes of the cluster have room for {count_places(nodes, bundle)}. Start more nodes, or give "
        f"fewer strategy.workers or strategy.cpus{fewer}"
    )
