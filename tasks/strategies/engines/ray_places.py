"""Reserves places on the nodes of a Ray cluster, and passes messages to and from the members there.

`process.remote_members` runs it as `python -m tasks.strategies.engines.ray_places`, in a process of its own, because
Ray handles SIGTERM itself and ends a process whose cluster has lost its head node. It reads requests as JSON lines on
standard input and answers on standard output; when its input closes, it ends with all members that it has placed.
"""

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from tasks.strategies.engines.ray import ADDRESS
from tasks.system.files import MARK
from tasks.system.machine import PACKAGES

# An actor's Python process takes seconds to start.
LOOK_SECONDS = 120.0
OF_A_NODE = ("CUDA_VISIBLE_DEVICES", "HOSTNAME", "TMPDIR")
"""Variables that each node keeps; the others come from this command, as with `sbatch`."""
# After how many seconds of waiting the command says so.
TELL_SECONDS = 5.0
# How long to wait for missing nodes: a node that was just started takes a few seconds to join.
MISSING_SECONDS = 20.0
# How long to wait for nodes in use before the training continues with fewer workers, where it may.
BUSY_SECONDS = 30.0


class MemberActor:
    """A Ray actor on a node, whose child process is a member.

    Ray copies this class to the node, where only Ray and the standard library are certain to exist.
    """

    def __init__(self, umask: int) -> None:
        self._umask = umask
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None
        self._said: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def look(self, project: str, token_file: str, token: str, paths: Sequence[str]) -> dict[str, Any]:
        """Return this node's address, a free port, and the versions that must be the same on all nodes."""
        import ray

        try:
            with open(token_file, encoding="ascii") as file:
                shared = file.read() == token
        except (OSError, ValueError):
            shared = False
        with socket.socket() as any_socket:
            any_socket.bind(("", 0))
            port = any_socket.getsockname()[1]
        host = ray.util.get_node_ip_address()
        found = versions(project, paths) if shared else {}
        return {"host": host, "port": port, "shared": shared, "versions": found}

    def start(self, arguments: Sequence[str], project: str, environment: Mapping[str, str], log: str | None) -> None:
        """Run `python ARGUMENTS` in the project's folder."""
        self._end()
        own = {name: os.environ[name] for name in OF_A_NODE if name in os.environ}
        # As `system.temporary` has it: a command on this node removes the folder of an actor that was killed.
        self._folder = tempfile.mkdtemp(prefix="stratagem-")
        self._lock = os.open(self._folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.close(os.open(os.path.join(self._folder, MARK), os.O_WRONLY | os.O_CREAT, 0o600))
        # Ray's threads block SIGINT, and their child processes inherit that: a member could not be interrupted.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        # Without a log its standard error goes to the command's.
        with open(log, "ab") if log is not None else contextlib.nullcontext(subprocess.PIPE) as stderr:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=project,
                env={**own, **environment, "TMPDIR": self._folder},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                umask=self._umask,
                process_group=0,
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()

    def send(self, line: str) -> None:
        """Send a request to the member; one that has died ignores it."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal to the member."""
        if self._process is not None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Close the member's standard input, which ends it."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def leave(self) -> None:
        """End the member, and remove its temporary folder."""
        self._end()

    def read(self) -> list[dict[str, Any]]:
        """Wait for a message of the member, or its end; return all messages since the last call."""
        said = [self._said.get()]
        with contextlib.suppress(Empty):
            while True:
                said.append(self._said.get_nowait())
        return said

    def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        def hand_on(stream: IO[bytes]) -> None:
            with stream:
                while chunk := os.read(stream.fileno(), 65_536):
                    self._said.put({"stderr": chunk.decode("utf-8", "replace")})

        errors = threading.Thread(target=hand_on, args=(process.stderr,), daemon=True)
        if process.stderr is not None:
            errors.start()
        if process.stdout is not None:
            with process.stdout:
                for line in process.stdout:
                    self._said.put({"line": line.decode("utf-8", "replace")})
        if process.stderr is not None:
            errors.join(1.0)  # A forked grandchild can keep the pipe open for longer.
        code = process.wait()
        self._said.put({"ended": signal.Signals(-code).name if code < 0 else f"exit code {code}"})

    def _end(self) -> None:
        self.close()
        if self._process is not None:
            try:
                self._process.wait(5.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None


def versions(project: str, paths: Sequence[str]) -> dict[str, str]:
    """Return what all members must share: Python, the packages that a training's bits depend on, our code."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    spec = importlib.machinery.PathFinder.find_spec("tasks", [project, *paths, *sys.path])
    digest = hashlib.sha256()
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return {**found, "code": digest.hexdigest()[:12]}


class Refused(Exception):
    """The cluster cannot meet a request; the message is for the user."""


class _Messages:
    """Standard output for messages as JSON lines; what Ray writes there goes to standard error."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def say(self, **message: Any) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):  # The reader has gone, and the input closes too.
            self._file.write(json.dumps(message) + "\n")
            self._file.flush()


class _ActorCalls:
    """The calls of one actor, done in the order in which they are made, and the messages that come from it."""

    def __init__(self, actor: Any, host: str, say: Any) -> None:
        self._actor, self._host, self._say = actor, host, say
        self._calls: SimpleQueue[tuple[str, list[Any]]] = SimpleQueue()
        self._lost = threading.Event()
        for work in (self._hear, self._do):
            threading.Thread(target=work, daemon=True).start()

    def call(self, method: str, arguments: list[Any]) -> None:
        self._calls.put((method, arguments))

    def _do(self) -> None:
        import ray

        while True:
            method, arguments = self._calls.get()
            try:
                ray.get(getattr(self._actor, method).remote(*arguments))
            except ray.exceptions.RayError as error:  # `_hear` reports a lost actor.
                print(error, file=sys.stderr, flush=True)
                if method == "start":
                    self._say(ended=f"it could not be started on node {self._host}", lost=self._lost.is_set())

    def _hear(self) -> None:
        import ray

        try:
            while True:
                for message in ray.get(self._actor.read.remote()):
                    self._say(**message)
        except ray.exceptions.RayError as error:
            print(error, file=sys.stderr, flush=True)
            self._lost.set()
            self._tell_lost()

    def _tell_lost(self) -> None:
        self._say(ended=f"Ray has lost its place on node {self._host}", lost=True)


def _serve() -> None:
    """Reserve the places that the first line on standard input requests, then pass messages on."""
    messages = _Messages()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asked = json.loads(sys.stdin.readline())
    try:
        _connect()
        messages.say(connected=True)
        actors, answer = _place(asked, messages)
    except Refused as error:
        messages.say(error=str(error), type="UserError")
        return
    held = [
        _ActorCalls(actor, place["host"], lambda member=member, **message: messages.say(member=member, **message))
        for member, (actor, place) in enumerate(zip(actors, answer, strict=True))
    ]
    messages.say(placed=answer)
    for line in sys.stdin:
        told = json.loads(line)
        held[told["member"]].call(told["do"], told.get("arguments", []))
    _leave(actors)


def _connect() -> None:
    import ray

    try:
        ray.init(address=os.environ.get(ADDRESS) or "auto", log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        text = " ".join(str(error).split())
        raise Refused(
            f"strategy.launcher = 'ray': this machine cannot join a Ray cluster ({text[:500]}). Start one "
            f"(`ray start --head`, and `ray start --address=HOST:PORT` on each node, this one too), or set {ADDRESS}"
        ) from None
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray has taken it.


def _place(asked: Mapping[str, Any], messages: _Messages) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return the actors, and the address, port and cores of each."""
    import ray
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    while True:
        group, bundle, number = reserve(asked, lambda waits: messages.say(waits=waits))
        actors = [
            ray.remote(MemberActor)
            .options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, place),
            )
            .remote(asked["umask"])
            for place in range(number)
        ]
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        look = [asked["project"], asked["token_file"], asked["token"], paths]
        try:
            seen = ray.get([actor.look.remote(*look) for actor in actors], timeout=LOOK_SECONDS)
        except ray.exceptions.RayError as error:  # A node was lost meanwhile: try again on the others.
            print(error, file=sys.stderr, flush=True)
            remove_placement_group(group)
            time.sleep(1)
            continue
        check_same(seen, versions(asked["project"], paths), asked["token_file"])
        places = [{"host": one["host"], "port": one["port"], "cores": bundle["CPU"]} for one in seen]
        # Neighbours in a ring of workers are on the same node where possible.
        order = sorted(range(number), key=lambda place: (places[place]["host"], place))
        return [actors[place] for place in order], [places[place] for place in order]


def check_same(seen: Sequence[Mapping[str, Any]], own: Mapping[str, str], token_file: str) -> None:
    """Refuse nodes whose folder, packages or code differ from this command's."""
    for one in seen:
        host = one["host"]
        if not one["shared"]:
            raise Refused(
                f"{Path(token_file).parent} on Ray's node {host} is not what this command wrote there: the project's "
                "folder must be the same on all nodes, and Ray's user its owner. Train from a folder that they share"
            )
        other = [
            f"{name} is {one['versions'].get(name)} there and {version} here"
            for name, version in own.items()
            if one["versions"].get(name) != version
        ]
        if other:
            raise Refused(
                f"Ray's node {host} is not as this machine: {'; '.join(other)}. Give all nodes the same environment "
                "(requirements.lock) and start their Ray in it"
            )


def reserve(asked: Mapping[str, Any], tell: Callable[[str], None]) -> tuple[Any, dict[str, int], int]:
    """Reserve places for the largest allowed number of workers that fits; return the placement group, the resources of
    each place, and the number of places.

    It waits a little for missing nodes, and for nodes in use as long as it takes.

    Args:
        asked: see `engines.ray.request`.
        tell: gets one sentence if it takes longer.

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
    """Return all resources of each node that is alive."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def find_bundle(asked: Mapping[str, Any], nodes: Sequence[Mapping[str, float]], processes: int) -> dict[str, int]:
    """Return the resources that a process needs."""
    gpus = asked["gpus"]
    if gpus is None:  # One each, if there are enough.
        gpus = int(sum(node.get("GPU", 0) for node in nodes) >= processes)
    elif asked["or_cpus"] and count_places(nodes, {"GPU": gpus}) < processes:
        gpus = 0
    cpus = asked["cpus"] or _cores(nodes, processes)
    return {"CPU": cpus, **({"GPU": gpus} if gpus else {})}


def _cores(nodes: Sequence[Mapping[str, float]], processes: int) -> int:
    """Return how many cores each process can have: a whole node's, if there are as many nodes as processes."""
    cores = sorted((int(node.get("CPU", 0)) for node in nodes), reverse=True)
    cores = [number for number in cores if number]  # The head node often offers none.
    if len(cores) >= processes:
        return cores[processes - 1]
    fitting = (each for each in range(1, max(cores, default=0) + 1) if sum(n // each for n in cores) >= processes)
    return max(fitting, default=1)


def count_places(nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, int]) -> int:
    """Return how many places of these resources all nodes have together."""
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


def _leave(actors: Sequence[Any]) -> None:
    import ray

    with contextlib.suppress(ray.exceptions.RayError):
        ray.get([actor.leave.remote() for actor in actors], timeout=10)
    ray.shutdown()  # Ray ends the actors of a process that has gone, and gives their places to others.


if __name__ == "__main__":
    _serve()
