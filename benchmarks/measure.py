"""What every benchmark needs: run a process, name the machine, write a median with its range."""

import os
import platform
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
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"


@dataclass(frozen=True)
class Done:
    """A command that came to its end."""

    seconds: float
    output: str
    peak_megabytes: float
    """Resident memory of the largest of its processes, at its largest; Linux gives no less than that of this one."""
    processor_seconds: float
    """Of all cores, for the same processes: other work on the machine makes it little longer."""


def watch(command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path = ROOT) -> Done:
    """Run a command to its end on the CPU, in a folder."""
    environment = {**(environment or os.environ), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)  # Of the process, and of those that it waited for.
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{errors.read()[-2000:]}")
        return Done(seconds, output.read(), usage.ru_maxrss * 1024 / 1e6, usage.ru_utime + usage.ru_stime)


def run(command: Sequence[str], environment: Mapping[str, str] | None = None, folder: Path = ROOT) -> tuple[float, str]:
    """Run a command to its end on the CPU, in a folder; return its seconds and its standard output."""
    done = watch(command, environment, folder)
    return done.seconds, done.output


def machine(*packages: str) -> str:
    """Return when and where this was measured: date, cores, processor, versions, and how busy the machine was."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown processor")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return (
        f"{datetime.now(UTC):%Y-%m-%d}: {os.cpu_count()} cores, {processor}, Python {platform.python_version()}, "
        f"{versions}; {os.getloadavg()[2]:.1f} processes on average wanted to run in the last 15 minutes"
    )


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median and the range."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def ratio(mine: Sequence[float], peer: Sequence[float]) -> str:
    """Return the ratio of the medians, and the range of the ratios of the pairs of one repeat."""
    pairs = [a / b for a, b in zip(mine, peer, strict=True)]
    return f"{statistics.median(mine) / statistics.median(peer):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"


@dataclass(frozen=True)
class Question:
    """A ratio that is asked for, and the bound that it is to keep."""

    what: str
    one: str
    """The variant whose figure is divided."""
    other: str
    word: Literal["at least", "at most"]
    bound: float


def answers(questions: Sequence[Question], measured: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the lines of a table of questions."""
    lines = ["| ratio | measured | wanted | met |", "|---|---|---|---|"]
    for asked in questions:
        one, other = measured[asked.one], measured[asked.other]
        found = statistics.median(one) / statistics.median(other)
        met = found >= asked.bound if asked.word == "at least" else found <= asked.bound
        lines.append(
            f"| {asked.what} | {ratio(one, other)} | {asked.word} {asked.bound} | {'yes' if met else '**no**'} |"
        )
    return lines


def alternate(part: str, repeats: int, variants: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Return what each variant measures, one after the other, so many times."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats):
        for name, variant in variants.items():
            found[name].append(variant())
            print(f"{part}: repeat {repeat + 1} of {repeats}, {name}: {found[name][-1]:,.4g}", file=sys.stderr)
    return found


def kept(heading: str, page: Path = PAGE) -> str:
    """Return the section that a page has under a heading, or nothing."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    _, found, rest = text.partition(heading)
    own, _, _ = rest.partition("\n## ")
    return found and found + own.rstrip("\n") + "\n"
