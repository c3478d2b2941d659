"""`stratagem plan`: what a training would do on many machines.

The parameters of a command are its options, however many it has.
"""

import math
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.command import NO_SETTINGS, Debug, Json, Recipe, Set, command

if TYPE_CHECKING:
    from tasks.config import Settings
    from tasks.records import PreparedDataset


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
        from tasks import config
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
        settings = config.load(recipe, overrides)
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
        if json:
            print(found.model_dump_json())
        else:
            from flows.cli import scaling_tables

            scaling_tables.print_scaling(found, measured)


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
