"""`stratagem submit` and `stratagem jobs`: runs that are handed to a cluster which someone else keeps.

The parameters of a command are its options, however many it has.
"""

import sys
from typing import Annotated

import typer

from flows.cli.command import NO_SETTINGS, Debug, Json, Recipe, Set, command

app = typer.Typer(
    help="List the jobs that were submitted from here, and how they are; show the log of one, or cancel it.",
    invoke_without_command=True,
)

JobId = Annotated[str, typer.Argument(metavar="JOB", help="What the cluster calls it, or `latest`.")]


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
    """Hand `stratagem run` to a cluster, where it is told to stop in time, is queued again, and goes on."""
    with command(debug):
        from json import dumps

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
        submission.find(launcher)  # A launcher that nobody knows is refused before settings are read.
        of_cluster = config.load(recipe, overrides).strategy.cluster is not None
        sets = [*overrides, f"strategy.launcher={launcher}"] if of_cluster else overrides
        settings = config.load(recipe, sets)
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
        from json import dumps

        from flows.cli import run_tables
        from tasks.operations import submission

        found = [submission.state(job) for job in submission.jobs()]
        if json:
            print(dumps([one.model_dump(mode="json") for one in found]))
        elif found:
            run_tables.print_jobs(found)
        else:
            print("No job was submitted from here. `stratagem submit` hands a run to a cluster.")


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
        submission.cancel(found)
        print(f"job {found.id} is told to end; `stratagem jobs` says how it is")
