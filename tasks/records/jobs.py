"""What was handed to a cluster that someone else keeps."""

from tasks.records.record import Name, Place, Record


class Job(Record):
    """A run that `stratagem submit` handed over."""

    engine: Name
    """The file of tasks/operations/submission/ that did it, such as `slurm`."""
    id: str
    """What the engine calls it."""
    place: tuple[str, ...] = ()
    """Words that lead the engine's commands to it, such as ``--namespace team``."""
    name: str
    folder: Place
    """Where its script and its log lie, from the project's folder."""
    num_processes: int
    submitted_at: str


class JobState(Record):
    """A job, and how it is."""

    job: Job
    state: str
    """As the engine says it, such as RUNNING; `ended (0)` with the exit code where the engine has forgotten it; `gone`
    without one; `unknown` where the engine does not answer."""
    detail: str = ""
    """Why it waits, or where it runs."""
