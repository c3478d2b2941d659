"""Slurm: hands the batch script slurm.sh.j2 to `sbatch`. Slurm tells it to stop before its time is up, and it queues
itself again.

Slurm's manual explains the options: https://slurm.schedmd.com/sbatch.html.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks import config, records
from tasks.operations.submission import SETTINGS_FILE, TOKEN_FILE, Request, number, render
from tasks.strategies.engines.slurm import TOKEN
from tasks.system.errors import StratagemError, UserError

FILE = "job.sh"
OPTIONS = {
    "nodes": "machines; without it one for each process",
    "time": "how long it may take at a time, such as 01:00:00; then it is queued again, and goes on",
    "partition": "which queue",
    "account": "whose share of the cluster is charged",
    "qos": "quality of service",
    "constraint": "features that the nodes must have",
    "gpus-per-task": "GPUs of each process; without it strategy.devices of multi_worker, and none on JAX",
    "cpus-per-task": "processor cores of each process",
    "mem-per-cpu": "memory for each core, such as 4G",
    "signal": "what tells it to stop, and how many seconds before the end; without it TERM@120",
    "max-restarts": "how often it may be queued again; without it 100 times",
}
# `stratagem run` saves its step and stops on these; other signals end it at once.
SIGNALS = ("TERM", "INT", "HUP")
# Slurm checks once a minute, so its signal may come this much earlier than asked.
EARLIER_SECONDS = 60


def write(request: Request) -> str:
    """Return the batch script.

    Raises:
        UserError: an option has a wrong value, or there are more nodes than processes.
    """
    options = dict(request.options)
    nodes = number(options, "nodes", request.num_processes)
    if nodes > request.num_processes:
        raise UserError(
            f"nodes = {nodes}: the number of processes is {request.num_processes}, so a node would have nothing to do. "
            "Give fewer nodes, or a strategy of more processes, such as --set strategy.kind=multi_worker --set "
            f"strategy.workers={nodes}"
        )
    signal = options.pop("signal", "TERM@120")
    name, _, lead = signal.partition("@")
    if name not in SIGNALS or not lead.isdecimal():
        raise UserError(
            f"signal = {signal}: a run saves its step on {', '.join(SIGNALS)}. Give one of them and the seconds before "
            "the end, such as TERM@120"
        )
    least = int(lead) + EARLIER_SECONDS
    if (time := options.get("time")) is not None and 0 < seconds(time) <= least:
        raise UserError(
            f"time = {time}: the signal to stop comes {lead} to {least} s before the end (signal = {signal}), so that "
            "nothing might be trained. Give more time, or fewer seconds"
        )
    if (gpus := request.settings.strategy.required_gpus) is not None:
        options.setdefault("gpus-per-task", str(gpus))
    folder = str(request.folder)
    return render(
        "slurm.sh.j2",
        name=request.name,
        project=str(request.folder.parents[2]),
        folder=folder,
        nodes=nodes,
        num_processes=request.num_processes,
        signal=signal,
        max_restarts=number(options, "max-restarts", 100),
        options=options,
        token_variable=TOKEN,
        token=f"{folder}/{TOKEN_FILE}:{request.folder.name}",
        program=str(Path(sys.executable).with_name("stratagem")),
        settings=f"{folder}/{SETTINGS_FILE}",
    )


def submit(file: Path) -> tuple[str, tuple[str, ...]]:
    """Hand a script to sbatch; return the job's number, and the option that names its cluster if there are several.

    Raises:
        UserError: Slurm's commands are not installed, it refuses the job, or the job would wait for ever.
        StratagemError: Slurm does not answer.
    """
    directives = re.findall(r"^#SBATCH --([\w-]+)=(.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    check_partition({name: "".join(shlex.split(value)) for name, value in directives})
    job_id, _, cluster = _slurm(["sbatch", "--parsable", str(file)]).strip().partition(";")
    return job_id, ("--clusters", cluster) if cluster else ()


def check_partition(asked: Mapping[str, str]) -> None:
    """Refuse a job that fits no partition: sbatch accepts it, and it waits for ever.

    Slurm's words for it are PartitionNodeLimit, PartitionTimeLimit and PartitionConfig.

    Args:
        asked: `nodes`, `ntasks`, and maybe `cpus-per-task`, `time` and `partition`.

    Raises:
        UserError: the job asks for more nodes, cores or time than any of its partitions has.
        StratagemError: Slurm does not answer.
    """
    partition = ["--partition", asked["partition"]] if "partition" in asked else []
    told = _slurm(["sinfo", "--noheader", "--format=%P|%D|%c|%l|%s", *partition])
    partitions: dict[str, list[list[str]]] = {}
    for line in told.split():
        name, *facts = line.split("|")
        if partition or name.endswith("*"):  # The star marks the default partition.
            partitions.setdefault(name.rstrip("*"), []).append(facts)
    reasons = [_reason_against(name, groups, asked) for name, groups in partitions.items()]
    if reasons and all(reasons):
        raise UserError(reasons[0])


def _reason_against(partition: str, groups: list[list[str]], asked: Mapping[str, str]) -> str:
    """Return why a partition can never start a job, or "".

    Args:
        partition: its name.
        groups: its nodes: how many, cores of each, the longest time, and nodes per job (`1-4`, `1-infinite`).
        asked: as in ``check_partition``.
    """
    nodes, longest = int(asked["nodes"]), groups[0][2]
    # `8+` are eight cores or more.
    cores = sorted((int(count.rstrip("+")) for many, count, *_ in groups for _ in range(int(many))), reverse=True)
    most = groups[0][3].rpartition("-")[2]
    most_nodes = min(len(cores), int(most)) if most.isdecimal() else len(cores)
    if nodes > most_nodes:
        return (
            f"nodes = {nodes}: partition {partition} gives a job {most_nodes} at most, so that this one would wait for "
            "ever. Give fewer --nodes, which then have several processes each, or another --partition"
        )
    each = asked.get("cpus-per-task", "1")
    wanted, there = int(asked["ntasks"]) * int(each), sum(cores[:nodes])
    if wanted > there and not any("+" in count for _, count, *_ in groups):
        return (
            f"nodes = {nodes}: {asked['ntasks']} processes with {each} cores each need {wanted}, "
            f"and as many nodes of partition {partition} have {there}. Give more --nodes, or fewer processes or cores"
        )
    if "time" in asked and longest != "infinite" and seconds(asked["time"]) > seconds(longest):
        return (
            f"time = {asked['time']}: partition {partition} gives a job {longest} at most, so that this one would wait "
            "for ever. Give that: it is queued again, and goes on"
        )
    return ""


def state(job: records.Job) -> tuple[str, str]:
    """Return Slurm's word for a job's state, and where it runs or why it waits; ("", "") if Slurm has forgotten it.

    Raises:
        StratagemError: Slurm does not answer.
    """
    try:
        told = _slurm(["scontrol", *job.place, "show", "job", "--oneliner", job.id])
    except UserError as error:
        if "Invalid job id" in str(error):
            return "", ""
        raise
    found = dict(re.findall(r"(\w+)=(\S*)", told))
    where = found.get("NodeList", "")
    return found.get("JobState", ""), where if where not in ("", "(null)") else found.get("Reason", "")


def cancel(job: records.Job) -> None:
    """End a job with scancel: Slurm tells its processes to stop, and kills what is left after its KillWait.

    Raises:
        StratagemError: Slurm does not answer, or refuses.
    """
    _slurm(["scancel", *job.place, job.id])


def logs(job: records.Job) -> str | None:
    """Return what the job's processes have printed so far; None if they have not begun."""
    file = config.project_root() / job.folder / "output.log"
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None


def seconds(text: str) -> float:
    """Return the seconds of a time in one of sbatch's forms; infinity for UNLIMITED.

    Raises:
        UserError: it is not a time.
    """
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if len(parts) <= 3 and all(part.isdecimal() for part in ([days, *parts] if dash else parts)):
        units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)  # `90` and `1:30` begin with minutes.
        return 86_400 * int(days or 0) + sum(int(part) * unit for part, unit in zip(parts, units, strict=False))
    raise UserError(
        f"time = {text}: it is no time. Give minutes, hours:minutes:seconds or days-hours:minutes:seconds, such as "
        "01:00:00"
    )


def _slurm(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise UserError(
            f"launcher slurm: `{command[0]}` is not on the PATH. Install Slurm's commands (Debian: slurm-client), or "
            "submit where they are, on the cluster's login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise StratagemError(f"launcher slurm: `{command[0]}` gave no answer within 120 s") from None
    if done.returncode == 0:
        return done.stdout
    said = " ".join(done.stderr.split())
    if any(one in said for one in ("Unable to contact slurm controller", "Connection refused", "Socket timed out")):
        raise StratagemError(f"launcher slurm: the controller does not answer ({said}). `scontrol ping` says more")
    raise UserError(f"launcher slurm: `{command[0]}` refuses it ({said})")
