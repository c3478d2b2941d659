"""A real Slurm of two nodes: Debian's packages slurmctld and slurmd."""

import contextlib
import getpass
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tasks.system.machine import free_ports
from tests.waiting import wait

MISSING = [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
REASON = f"{', '.join(MISSING)}: apt-get install slurmctld slurmd slurm-client"
CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost({addresses[0]})
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MessageTimeout=100
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
NodeName=n1 NodeHostname=localhost NodeAddr={addresses[0]} Port={ports[1]} CPUs={cores} State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr={addresses[1]} Port={ports[2]} CPUs={cores} State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=2
"""


def _here(index: int, *words: str) -> list[str]:
    return list(words)


@contextlib.contextmanager
def running(
    folder: Path,
    addresses: Sequence[str] = ("127.0.0.1", "127.0.0.1"),
    command: Callable[..., list[str]] = _here,
) -> Iterator[Path]:
    """Give Slurm's configuration, while its daemons run; `command(index, *words)` is a command on the host of a node,
    and the first one has the controller, too."""
    (folder / "state").mkdir()
    path = folder / "slurm.conf"
    values = {"user": getpass.getuser(), "ports": free_ports(3), "cores": os.cpu_count(), "addresses": addresses}
    path.write_text(CONFIGURATION.format(folder=folder, **values))
    commands = [command(0, "slurmctld", "-D"), *(command(i, "slurmd", "-D", "-N", f"n{i + 1}") for i in range(2))]
    with (folder / "daemons.log").open("wb") as log:
        daemons = [
            subprocess.Popen([*words, "-f", str(path)], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            for words in commands
        ]
    try:
        asked = command(0, "sinfo", "--noheader", "--format=%T")
        given = {"env": os.environ | {"SLURM_CONF": str(path)}, "capture_output": True, "text": True}
        wait(
            "that both nodes are idle",
            lambda: subprocess.run(asked, check=False, **given).stdout.split() == ["idle"],
            120,
        )
        yield path
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(180)
