"""The commands for clusters: `submit`, `jobs`, and `plan`, which predicts the speed of a cluster."""

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from flows.cli.command import RECIPES, SETTINGS, Result, argument, option
from flows.cli.tables import format_moment, print_rows, print_table
from tasks.system import units
from tasks.system.errors import UserError, one_of

if TYPE_CHECKING:
    from tasks.config import Settings
    from tasks.records import PreparedDataset

JOB = argument("JOB", "The job's id in the cluster, or `latest`.")
SUMMED = {
    "ring": "in a ring over gRPC, fitted to measurements with 2 to 4 workers",
    "nccl": "in a ring by a textbook formula, without measurements",
}


def submit(
    recipes: list[str] = RECIPES,
    overrides: list[str] = SETTINGS,
    launcher: str = option("--launcher", "The kind of cluster: slurm or kubernetes.", "NAME", default="slurm"),
    nodes: str | None = option("--nodes", "Slurm: number of machines; by default one per process.", "N"),
    time: str | None = option("--time", "Slurm: time limit, such as 01:00:00; then the job requeues itself.", "T"),
    partition: str | None = option("--partition", "Slurm: the queue.", "NAME"),
    others: list[str] = option(
        "--option", "Another option of the launcher, such as gpus-per-task=1.", "NAME=VALUE", default=[]
    ),
    dry_run: bool = option("--dry-run -n", "Only print what would be submitted."),
) -> Result:
    """Submit a run to Slurm or Kubernetes.

    Before the time limit of a Slurm job, the run saves its step, and the job requeues itself and continues the run.
    """
    from tasks import config
    from tasks.operations import dvc_data, preconditions, submission

    given = {"nodes": nodes, "time": time, "partition": partition}
    options = {name: value for name, value in given.items() if value is not None}
    for text in others:
        name, equals, value = text.partition("=")
        if not (equals and value) or name in options:
            raise UserError(f"--option {text}: write NAME=VALUE, and each name only once")
        options[name] = value
    engine = submission.find_engine(launcher)
    if config.load(recipes, overrides).strategy.cluster is not None:
        overrides = [*overrides, f"strategy.launcher={engine.LAUNCHER}"]
    settings = dvc_data.settle(recipes, overrides)
    if not dry_run:
        preconditions.check_writable()
        dvc_data.check_source(settings.dataset)
    text, job = submission.submit(launcher, settings, options, only_write=dry_run)
    yield {"file": text} if job is None else job
    if job is None:
        print(text, end="")
    else:
        print(f"submitted job {job.id} ({job.name}); its files are in {job.folder}/")
        print(f"`stratagem jobs` shows its state, `jobs logs {job.id}` prints its log, `jobs cancel {job.id}` ends it")


def list_() -> Result:
    """List the jobs submitted from this project with their states, the newest first."""
    from tasks.operations import submission

    found = [submission.state(job) for job in submission.jobs()]
    yield found
    if not found:
        print("This project has no jobs: `stratagem submit` submits a run to a cluster.")
        return
    jobs = [
        (one.job.id, one.job.engine, one.state, one.detail, format_moment(one.job.submitted_at), one.job.name)
        for one in found
    ]
    print_table(("job", "launcher", "state", "where or why", "submitted", "run"), jobs)


def logs(job: str = JOB) -> None:
    """Print what the processes of a job have printed so far."""
    from tasks.operations import submission

    sys.stdout.write(submission.logs(submission.find_job(job)))


def cancel(job: str = JOB) -> None:
    """Cancel a job.

    Its run keeps its latest checkpoint, and the same `stratagem run` continues from there.
    """
    from tasks.operations import submission

    found = submission.find_job(job)
    submission.find_engine(found.engine).cancel(found)
    print(f"cancelling job {found.id}; `stratagem jobs` shows its state")


def plan(
    recipes: list[str] = RECIPES,
    overrides: list[str] = SETTINGS,
    workers: int = option("--workers", "Number of machines.", "N", min=1, default=2),
    bandwidth: str = option("--bandwidth", "Bandwidth of each machine, such as 25Gbps.", "B", default="10Gbps"),
    latency: str = option("--latency", "Time of a packet, one way, such as 50us.", "T", default="50us"),
    devices: int = option("--devices", "GPUs per machine.", "N", min=1, default=1),
    step_seconds: str | None = option(
        "--step-seconds", "Compute time of a step on one device, such as 180ms; by default measured.", "T"
    ),
    parameters: str | None = option(
        "--parameters", "Parameters of the model, such as 25.6M; by default counted in the model.", "N"
    ),
    communication: str | None = option(
        "--communication",
        "ring (gRPC, fitted to measurements) or nccl (a textbook formula); by default from "
        "strategy.communication and this machine.",
        "HOW",
    ),
    mtbf: str | None = option(
        "--mtbf", "Mean time between failures of a machine, such as 30d; by default no machine fails.", "T"
    ),
    restart: str = option("--restart", "Time from a failure to the next step, such as 2min.", "T", default="2min"),
    checkpoint: str | None = option(
        "--checkpoint", "Time that a training waits for a checkpoint, such as 1s; by default measured.", "T"
    ),
) -> Result:
    """Predict speed and cost of training on many machines.

    Predicts examples per second, efficiency, the bottleneck and the cost of failures. In the model, each step first
    computes and then sums the gradients in a ring; docs/scale.md has the formulas and their measured errors. Values
    that you omit are measured on one device of this machine with the prepared data.
    """
    from tasks.operations import dvc_data, scaling
    from tasks.system.machine import visible_gpus

    network = scaling.Interconnect(scaling.read("--bandwidth", bandwidth), scaling.read("--latency", latency))
    given_step = step_seconds and scaling.read("--step-seconds", step_seconds)
    given_parameters = parameters and int(scaling.read("--parameters", parameters))
    given_checkpoint = checkpoint and scaling.read("--checkpoint", checkpoint)
    restart_seconds = scaling.read("--restart", restart)
    mtbf_seconds = (mtbf and scaling.read("--mtbf", mtbf)) or None
    settings = dvc_data.settle(recipes, overrides)
    asked = communication or getattr(settings.strategy, "communication", "auto")
    if asked not in ("ring", "nccl", "auto"):
        raise UserError(one_of("--communication", asked, ("ring", "nccl")))
    examples = _examples_a_device(settings, workers * devices)
    measured, prepared = None, None
    if not (given_step and given_parameters and (given_checkpoint or not mtbf_seconds)):
        from tasks.process import client

        prepared = dvc_data.load_prepared(settings.dataset.name)
        measured = client.measure_pace(settings, prepared, examples)
        client.stop_processes()
    steps = (measured.step_seconds if measured is not None else ()) if not given_step else (given_step,)
    found = scaling.plan(
        workers=workers,
        devices=devices,
        network=network,
        communication=("nccl" if visible_gpus() else "ring") if asked == "auto" else asked,
        parameters=given_parameters or (measured.parameters if measured is not None else 0),
        examples_a_device=examples,
        compute_seconds=steps,
        mtbf_seconds=mtbf_seconds,
        restart_seconds=restart_seconds,
        interval_steps=_interval_steps(settings, prepared, examples * workers * devices),
        interval_seconds=settings.checkpoint.every_seconds,
        checkpoint_seconds=given_checkpoint or (measured.checkpoint_seconds if measured is not None else None),
    )
    yield found

    def shown(name: str, write: Callable[[float], str]) -> str:
        """Return a predicted value and its bounds."""
        low, high = map(write, found.ranges[name])
        return f"{write(getattr(found, name))} ({low} to {high})"

    lines = {
        "workers": f"{found.workers} of {found.devices} devices, {found.bandwidth / 1e9:g} Gbit/s, "
        f"{units.duration(found.latency_seconds)}",
        "sums": SUMMED[found.communication],
        "model": f"{found.parameters:,} parameters, {units.size(found.gradient_bytes)} of gradients",
        "batch": f"{found.global_batch_size:,} examples per step",
        "step": shown("step_seconds", units.duration),
        **{
            f"  {name}": f"{units.duration(seconds)}, {seconds / found.step_seconds:.0%}"
            for name, seconds in found.parts_seconds.items()
        },
        "bottleneck": found.bottleneck,
        "examples/s": shown("examples_per_second", "{:,.0f}".format),
        "efficiency": shown("efficiency", "{:.0%}".format),
    }
    share, every = "{:.1%}".format, f"every {units.duration(found.interval_seconds or 0.0)}"
    if found.checkpoint_seconds is not None:
        often = "the time between two is unknown: set checkpoint.every_steps"
        if found.checkpoint_share is not None:
            often = f"{every}, which takes {shown('checkpoint_share', share)} of the time"
        lines["checkpoints"] = f"{units.duration(found.checkpoint_seconds)} each; {often}"
    if found.best_interval_seconds is not None:
        lines["failures"] = (
            f"{found.failures_a_day:,.3g} per day; a restart takes {units.duration(found.restart_seconds or 0)}"
        )
        lines["best"] = f"a checkpoint every {units.duration(found.best_interval_seconds)}: "
        lines["best"] += f"{shown('best_goodput', share)} of the time is useful"
        lines["settings"] = "unknown, because the time between checkpoints is unknown"
        if found.goodput is not None:
            lines["settings"] = f"{every}: {shown('goodput', share)}"
    if measured is not None:
        lines["measured"] = f"{len(measured.step_seconds)} calls on {measured.device}"
    print_rows(lines)


def _examples_a_device(settings: "Settings", devices: int) -> int:
    """Return the number of examples per device and step; refuse a global batch that is not divisible."""
    if settings.train.per_replica_batch_size is not None:
        return settings.train.per_replica_batch_size
    size = settings.train.global_batch_size or 0
    if size % devices:
        raise UserError(
            f"train.global_batch_size = {size} is not divisible by {devices} devices: set a multiple of {devices}, or "
            f"the batch of each device, --set train.per_replica_batch_size={max(1, size // devices)} "
            "--set train.global_batch_size=null"
        )
    return size // devices


def _interval_steps(settings: "Settings", prepared: "PreparedDataset | None", batch: int) -> int | None:
    """Return the number of steps between two checkpoints by the settings; None if it is unknown without the data."""
    given = [settings.checkpoint.every_steps]
    in_epoch = settings.train.steps_per_epoch
    if in_epoch is None and prepared is not None:
        in_epoch = math.ceil(prepared.splits["train"].num_examples / batch)
    if in_epoch is not None and settings.checkpoint.every_epochs is not None:
        given.append(settings.checkpoint.every_epochs * in_epoch)
    return min((one for one in given if one is not None), default=None)
