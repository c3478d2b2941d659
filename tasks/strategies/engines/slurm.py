"""This process's own place among the tasks of a Slurm step, as the variables SLURM_* describe it.

TensorFlow's SlurmClusterResolver is not used: it asks for `nvidia-smi` where there is no GPU, and takes the same ports
for each job of a machine (tensorflow#39336).
"""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

from tasks import config
from tasks.strategies.engines import Member, member_of_rank, threads_of
from tasks.system.errors import StratagemError, UserError

STARTS_ALL = False
TOKEN = "STRATAGEM_JOB_TOKEN"
"""The path of a file that `stratagem submit` wrote and what stands in it: a task that does not find it is elsewhere."""
# Below those that Linux hands out to whoever asks for any port, from 32768 on.
FIRST_PORT, NUM_PORTS = 20_000, 12_000
# Of one job; the next job's begin so much higher.
PORTS_OF_A_JOB = 100


def members(section: config.AnyCluster) -> list[Member]:
    """Return the one member that this process is: the tasks of the step in their order, the chief first.

    Raises:
        UserError: this process is not a task of a step, there are too few or too many tasks, the project's folder is
            not the one where the job was submitted, or see `joined_member`.
        StratagemError: Slurm does not tell the nodes' addresses.
    """
    rank, count = _number("SLURM_PROCID"), _number("SLURM_STEP_NUM_TASKS")
    _check_shared()
    _check_order(rank)
    hosts = _hosts_of_tasks(count)
    first = _number("SLURM_JOB_ID") * PORTS_OF_A_JOB
    addresses = [f"{host}:{FIRST_PORT + (first + task) % NUM_PORTS}" for task, host in enumerate(hosts)]
    member = member_of_rank(section, addresses, rank, "the Slurm step")
    cores = os.environ.get("SLURM_CPUS_PER_TASK")  # Only where the job asks for a number.
    return [replace(member, environment={**member.environment, **threads_of(int(cores))}) if cores else member]


def network() -> str:
    """Return why the members have no network for themselves alone."""
    return "Slurm puts them on one that its machines share"


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UserError(
            f"strategy.launcher = 'slurm': {name} = {text!r}, so this process is not a task of a Slurm step. "
            "`stratagem submit --launcher slurm` submits a job; inside one, start the command by `srun`"
        )
    return int(text)


def _hosts_of_tasks(count: int) -> list[str]:
    """Return the address of the node that each task is on, in the order of the tasks."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    try:
        told = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", nodes], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise StratagemError(f"Slurm does not tell the addresses of {nodes}: {error}") from None
    by_name = dict(re.findall(r"^NodeName=(\S+).* NodeAddr=(\S+)", told, re.MULTILINE))
    hosts = [
        address for address, number in zip(by_name.values(), _tasks_per_node(), strict=False) for _ in range(number)
    ]
    if len(hosts) != count:
        raise StratagemError(
            f"Slurm's step has {count} tasks, and {len(hosts)} places on {nodes} "
            f"({os.environ.get('SLURM_STEP_TASKS_PER_NODE')})"
        )
    return hosts


def _check_order(rank: int) -> None:
    """Refuse tasks that do not fill one node after another, as `stratagem submit` asks for."""
    nodes = [node for node, number in enumerate(_tasks_per_node()) for _ in range(number)]
    if rank >= len(nodes) or nodes[rank] != _number("SLURM_NODEID"):
        raise UserError(
            f"strategy.launcher = 'slurm': task {rank} is on node {os.environ['SLURM_NODEID']} of the step, so these "
            "are not in the order of the nodes. Give srun --distribution=block"
        )


def _tasks_per_node() -> list[int]:
    """Return the numbers of `2(x3),1`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return [int(number) for number, times in found for _ in range(int(times or 1))]


def _check_shared() -> None:
    """Refuse a project's folder that is not the one where the job was submitted."""
    path, _, token = os.environ.get(TOKEN, "").rpartition(":")
    if not path:
        return
    try:
        same = Path(path).read_text(encoding="ascii").strip() == token
    except (OSError, ValueError):
        same = False
    if not same:
        raise UserError(
            f"{path} on {os.uname().nodename} is not what `stratagem submit` wrote there: the project's folder must be "
            "the same on all nodes. Submit from a folder that they share"
        )
