"""This process's place among the tasks of a Slurm step, from the variables SLURM_*.

TensorFlow's SlurmClusterResolver is not used: it needs `nvidia-smi` even without a GPU, and uses the same ports for all
jobs on a machine (tensorflow#39336).
"""

import os
import re
import subprocess
from dataclasses import replace

from tasks import config
from tasks.strategies import tasks_of
from tasks.strategies.engines import Member, cluster_of, joined_member, threads_of
from tasks.system.errors import StratagemError, UserError

SHARED_NETWORK = "Slurm's machines share a network"
STARTS_ALL = False
# Below Linux's ephemeral ports, which start at 32768.
FIRST_PORT, NUM_PORTS = 20_000, 12_000
# Ports reserved for one job; those of the next job follow.
PORTS_OF_A_JOB = 100


def members(section: config.AnyCluster) -> list[Member]:
    """Return this process's member; members are the step's tasks in order, the chief first.

    The tasks must fill one node after another, as with srun --distribution=block.

    Raises:
        UserError: this process is not a task of a step, the step has too few or too many tasks, or see `joined_member`.
        StratagemError: Slurm does not return the nodes' addresses.
    """
    rank, count = _number("SLURM_PROCID"), _number("SLURM_STEP_NUM_TASKS")
    hosts = _hosts_of_tasks(count)
    first = _number("SLURM_JOB_ID") * PORTS_OF_A_JOB
    addresses = [f"{host}:{FIRST_PORT + (first + task) % NUM_PORTS}" for task, host in enumerate(hosts)]
    if section.chief_gives_work and count != section.num_processes:
        raise UserError(
            f"strategy.workers = {section.workers} and strategy.ps = {section.jobs(section.workers)['ps']}: with the "
            f"chief these are {section.num_processes} processes, but the Slurm step has {count}. Start as many as "
            "that, or change the settings"
        )
    cluster = cluster_of(section, addresses)
    member = joined_member(section, cluster, *tasks_of(cluster)[rank], "the Slurm step")
    cores = os.environ.get("SLURM_CPUS_PER_TASK")  # Only where the job asks for a number.
    return [replace(member, environment={**member.environment, **threads_of(int(cores))}) if cores else member]


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UserError(
            f"strategy.launcher = 'slurm': {name} = {text!r}, so this process is not a task of a Slurm step. "
            "`stratagem submit --launcher slurm` submits a job; inside one, start the command by `srun`"
        )
    return int(text)


def _hosts_of_tasks(count: int) -> list[str]:
    """Return the address of each task's node, in the order of the tasks."""
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    try:
        told = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", nodes], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise StratagemError(f"Slurm does not return the addresses of {nodes}: {error}") from None
    by_name = dict(re.findall(r"^NodeName=(\S+).* NodeAddr=(\S+)", told, re.MULTILINE))
    hosts = [
        address for address, number in zip(by_name.values(), _tasks_per_node(), strict=False) for _ in range(number)
    ]
    if len(hosts) != count:
        raise StratagemError(
            f"Slurm's step has {count} tasks, but {nodes} have places for {len(hosts)} "
            f"(SLURM_STEP_TASKS_PER_NODE = {os.environ.get('SLURM_STEP_TASKS_PER_NODE')})"
        )
    return hosts


def _tasks_per_node() -> list[int]:
    """Return the numbers of `2(x3),1`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return [int(number) for number, times in found for _ in range(int(times or 1))]
