"""`stratagem runs`: the runs in mlruns/, listed, shown, compared, and pruned where the disk is full.

The parameters of a command are its options, however many it has.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import completion
from flows.cli.command import Debug, Json, command, run_argument
from flows.cli.tables import (
    SHORT,
    format_bytes,
    format_moment,
    format_value,
    print_metrics,
    print_rows,
    print_table,
    print_text,
)

if TYPE_CHECKING:
    from tasks.records import Pruning, RunDetails, RunDifference, RunLine, RunList

app = typer.Typer(
    help="List the runs, the newest first; show one, compare two, or remove what old ones take on the disk.",
    invoke_without_command=True,
)

SHOWN = 20

MAX_LEFT = 10


NAMED = "Its id, the first letters of it, or `latest`."
Dataset = Annotated[
    str | None,
    typer.Option("--dataset", metavar="NAME", help="Only runs on this dataset.", autocompletion=completion.datasets),
]


@app.callback()
def list_runs(
    context: typer.Context,
    dataset: Dataset = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="KIND",
            help="Only runs under this strategy.",
            autocompletion=completion.strategies,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="DATE|7d", help="Only runs that began on this day or since; or so long ago."),
    ] = None,
    status: Annotated[
        str | None,
        typer.Option("--status", metavar="S", help="Only running, finished, failed, killed or crashed ones."),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            "--sort", metavar="METRIC", help="By test/accuracy or another metric, examples_per_second or bytes."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="So many at most; 20 where it is a table.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the runs, the newest first."""
    if context.invoked_subcommand is not None:
        return
    with command(debug):
        from tasks import runs
        from tasks.operations import pipeline

        when = runs.moment(since, "--since") if since is not None else None
        choice = runs.RunFilter(dataset, strategy, when, status and status.lower())
        metric = f"test/{sort}" if sort and "/" not in sort and sort not in runs.FIGURES else sort
        limit = limit if limit is not None or json else SHOWN
        found = runs.list_runs(choice, metric, metric is not None and pipeline.lower_is_better(metric), limit)
        if json:
            print(found.model_dump_json())
            return
        print_runs(found, metric)


def print_runs(found: "RunList", sort: str | None) -> None:
    """Print a line for each run.

    Args:
        found: the runs.
        sort: what they are sorted by, which is shown then: a metric in place of the headline of each one's task, or
            the bytes in place of the speed.
    """
    if not found.runs:
        print("No run in mlruns/ is so." if found.num_runs else "There is no run yet.")
    else:
        _print_lines(found.runs, sort)
        print()
    if (more := found.num_matching - len(found.runs)) > 0:
        print(f"and {more:,} more: --limit {found.num_matching} shows all")
    if found.num_runs:
        kept = f"checkpoints {format_bytes(found.checkpoint_bytes)}, models {format_bytes(found.model_bytes)}"
        take = "run takes" if found.num_runs == 1 else "runs take"
        print(f"{found.num_runs:,} {take} {format_bytes(found.bytes)}: {kept}")
    for folder, problem in list(found.unreadable.items())[:MAX_LEFT]:
        print_text(f"{folder}: {problem}")


def _print_lines(lines: "Iterable[RunLine]", sort: str | None) -> None:
    from tasks.runs import FIGURES

    metric = sort if sort not in FIGURES else None
    measured = {metric or line.headline for line in lines} - {None}
    same = measured.pop() if len(measured) == 1 else None
    figures = (same.removeprefix("test/") if same else "metric", "size" if sort == "bytes" else "ex/s")
    rows = []
    for line in lines:
        name = metric or line.headline
        value = line.metrics.get(name) if name else None
        cell = "-" if value is None else f"{value:.4f}" if same else f"{(name or '').removeprefix('test/')} {value:.4f}"
        rows.append(
            (
                line.run_id[:SHORT],
                format_moment(line.began),
                line.dataset,
                _model(line),
                f"{line.strategy} {line.loop}",
                "pruned" if line.pruned else line.status or "-",
                cell,
                format_bytes(line.bytes) if sort == "bytes" else _speed(line.examples_per_second),
            )
        )
    headings = ("run", "began", "dataset", "model", "strategy", "status", *figures)
    print_table(headings, rows, right=figures, whole=("run", "began", "status", figures[1]), gap=1)


def _model(line: "RunLine") -> str:
    """Return a run's model with the number of its version; with its whole name where that is not the usual one."""
    if line.model_version is None:
        return line.model
    name, _, number = line.model_version.rpartition("/")
    return f"{line.model} v{number}" if name == f"{line.dataset}-{line.model}" else f"{line.model} {line.model_version}"


def _speed(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value < 100_000 else f"{value / 1000:,.0f}k"


@app.command()
def show(
    name: Annotated[str, run_argument(NAMED)],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show one run: its settings, where it comes from, what came of it, and what lies in its folder."""
    with command(debug):
        from tasks import runs

        found = runs.show(runs.resolve(name))
        print(found.model_dump_json()) if json else print_details(found)


def print_details(found: "RunDetails") -> None:
    """Print one run, a name and a value a line."""
    from tasks.runs import kind_of_parent

    line, lineage = found.run, found.lineage
    dirty = " with changes that are in no commit" if lineage.git_dirty else ""
    version = " ".join([line.model_version, *(f"@{alias}" for alias in found.aliases)]) if line.model_version else None
    rows = {
        "run": f"{line.run_id} ({line.name})",
        "status": (line.status or "begun") + (f": {found.reason}" if found.reason else ""),
        "began": line.began,
        "ended": line.ended,
        "dataset": f"{line.dataset}, data version {lineage.data_version or 'not under DVC'}",
        "model": line.model,
        "strategy": f"{line.strategy}, loop {line.loop}"
        + (f", {found.num_replicas} replica{'s' * (found.num_replicas > 1)}" if found.num_replicas else ""),
        "devices": ", ".join(found.devices),
        "host": found.host,
        "git commit": f"{lineage.git_commit or 'none'}{dirty}",
        "code": lineage.code_digest + (f" (stratagem {lineage.package_version})" if lineage.package_version else ""),
        "settings": lineage.settings_digest,
        "trained": f"{found.epochs} epochs, {found.steps:,} steps" if found.steps is not None else None,
        "resumed with": "; ".join(f"{one.what} {one.values}" for one in found.changed),
        "examples/s": _speed(line.examples_per_second),
        **{name: f"{value:.4f}" for name, value in line.metrics.items()},
        "evaluated": found.checkpoint,
        "weights": found.weights_digest,
        "model version": version or (f"none: {found.why_no_version}" if found.why_no_version else None),
        "champion": found.judgement,
        "note": "; ".join(found.notes),
        "seconds": ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in found.seconds.items()),
        "flow run": found.flow_run_id,
        kind_of_parent(line.parent_run_id or ""): line.parent_run_id,
        "reproduces": found.reproduces,
        "MLflow": f"experiment {found.experiment}",
    }
    print_rows({name: value for name, value in rows.items() if value})
    if found.settings:
        print("\nsettings that params.yaml has otherwise now")
        _print_values(("the run", "params.yaml"), found.settings)
    print(f"\n{found.folder}: {format_bytes(line.bytes)}" + (", pruned" if line.pruned else ""))
    kept = (*found.checkpoints, *found.models)
    print_rows({f"  {one.path.removeprefix(found.folder + '/')}": format_bytes(one.bytes) for one in kept})


@app.command()
def diff(
    first: Annotated[str, run_argument(f"A run. {NAMED}", "A")],
    second: Annotated[str, run_argument("Another one.", "B")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell what differs between two runs: settings, data, code, speed; and the test metrics with their intervals."""
    with command(debug):
        from tasks import runs
        from tasks.reports import side_by_side

        found = side_by_side.differences(runs.resolve(first), runs.resolve(second))
        print(found.model_dump_json()) if json else print_difference(found)


def print_difference(found: "RunDifference") -> None:
    """Print what differs between two runs, a line each."""
    if not found.differences:
        print(f"{found.first[:SHORT]} and {found.second[:SHORT]} do not differ")
        return
    names = (found.first[:SHORT], found.second[:SHORT])
    others = {what: values for what, values in found.differences.items() if what not in found.metrics}
    _print_values(names, others)
    if found.metrics:
        rows = "the same test rows, compared example by example"
        unlike = "not the same test rows, or what they gave for them is gone: each interval by itself"
        sides = {
            found.first: [one.first for one in found.metrics.values()],
            found.second: [one.second for one in found.metrics.values()],
        }
        for run_id, values in sides.items():
            if all(value is None for value in values):
                unlike = f"{run_id[:SHORT]} was not evaluated (stratagem evaluate --run {run_id[:SHORT]})"
        print_text(f"\ntest metrics, with intervals of 95 %; {rows if found.same_test_rows else unlike}")
        print_metrics(found.metrics, names)


def _print_values(names: tuple[str, str], rows: Mapping[str, tuple[object, object]]) -> None:
    shown = [(what, *(format_value(value) for value in values)) for what, values in rows.items()]
    print_table(("", *names), shown)


@app.command()
def prune(
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=0, metavar="N", help="All but the N newest runs.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="30d|DATE", help="Those that ended longer ago.")
    ] = None,
    not_registered: Annotated[
        bool, typer.Option("--not-registered", help="Those of which no model version was made.")
    ] = False,
    dataset: Dataset = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also runs that failed or were killed, which cannot be resumed then.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be removed.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove the checkpoints and models of finished runs that no registered version needs.

    Several options choose the runs that all of them choose. Records, metrics and pictures stay. A run of which a
    version in MLflow's registry was made, or that is at work, is never pruned.
    """
    with command(debug):
        from tasks import runs
        from tasks.operations import pipeline

        before = runs.moment(older_than, "--older-than") if older_than is not None else None
        selection = runs.Selection(keep_last, before, not_registered, dataset, unfinished)
        selection.check()
        done = runs.prune(selection, pipeline.registered_versions, dry_run)
        print(done.model_dump_json()) if json else print_pruning(done)


def print_pruning(done: "Pruning") -> None:
    """Print what was removed, or would be, and what was left alone."""
    if done.pruned:
        rows = [(one.run_id[:SHORT], format_moment(one.began), one.dataset, f"{one.bytes:,}") for one in done.pruned]
        print_table(("run", "began", "dataset", "bytes"), rows, right=("bytes",))
    for run_id, why in list(done.left.items())[:MAX_LEFT]:
        print_text(f"left alone: {run_id[:SHORT]}, {why}")
    if (more := len(done.left) - MAX_LEFT) > 0:
        print(f"left alone: {more:,} more (--json names all)")
    if done.unfinished:
        were = "run that failed or was killed" if done.unfinished == 1 else "runs that failed or were killed"
        print_text(f"left alone: {done.unfinished:,} {were} and can be resumed (--unfinished removes theirs, too)")
    what = (
        f"the checkpoints and models of {len(done.pruned):,} run{'s' * (len(done.pruned) != 1)}: {done.bytes:,} bytes"
    )
    if not done.pruned:
        print("There is nothing to remove.")
    else:
        print(f"would remove {what} (--dry-run)" if done.dry_run else f"removed {what}")
    print(
        f"{format_bytes(done.bytes_left)} {'would be' if done.dry_run and done.pruned else 'are'} left in mlruns/runs"
    )
