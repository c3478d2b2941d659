"""What every benchmark needs: start a process, let variants take turns, and print ratios with their spread, the commit,
the machine and how busy it was."""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import psutil

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
BIN = Path(sys.executable).parent
QUIET = 0.3
"""With more other processes than that, a table says that the machine was busy."""
SAME_TRAINING = {
    "model.name": "convnet",
    "schedule.kind": "constant",
    "schedule.learning_rate": 0.001,
    "train.per_replica_batch_size": 64,
    "input.validation": None,
    "input.augmentation.crop_padding": 0,
    "checkpoint.monitor": "train/loss",
}
"""The tutorial's model, batch size, optimizer and learning rate in our settings; no validation, no augmentation."""


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    seconds: float
    output: str
    peak_megabytes: float
    """Resident memory of the largest of its processes, at its largest; Linux gives no less than that of this one."""


def watch(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    folder: Path = ROOT,
    codes: tuple[int, ...] = (0,),
) -> Done:
    """Run a command to its end on the CPU, in a folder; ``codes`` are its exit codes without a failure."""
    environment = {**(environment or os.environ), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)  # Of the process, and of those that it waited for.
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if process.returncode not in codes:
            sys.exit(f"{' '.join(command)} failed:\n{errors.read()[-2000:]}")
        return Done(seconds, output.read(), usage.ru_maxrss * 1024 / 1e6)


def read(command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path = ROOT) -> Any:
    """Run a command to its end; return the JSON on the last line of its standard output."""
    return json.loads(watch(command, environment, folder).output.splitlines()[-1])


def module(name: str, *words: object) -> list[str]:
    """Return the command that runs a module of this package."""
    return [sys.executable, "-m", f"benchmarks.{name}", *map(str, words)]


def stratagem(*words: str, settings: Mapping[str, object] | None = None) -> list[str]:
    """Return a command of ours with settings."""
    given = [part for key, value in (settings or {}).items() for part in ("--set", f"{key}={json.dumps(value)}")]
    return [str(BIN / "stratagem"), *words, *given]


def without_server() -> dict[str, str]:
    """Return the environment of a command that uses no running Prefect server."""
    return {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}


class Load:
    """How many processors other programs kept busy since this object was made."""

    def __init__(self) -> None:
        self._began = time.monotonic(), self._busy(), self._own()

    def others(self) -> float:
        """Return it on average; commands that were started here must have ended."""
        began, busy, own = self._began
        return max(0.0, self._busy() - busy - (self._own() - own)) / (time.monotonic() - began)

    @staticmethod
    def _busy() -> float:
        times = psutil.cpu_times()
        return sum(times[:8]) - times.idle - times.iowait  # The rest counts guests a second time.

    @staticmethod
    def _own() -> float:
        used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(one.ru_utime + one.ru_stime for one in used)


@dataclass(frozen=True)
class Measured:
    """What variants measured in turn."""

    figures: dict[str, list[float]]
    others: float
    """The processors that other programs kept busy meanwhile."""


def alternate(part: str, repeats: int, variants: Mapping[str, Callable[[], float]]) -> Measured:
    """Measure each variant, one after the other, so many times."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    load = Load()
    for repeat in range(repeats):
        for name, variant in variants.items():
            found[name].append(variant())
            print(f"{part}: repeat {repeat + 1} of {repeats}, {name}: {found[name][-1]:,.4g}", file=sys.stderr)
    return Measured(found, load.others())


def section(heading: str, packages: Sequence[str], others: float, about: str, lines: Sequence[str]) -> str:
    """Return a section of the page: when, where and of which commit, how busy the machine was, and the tables."""
    busy = (
        f"**The machine was busy: {others:.1f} other processes ran meanwhile, on average.** " if others > QUIET else ""
    )
    quiet = "" if busy else f"; {others:.1f} other processes ran meanwhile"
    return "\n".join([heading, f"{busy}{_machine(packages)}{quiet}. {about}", "", *lines, ""])


def _machine(packages: Sequence[str]) -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown processor")
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, commit {told.stdout.strip() or 'unknown'}: {os.cpu_count()} cores, "
        f"{processor}, Python {platform.python_version()}, {versions}"
    )


def spread(values: Sequence[float], digits: int | None = None) -> str:
    """Return the median and the range."""
    middle = statistics.median(values)
    if digits is None:
        digits = 0 if middle >= 100 else 2
    return f"{middle:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


@dataclass(frozen=True)
class Question:
    """A figure or the ratio of two, and the bound that it must keep."""

    what: str
    ours: str
    """The variant whose figure is divided."""
    peer: str | None
    word: Literal["at least", "at most"]
    bound: float


def answers(questions: Sequence[Question], measured: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the lines of a table of questions: both figures, and the ratio with the range of the single pairs."""
    lines = ["| what | ours | compared with | ratio | wanted | met |", "|---|---|---|---|---|---|"]
    for asked in questions:
        ours = measured[asked.ours]
        found, peer, ratio = statistics.median(ours), "-", "-"
        if asked.peer is not None:
            pairs = [a / b for a, b in zip(ours, measured[asked.peer], strict=True)]
            found /= statistics.median(measured[asked.peer])
            peer = f"{asked.peer}: {spread(measured[asked.peer])}"
            ratio = f"{found:.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
        met = found >= asked.bound if asked.word == "at least" else found <= asked.bound
        lines.append(
            f"| {asked.what} | {spread(ours)} | {peer} | {ratio} | {asked.word} {asked.bound} | "
            f"{'yes' if met else '**no**'} |"
        )
    return lines


def kept(heading: str, page: Path = PAGE) -> str:
    """Return the section that a page has under a heading, or nothing."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    _, found, rest = text.partition(heading)
    own, _, _ = rest.partition("\n## ")
    return found and found + own.rstrip("\n") + "\n"
