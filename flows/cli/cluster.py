"""The commands for clusters: `submit` and `jobs` for one that someone else operates, `plan` for one you may want.

The parameters of a command are its options, however many it has.
"""

import math
import sys
from collections.abc import Callable, Sequence
from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.command import NO_SETTINGS, Debug, Json, Recipe, Set, command
from flows.cli.tables import format_moment, format_seconds, print_table

if TYPE_CHECKING:
    from tasks.config import Settings
    from tasks.records import JobState, Pace, PreparedDataset, ScalingPlan

app = typer.Typer(
    help="List the jobs that were submitted from here, and how they are; show the log of one, or cancel it.",
    invoke_without_command=True,
)
JobId = Annotated[str, typer.Argument(metavar="JOB", help="What the cluster calls it, or `latest`.")]
SUMMED = {
    "ring": "a ring over gRPC, as fitted to 2 to 4 workers",
    "nccl": "a ring by the textbook; nothing of it was measured here",
}


def submit(
    recipe: Recipe = None,
    overrides: Set = NO_SETTINGS,
    launcher: Annotated[
        str, typer.Option("--launcher", metavar="NAME", help="Which kind of cluster: slurm or kubernetes.")
    ] = "slurm",
    nodes: Annotated[
        str | None, typer.Option("--nodes", metavar="N", help="Slurm: machines; as many as processes without it.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            "--time", metavar="T", help="Slurm: how long at a time, such as 01:00:00; then it is queued again."
        ),
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", metavar="NAME", help="Slurm: which queue.")] = None,
    option: Annotated[
        list[str],
        typer.Option("--option", metavar="NAME=VALUE", help="Another option of the launcher, such as gpus-per-task=1."),
    ] = NO_SETTINGS,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--explain", help="Print what would be handed over, and hand nothing over.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Hand `stratagem run` to a cluster, which stops it in time, queues it again and continues it."""
    with command(debug):
        from tasks import config
        from tasks.operations import dvc_data, preconditions, submission
        from tasks.system.errors import UserError

        given = {"nodes": nodes, "time": time, "partition": partition}
        options = {name: value for name, value in given.items() if value is not None}
        for text in option:
            name, equals, value = text.partition("=")
            if not (equals and value) or name in options:
                raise UserError(f"--option {text}: give NAME=VALUE, and each name once")
            options[name] = value
        submission.find_engine(launcher)  # A launcher that nobody knows is refused before settings are read.
        if config.load(recipe, overrides).strategy.cluster is not None:
            overrides = [*overrides, f"strategy.launcher={launcher}"]
        settings = dvc_data.settle(recipe, overrides)
        if not dry_run:
            preconditions.check_writable()
            dvc_data.check_source(settings.dataset)
        text, job = submission.submit(launcher, settings, options, only_write=dry_run)
        if json:
            print(dumps({"file": text}) if job is None else job.model_dump_json())
        elif job is None:
            print(text, end="")
        else:
            print(f"submitted job {job.id} ({job.name}); {job.folder}/ has what was handed over")
            print(
                f"`stratagem jobs` says how it is, `jobs logs {job.id}` prints its log, `jobs cancel {job.id}` ends it"
            )


@app.callback()
def list_jobs(context: typer.Context, json: Json = False, debug: Debug = False) -> None:
    """List the jobs that were submitted from here, the newest first, and how they are."""
    if context.invoked_subcommand is not None:
        return
    with command(debug):
        from tasks.operations import submission

        found = [submission.state(job) for job in submission.jobs()]
        if json:
            print(dumps([one.model_dump(mode="json") for one in found]))
        elif found:
            print_jobs(found)
        else:
            print("No job was submitted from here. `stratagem submit` hands a run to a cluster.")


def print_jobs(found: "Sequence[JobState]") -> None:
    """Print a line for each job that was submitted, with its folder below it."""
    headings = ("job", "launcher", "state", "where or why", "submitted", "run")
    jobs = [(one, one.job) for one in found]
    print_table(
        headings,
        [(job.id, job.engine, one.state, one.detail, format_moment(job.submitted_at), job.name) for one, job in jobs],
    )


@app.command()
def logs(job: JobId, debug: Debug = False) -> None:
    """Print what a job's processes have printed so far."""
    with command(debug):
        from tasks.operations import submission

        sys.stdout.write(submission.logs(submission.find_job(job)))


@app.command()
def cancel(job: JobId, debug: Debug = False) -> None:
    """End a job; its run keeps its latest checkpoint, and the same command goes on from it."""
    with command(debug):
        from tasks.operations import submission

        found = submission.find_job(job)
        submission.find_engine(found.engine).cancel(found)
        print(f"job {found.id} is told to end; `stratagem jobs` says how it is")


def plan(
    recipe: Recipe = None,
    overrides: Set = NO_SETTINGS,
    workers: Annotated[int, typer.Option("--workers", min=1, metavar="N", help="Machines.")] = 2,
    bandwidth: Annotated[
        str, typer.Option("--bandwidth", metavar="B", help="What each can send, such as 25Gbps.")
    ] = "10Gbps",
    latency: Annotated[
        str, typer.Option("--latency", metavar="T", help="Of a packet, one way, such as 50us.")
    ] = "50us",
    devices: Annotated[int, typer.Option("--devices", min=1, metavar="N", help="GPUs of each machine.")] = 1,
    step_seconds: Annotated[
        str | None,
        typer.Option(
            "--step-seconds",
            metavar="T",
            help="What one device computes in a step, such as 180ms; else it is measured.",
        ),
    ] = None,
    parameters: Annotated[
        str | None, typer.Option("--parameters", metavar="N", help="Of the model, such as 25.6M; else it is built.")
    ] = None,
    communication: Annotated[
        str | None,
        typer.Option(
            "--communication",
            metavar="HOW",
            help="ring (gRPC, as measured) or nccl (by the textbook); else by strategy.communication and this machine.",
        ),
    ] = None,
    mtbf: Annotated[
        str | None,
        typer.Option("--mtbf", metavar="T", help="Of one machine, between two failures, such as 30d; else none fails."),
    ] = None,
    restart: Annotated[
        str, typer.Option("--restart", metavar="T", help="From a failure to the next step, such as 2min.")
    ] = "2min",
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint", metavar="T", help="What a training waits for a checkpoint, such as 1s; else it is measured."
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict examples/s, efficiency and bottleneck of a training on many machines, and what failures cost.

    A step is computed, then gradients are summed around a ring; docs/scale.md has the formulas, and how far they were
    off. What is not given is measured on one device of this machine, with the data of the settings.
    """
    with command(debug):
        from tasks.operations import dvc_data, scaling
        from tasks.system.errors import UserError, one_of
        from tasks.system.machine import visible_gpus

        network = scaling.Interconnect(
            scaling.read_bandwidth(bandwidth), scaling.read_seconds("--latency", latency, "50us", zero=True)
        )
        given_step = step_seconds and scaling.read_seconds("--step-seconds", step_seconds, "180ms")
        given_parameters = parameters and scaling.read_count("--parameters", parameters)
        given_checkpoint = checkpoint and scaling.read_seconds("--checkpoint", checkpoint, "1s")
        restart_seconds = scaling.read_seconds("--restart", restart, "2min", zero=True)
        mtbf_seconds = mtbf and scaling.read_seconds("--mtbf", mtbf, "30d")
        settings = dvc_data.settle(recipe, overrides)
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
        failures = None
        cost = given_checkpoint or (measured.checkpoint_seconds if measured is not None else None)
        if mtbf_seconds:
            failures = scaling.Failures(mtbf_seconds, restart_seconds, cost or 0.0)
        steps = (measured.step_seconds if measured is not None else ()) if not given_step else (given_step,)
        found = scaling.plan(
            workers=workers,
            devices=devices,
            network=network,
            communication=("nccl" if visible_gpus() else "ring") if asked == "auto" else asked,
            parameters=given_parameters or (measured.parameters if measured is not None else 0),
            examples_a_device=examples,
            compute_seconds=steps,
            failures=failures,
            interval_steps=_interval_steps(settings, prepared, examples * workers * devices),
            interval_seconds=settings.checkpoint.every_seconds,
            checkpoint_seconds=cost,
        )
        print(found.model_dump_json()) if json else print_scaling(found, measured)


def _examples_a_device(settings: "Settings", devices: int) -> int:
    """Return what a device takes in a step.

    Raises:
        UserError: the global batch does not divide.
    """
    from tasks.system.errors import UserError

    if settings.train.per_replica_batch_size is not None:
        return settings.train.per_replica_batch_size
    size = settings.train.global_batch_size or 0
    if size % devices:
        raise UserError(
            f"train.global_batch_size = {size} does not divide by {devices} devices: give a multiple of {devices}, or "
            f"what each takes, --set train.per_replica_batch_size={max(1, size // devices)} "
            "--set train.global_batch_size=null"
        )
    return size // devices


def _interval_steps(settings: "Settings", prepared: "PreparedDataset | None", batch: int) -> int | None:
    """Return after how many steps the settings save, as far as that shows here."""
    given = [settings.checkpoint.every_steps]
    in_epoch = settings.train.steps_per_epoch
    if in_epoch is None and prepared is not None:
        in_epoch = math.ceil(prepared.splits["train"].num_examples / batch)
    if in_epoch is not None and settings.checkpoint.every_epochs is not None:
        given.append(settings.checkpoint.every_epochs * in_epoch)
    return min((one for one in given if one is not None), default=None)


def print_scaling(found: "ScalingPlan", measured: "Pace | None") -> None:
    """Print what a training would do on many machines.

    Args:
        found: the prediction.
        measured: what it is of, where something was measured.
    """
    lines = {
        "workers": f"{found.workers} of {found.devices} devices, {found.bandwidth / 1e9:g} Gbit/s, "
        f"{found.latency_seconds * 1e6:g} us",
        "sums": SUMMED[found.communication],
        "model": f"{found.parameters:,} parameters, {found.gradient_bytes / 1e6:,.2f} MB of gradients",
        "batch": f"{found.global_batch_size:,} examples a step",
        "a step": f"{format_seconds(found.step_seconds)} ({_range(found.step_seconds_range, format_seconds)})",
    }
    lines |= {
        f"  {name}": f"{format_seconds(seconds)}, {seconds / found.step_seconds:.0%}"
        for name, seconds in found.parts_seconds.items()
    }
    lines |= {
        "bottleneck": found.bottleneck,
        "examples/s": f"{found.examples_per_second:,.0f} ({_range(found.examples_per_second_range, '{:,.0f}'.format)})",
        "efficiency": f"{found.efficiency:.0%} ({_range(found.efficiency_range, '{:.0%}'.format)})",
    }
    share = "{:.1%}".format
    if found.checkpoint_seconds is not None:
        often = "the settings do not say how often, or not as far as shows here"
        if found.interval_seconds is not None and found.checkpoint_share_range is not None:
            often = (
                f"every {format_seconds(found.interval_seconds)}, which takes {found.checkpoint_share:.1%} of the time"
            )
            often += f" ({_range(found.checkpoint_share_range, share)})"
        lines["checkpoints"] = f"{format_seconds(found.checkpoint_seconds)} each; {often}"
    if found.best_interval_seconds is not None and found.best_goodput_range is not None:
        best = f"a checkpoint every {format_seconds(found.best_interval_seconds)}: "
        best += f"{found.best_goodput:.1%} of the time counts ({_range(found.best_goodput_range, share)})"
        own = "not known without how often they save"
        if found.interval_seconds is not None and found.goodput_range is not None:
            own = f"every {format_seconds(found.interval_seconds)}: "
            own += f"{found.goodput:.1%} ({_range(found.goodput_range, share)})"
        lines |= {
            "failures": f"{found.failures_a_day:,.3g} a day; a restart {format_seconds(found.restart_seconds or 0.0)}",
            "best": best,
            "settings": own,
        }
    if measured is not None:
        lines["measured"] = f"{len(measured.step_seconds)} calls on {measured.device}"
    width = max(map(len, lines))
    for name, text in lines.items():
        print(f"{name:{width}}  {text}")


def _range(pair: tuple[float, float], write: Callable[[float], str]) -> str:
    return f"{write(pair[0])} to {write(pair[1])}"
