"""A cluster whose members Ray places on its nodes and watches; training, checkpoints and restarts do not use Ray.

As a launcher this module does not import Ray. `remote_members` runs it as a program, in a separate process,
because Ray handles SIGTERM itself and ends a process whose cluster has lost its head node. The program reads JSON lines
from standard input: first what to place, then calls of the members' actors. It answers on standard output. When its
input closes, it ends all members that it has placed, and exits.
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from queue import SimpleQueue
from typing import IO, Any

from tasks import config
from tasks.strategies import tasks_of
from tasks.strategies.engines import OF_A_NODE, Member, cluster_of, members_at
from tasks.system import errors
from tasks.system.errors import UserError
from tasks.system.network import connection_error

SHARED_NETWORK = "Ray's nodes share a network"
STARTS_ALL = True
ENGINE = __name__
ADDRESS = "RAY_ADDRESS"
"""Ray's own variable: `host:port` of the head node; if unset, Ray looks for a cluster that runs on this machine."""
ANSWER_SECONDS = 5.0
# An actor's Python process takes seconds to start.
LOOK_SECONDS = 120.0
# After how many seconds of waiting the command prints a message.
TELL_SECONDS = 5
# How long to wait for missing nodes: a node that was just started takes a few seconds to join.
MISSING_SECONDS = 20.0


def members(section: config.Cluster) -> list[Member]:
    """Return the members without their environment; `members_at` adds it after Ray has placed them.

    Raises:
        UserError: Ray is not installed, or nothing answers at its address.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "strategy.launcher = 'ray': the package ray is not installed. It is the extra 'ray': "
            "`pip install -e '.[ray]'` in the project's folder, on each node"
        )
    address = os.environ.get(ADDRESS, "")
    if address not in ("", "auto"):
        host, _, port = address.rpartition(":")
        is_address = port.isdecimal() and host and "/" not in host
        error = connection_error(host, int(port), ANSWER_SECONDS) if is_address else "not host:port"
        if error is not None:
            raise UserError(
                f"{ADDRESS} = '{address}': no Ray cluster answers there ({error}). Start one (`ray start --head`), or "
                "set it to host:port of a running cluster's head node, such as 10.0.0.1:6379, on a machine that is one "
                "of its nodes (`ray start --address=HOST:PORT` makes it one)"
            )
    tasks = tasks_of(cluster_of(section, [""] * section.num_processes))
    return [Member(*task, place == 0, {}) for place, task in enumerate(tasks)]


class MemberActor:
    """A Ray actor on a node, whose child process is a member.

    Ray copies this class to the node, which must share the project's folder; `look` checks that.
    """

    def __init__(self) -> None:
        self._child: Any = None
        self._said: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def look(self, log: str) -> tuple[str, int, bool]:
        """Return this node's address, a free port, and whether it has this command's log, so the project's folder."""
        import ray

        with socket.socket() as any_socket:
            any_socket.bind(("", 0))
            return ray.util.get_node_ip_address(), any_socket.getsockname()[1], os.path.exists(log)

    def start(self, arguments: Sequence[str], project: str, environment: Mapping[str, str], log: str | None) -> None:
        """Run `python ARGUMENTS` in the project's folder; a member that ran here before has ended.

        Without a log file, its standard error goes to the command's standard error.
        """
        try:
            self._start(arguments, project, environment, log)
        except Exception as error:  # Nobody reads what this call raises.
            self._said.put({"ended": f"it could not be started ({type(error).__name__}: {error})"})

    def _start(self, arguments: Sequence[str], project: str, environment: Mapping[str, str], log: str | None) -> None:
        # Where the command finds `tasks`: a project made from the wheel does not contain it.
        sys.path[:0] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), project]
        from tasks.system.child import Child

        self.tell("close_input")
        own = {name: os.environ[name] for name in OF_A_NODE if name in os.environ}
        everything = {**own, **environment, "TMPDIR": tempfile.gettempdir()}
        # Ray's threads block SIGINT, and child processes inherit this: a member could not be interrupted.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        try:
            with open(log, "ab") if log is not None else contextlib.nullcontext(subprocess.PIPE) as stderr:
                child = self._child = Child([sys.executable, *arguments], everything, cwd=project, stderr=stderr)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        showing = threading.Thread(target=self._show, args=(child.stderr,), daemon=True)
        showing.start()

        def take(reply: dict[str, Any] | None) -> None:
            if reply is not None:
                self._said.put({"reply": reply})
                return
            showing.join(1.0)  # A forked grandchild can keep the pipe open for longer.
            self._said.put({"ended": child.death})

        child.listen(take)

    def tell(self, do: str, *arguments: Any) -> None:
        """Call a method of the member's `Child`, such as `send`; do nothing if it could not be started."""
        if self._child is not None:
            getattr(self._child, do)(*arguments)

    def read(self) -> dict[str, Any]:
        """Wait for a message from the member or its end, and return it."""
        return self._said.get()

    def _show(self, stream: IO[str] | None) -> None:
        """Pass on what the member writes to standard error."""
        if stream is not None:
            with stream:
                while chunk := os.read(stream.fileno(), 65_536):
                    self._said.put({"stderr": chunk.decode("utf-8", "replace")})


Say = Callable[..., None]
"""Writes its arguments as a JSON line to standard output."""


def _serve() -> None:
    """Reserve the places that the first line on standard input requests, then pass messages on."""
    answers, lock = os.fdopen(os.dup(1), "w", encoding="utf-8"), threading.Lock()
    os.dup2(2, 1)  # Ray's own output goes to standard error.

    def say(**message: Any) -> None:
        with lock, contextlib.suppress(BrokenPipeError):  # The reader has gone, and the input closes too.
            print(json.dumps(message), file=answers, flush=True)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asked = json.loads(sys.stdin.readline())
    section: Any = config.strategy_kinds()[asked["section"]["kind"]].model_validate(asked["section"])
    try:
        _connect()
        actors, addresses, cores = _place(section, asked["counts"], asked["cpus"], asked["log"], say)
    except UserError as error:
        say(**errors.to_json(error))
        return
    say(members=[asdict(member) for member in members_at(section, addresses, cores)], cores=cores)
    for place, actor in enumerate(actors):
        threading.Thread(target=_hand_on, args=(actor, place, addresses[place], say), daemon=True).start()
    for line in sys.stdin:
        told = json.loads(line)
        # Ray runs an actor's calls in the order in which they were made.
        getattr(actors[told["member"]], told["do"]).remote(*told["arguments"])
    import ray

    ray.shutdown()  # Ray ends its actors and their child processes, and gives their places to others.


def _hand_on(actor: Any, place: int, address: str, say: Say) -> None:
    """Pass on all messages of a member, until Ray loses its actor."""
    import ray

    try:
        while True:
            say(member=place, **ray.get(actor.read.options(concurrency_group="reading").remote()))
    except ray.exceptions.RayError as error:
        print(error, file=sys.stderr, flush=True)
        node = address.rpartition(":")[0]
        say(member=place, ended=f"Ray has lost its place on node {node}", lost=True)


def _connect() -> None:
    import ray

    try:
        ray.init(address=os.environ.get(ADDRESS) or "auto", log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"strategy.launcher = 'ray': this machine cannot join a Ray cluster ({text[:500]}). Start one "
            f"(`ray start --head`, and `ray start --address=HOST:PORT` on each node, this one too), or set {ADDRESS}"
        ) from None
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray has taken it.


def _place(
    section: config.Cluster, counts: Sequence[int], cpus: int | None, log: str, say: Say
) -> tuple[list[Any], list[str], int]:
    """Return the actors, the address of each, and their cores; see ``Allocation`` for the arguments.

    Raises:
        UserError: the cluster has too few nodes, or these do not share the project's folder.
    """
    import ray
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    while True:
        group, bundle, number = _reserve(section, counts, cpus, say)
        actors = [
            ray.remote(concurrency_groups={"reading": 1})(MemberActor)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, place),
            )
            .remote()
            for place in range(number)
        ]
        try:
            seen = ray.get([actor.look.remote(log) for actor in actors], timeout=LOOK_SECONDS)
        except ray.exceptions.RayError as error:  # A node was lost meanwhile: try again on the others.
            print(error, file=sys.stderr, flush=True)
            remove_placement_group(group)
            time.sleep(1)
            continue
        if apart := [host for host, _, is_shared in seen if not is_shared]:
            raise UserError(
                f"{log} is not on Ray's node {apart[0]}: the project's folder must be the same on all nodes. "
                "Train from a folder that they share"
            )
        # Neighbours in a ring of workers are on the same node where possible.
        order = sorted(range(number), key=lambda place: (seen[place][0], place))
        addresses = [f"{seen[place][0]}:{seen[place][1]}" for place in order]
        return [actors[place] for place in order], addresses, bundle["CPU"]


def _reserve(
    section: config.Cluster, counts: Sequence[int], cpus: int | None, say: Say
) -> tuple[Any, dict[str, int], int]:
    """Reserve places for the largest allowed number of workers that fits; return the placement group, the resources of
    each place, and the number of places.

    It waits for a short time for missing nodes, and without a limit for nodes in use.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    others = section.num_processes - section.workers
    began = time.monotonic()
    while True:
        nodes = _nodes()
        bundle = find_bundle(section, cpus, nodes, counts[0] + others)
        words = " and ".join(f"{number} {name}" for name, number in bundle.items())
        room = count_places(nodes, bundle)
        count = next((one + others for one in counts if one + others <= room), None)
        if count is None:
            if time.monotonic() - began > MISSING_SECONDS:
                raise UserError(
                    f"strategy.launcher = 'ray': {counts[-1] + others} processes of {words} each are needed, but the "
                    f"{len(nodes)} nodes of the cluster have room for {room}. Start more nodes, or use fewer "
                    "strategy.workers, strategy.min_workers or strategy.cpus"
                )
            time.sleep(1)
            continue
        group = placement_group([bundle] * count, strategy="SPREAD")
        if not group.wait(TELL_SECONDS):
            say(waits=f"others use the nodes of Ray's cluster: waiting for {count} places of {words}")
        while count_places(_nodes(), bundle) >= count:  # Else a node was lost meanwhile.
            if group.wait(1):
                return group, bundle, count
        remove_placement_group(group)


def _nodes() -> list[dict[str, float]]:
    """Return all resources of each node that is alive."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def find_bundle(
    section: config.Cluster, cpus: int | None, nodes: Sequence[Mapping[str, float]], processes: int
) -> dict[str, int]:
    """Return the resources that a process needs."""
    gpus = section.gpus_per_worker
    if gpus is None:  # One each, if there are enough.
        gpus = int(sum(node.get("GPU", 0) for node in nodes) >= processes)
    elif isinstance(section, config.OnJax) and count_places(nodes, {"GPU": gpus}) < processes:
        gpus = 0  # JAX creates as many CPU devices.
    return {"CPU": cpus or _cores(nodes, processes), **({"GPU": gpus} if gpus else {})}


def _cores(nodes: Sequence[Mapping[str, float]], processes: int) -> int:
    """Return the cores that each process can have: those of a whole node, if there are as many nodes as processes."""
    cores = sorted((int(node.get("CPU", 0)) for node in nodes), reverse=True)
    cores = [number for number in cores if number]  # The head node often offers none.
    if len(cores) >= processes:
        return cores[processes - 1]
    fitting = (each for each in range(1, max(cores, default=0) + 1) if sum(n // each for n in cores) >= processes)
    return max(fitting, default=1)


def count_places(nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, int]) -> int:
    """Return the number of places with these resources on all nodes together."""
    return sum(min(int(node.get(name, 0) // number) for name, number in bundle.items()) for node in nodes)


if __name__ == "__main__":
    _serve()
