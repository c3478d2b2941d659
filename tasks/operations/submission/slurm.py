"""Slurm: passes the batch script slurm.sh.j2 to `sbatch`. Slurm stops it before its time limit, and it requeues itself.

Slurm's manual explains the options: https://slurm.schedmd.com/sbatch.html.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks import config, records
from tasks.operations.submission import SETTINGS_FILE, ask, name_of, number, render
from tasks.system.errors import UserError

FILE = "job.sh"
LAUNCHER = "slurm"
OPTIONS = {
    "nodes": "number of machines; by default one per process",
    "time": "time limit, such as 01:00:00; then the job requeues itself and continues",
    "partition": "the queue",
    "account": "the account to charge",
    "qos": "quality of service",
    "constraint": "features that the nodes must have",
    "gpus-per-task": "GPUs of each process; by default strategy.devices of multi_worker, and none on JAX",
    "cpus-per-task": "processor cores of each process",
    "mem-per-cpu": "memory per core, such as 4G",
    "signal": "the signal that stops the job, and how many seconds before the end; by default TERM@120",
    "max-restarts": "how often the job may requeue itself; by default 100 times",
}
OWN = ("chdir", "distribution", "job-name", "ntasks", "open-mode", "output", "requeue")
"""The options of sbatch that the script sets itself. It passes on all others, and sbatch rejects unknown ones."""
# `stratagem run` saves its step and stops on these; other signals end it at once.
SIGNALS = ("TERM", "INT", "HUP")


def write(settings: config.Settings, given: Mapping[str, str], folder: Path) -> str:
    """Return the batch script of a job with these options and this folder.

    Raises:
        UserError: an option has a wrong value, or there are more nodes than processes.
    """
    options, num_processes = dict(given), settings.strategy.num_processes
    nodes = number(options, "nodes", num_processes)
    if nodes > num_processes:
        raise UserError(
            f"nodes = {nodes}: the number of processes is {num_processes}, so a node would be idle. "
            "Use fewer nodes, or a strategy of more processes, such as --set strategy.kind=multi_worker --set "
            f"strategy.workers={nodes}"
        )
    signal = options.pop("signal", "TERM@120")
    name, _, lead = signal.partition("@")
    if name not in SIGNALS or not lead.isdecimal():  # Slurm would accept others.
        raise UserError(
            f"signal = {signal}: a run saves its step on {', '.join(SIGNALS)}. Use one of them and the seconds before "
            "the end, such as TERM@120"
        )
    if (gpus := settings.strategy.required_gpus) is not None:
        options.setdefault("gpus-per-task", str(gpus))
    return render(
        "slurm.sh.j2",
        name=name_of(settings),
        project=str(folder.parents[2]),
        folder=str(folder),
        nodes=nodes,
        num_processes=num_processes,
        signal=signal,
        max_restarts=number(options, "max-restarts", 100),
        options=options,
        program=str(Path(sys.executable).with_name("stratagem")),
        settings=f"{folder}/{SETTINGS_FILE}",
    )


def submit(file: Path) -> tuple[str, tuple[str, ...]]:
    """Submit a script; return the job's number, and the option that names its cluster if there are several.

    Raises:
        UserError: Slurm's commands are not installed, or it refuses the job.
        StratagemError: Slurm does not answer.
    """
    job_id, _, cluster = _slurm(["sbatch", "--parsable", str(file)]).strip().partition(";")
    place = ("--clusters", cluster) if cluster else ()
    return job_id, place


def state(job: records.Job) -> tuple[str, str]:
    """Return a job's state in Slurm's words, and where it runs or why it waits; ("", "") if Slurm has forgotten it.

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
    """Cancel a job: Slurm stops its processes, and kills the remaining ones after KillWait.

    Raises:
        StratagemError: Slurm does not answer, or refuses.
    """
    _slurm(["scancel", *job.place, job.id])


def logs(job: records.Job) -> str | None:
    """Return the output of the job's processes so far; None if they have not begun."""
    file = config.project_root() / job.folder / "output.log"
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None


def _slurm(command: Sequence[str]) -> str:
    install = "Install Slurm's commands (Debian: slurm-client), or submit on the cluster's login node, which has them"
    silent = ("Unable to contact slurm controller", "Connection refused", "Socket timed out")
    return ask("slurm", command, install, silent, "scontrol ping")
