"""`stratagem runs`: lists, shows, compares, reproduces and prunes the runs in mlruns/; and `stratagem trace`."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.text import Text
from rich.tree import Tree

from flows.cli import completion
from flows.cli.command import Result, option, run_argument
from flows.cli.tables import (
    SHORT,
    format_moment,
    format_value,
    print_differences,
    print_metrics,
    print_rows,
    print_table,
    print_text,
    shorten_digest,
)
from tasks.system import units
from tasks.system.errors import printable

if TYPE_CHECKING:
    from tasks.records import Link, RunDetails, RunDifference, RunLine

SHOWN = 20
MAX_LEFT = 10
MAX_LINKS = 30
DIGESTS = ("code", "settings")
# `trace` prints these facts without their names.
PLAIN = ("status", "dataset", "model", "strategy", "aliases", "subject", "state")
NAMED = "Its id or the first characters of it, or `latest`."
DATASET = option("--dataset", "Only runs on this dataset.", "NAME", complete=completion.datasets)


def list_(
    dataset: str | None = DATASET,
    strategy: str | None = option(
        "--strategy", "Only runs under this strategy.", "KIND", complete=completion.strategies
    ),
    since: str | None = option("--since", "Only runs that began since this day, or in the last 7 days.", "DATE|7d"),
    status: str | None = option("--status", "Only runs that are running, finished, failed or killed.", "S"),
    sort: str | None = option(
        "--sort", "Sort by a metric such as test/accuracy, by examples_per_second or by bytes.", "METRIC"
    ),
    limit: int | None = option("--limit", "Number of runs to list; 20 by default, all with --json.", "N", min=1),
) -> Result:
    """List the runs, the newest first."""
    from tasks.runs import listing

    when = listing.moment(since, "--since") if since is not None else None
    choice = listing.RunFilter(dataset, strategy, when, status and status.lower())
    metric = f"test/{sort}" if sort and "/" not in sort and sort not in listing.FIGURES else sort
    found = listing.list_runs(choice, sort, metric is not None and listing.lower_is_better(metric), limit)
    yield found
    shown = found.runs[: limit or SHOWN]
    if not shown:
        print("No run matches these options." if found.num_runs else "There are no runs yet.")
    else:
        _print_lines(shown, metric)
        print()
    if (more := found.num_matching - len(shown)) > 0:
        print(f"and {more:,} more: --limit {found.num_matching} shows all")
    if found.num_runs:
        kept = f"checkpoints {units.size(found.checkpoint_bytes)}, models {units.size(found.model_bytes)}"
        print(f"{units.count(found.num_runs, 'run')}, {units.size(found.bytes)}: {kept}")
    for folder, problem in list(found.unreadable.items())[:MAX_LEFT]:
        print_text(f"{folder}: {problem}")


def _print_lines(lines: "Iterable[RunLine]", sort: str | None) -> None:
    from tasks.runs.listing import FIGURES

    metric = sort if sort not in FIGURES else None
    measured = {metric or line.headline for line in lines} - {None}
    same = measured.pop() if len(measured) == 1 else None
    figures = (same.removeprefix("test/") if same else "metric", "size" if sort == "bytes" else "ex/s")
    rows = []
    for line in lines:
        name = metric or line.headline
        value = line.metrics.get(name) if name else None
        cell = units.metric(value)
        if name and value is not None and not same:
            cell = f"{name.removeprefix('test/')} {cell}"
        rows.append(
            (
                line.run_id[:SHORT],
                format_moment(line.began),
                line.dataset,
                _model(line),
                f"{line.strategy} {line.loop}",
                "pruned" if line.pruned else line.status,
                cell,
                units.size(line.bytes) if sort == "bytes" else _speed(line.examples_per_second),
            )
        )
    headings = ("run", "began", "dataset", "model", "strategy", "status", *figures)
    print_table(headings, rows, right=figures, whole=("run", "began", "status", figures[1]), gap=1)


def _model(line: "RunLine") -> str:
    """Return a run's model with its version; the default name appears only as a number."""
    if line.model_version is None:
        return line.model
    name, _, number = line.model_version.rpartition("/")
    return f"{line.model} v{number}" if name == f"{line.dataset}-{line.model}" else f"{line.model} {line.model_version}"


def _speed(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value < 100_000 else f"{value / 1000:,.0f}k"


def show(
    name: str = run_argument(NAMED),
) -> Result:
    """Show one run: settings, origin, results, files."""
    from tasks.runs import entries, listing

    found = listing.show(entries.resolve(name))
    yield found
    print_details(found)


def print_details(found: "RunDetails") -> None:
    """Print the facts about one run."""
    from tasks.reports.tables import run_rows
    from tasks.runs.entries import kind_of_parent

    line, record = found.run, found.record
    rows = {
        "status": line.status + (f": {found.reason}" if found.reason else ""),
        "began": line.began,
        "ended": line.ended,
        **run_rows(record, found.training, found.evaluated, found.registered),
        "examples/s": _speed(line.examples_per_second),
        **{name: units.metric(value) for name, value in line.metrics.items()},
        "seconds": ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in found.seconds.items()),
        "flow run": record.flow_run_id,
        kind_of_parent(line.parent_run_id or ""): line.parent_run_id,
        "reproduces": found.reproduction and f"{found.reproduction.run_id}: {found.reproduction.reason}",
    }
    print_rows({name: value for name, value in rows.items() if value})
    if found.settings:
        print("\nsettings that differ from params.yaml now")
        print_differences(("the run", "params.yaml"), found.settings)
    print(f"\n{record.folder}: {units.size(line.bytes)}" + (", pruned" if line.pruned else ""))
    print_rows({f"  {path}": units.size(length) for path, length in found.files.items()})


def logs(name: str = run_argument(NAMED)) -> None:
    """Print a run's epochs, the logs of its cluster's processes, and how it ended."""
    from tasks import config
    from tasks.runs import entries, listing, outcome

    found = entries.resolve(name)
    folder = config.project_root() / found.folder
    metrics = folder / "metrics.jsonl"
    for line in metrics.read_bytes().splitlines() if metrics.exists() else ():
        if epoch := listing.describe(line):
            print(epoch)
    for log in sorted(folder.glob("logs/*/*.log")):
        text = printable(log.read_text(encoding="utf-8", errors="replace"), keep="\n\t")
        print(f"\n{log.relative_to(folder)}\n{text}")
    ended = outcome.status(found)
    print(listing.in_words(found, ended) + (f": {ended.reason}" if ended.reason else ""))


def diff(
    first: str = run_argument(f"A run. {NAMED}", "A"),
    second: str = run_argument("Another run.", "B"),
) -> Result:
    """Compare two runs: settings, data, code, speed, metrics.

    The test metrics come with their intervals.
    """
    from tasks.records import RunDifference
    from tasks.reports import intervals
    from tasks.runs import entries, listing

    runs = entries.resolve(first), entries.resolve(second)
    metrics, same = intervals.compare(*runs)
    found = RunDifference(
        first=runs[0].run_id,
        second=runs[1].run_id,
        differences=listing.compare(*runs),
        metrics=metrics,
        same_test_rows=same,
    )
    yield found
    print_difference(found)


def print_difference(found: "RunDifference") -> None:
    """Print the differences between two runs."""
    if not found.differences:
        print(f"{found.first[:SHORT]} and {found.second[:SHORT]} do not differ")
        return
    names = (found.first[:SHORT], found.second[:SHORT])
    others = {what: values for what, values in found.differences.items() if what not in found.metrics}
    print_differences(names, others)
    if found.metrics:
        rows = "the same test rows, compared example by example"
        unlike = "the test rows differ, or their outputs are gone: each interval is of one run"
        for run_id, side in ((found.first, "first"), (found.second, "second")):
            if all(getattr(one, side) is None for one in found.metrics.values()):
                unlike = f"{run_id[:SHORT]} was not evaluated (stratagem evaluate {run_id[:SHORT]})"
        print_text(f"\ntest metrics, with 95% intervals; {rows if found.same_test_rows else unlike}")
        print_metrics(found.metrics, names)


def prune(
    keep_last: int | None = option("--keep-last", "All but the N newest runs.", "N", min=0),
    older_than: str | None = option("--older-than", "Runs that ended before a date, or over 30 days ago.", "DATE|30d"),
    not_registered: bool = option("--not-registered", "Runs without a registered model version."),
    dataset: str | None = DATASET,
    unfinished: bool = option(
        "--unfinished", "Also runs that failed or were killed; they cannot be resumed afterwards."
    ),
    dry_run: bool = option("--dry-run -n", "Only list what would be removed."),
) -> Result:
    """Remove old checkpoints and models to free disk space.

    Removes those of finished runs that match all given options. Records, metrics and figures stay. Never prunes active
    runs and runs with a registered version.
    """
    from tasks.process import stages
    from tasks.runs import listing, pruning

    before = listing.moment(older_than, "--older-than") if older_than is not None else None
    selection = pruning.Selection(keep_last, before, not_registered, dataset, unfinished)
    selection.check()
    done = pruning.prune(selection, stages.list_versions, dry_run)
    yield done
    if done.pruned:
        rows = [
            (one.run_id[:SHORT], format_moment(one.began), one.dataset, units.size(one.bytes)) for one in done.pruned
        ]
        print_table(("run", "began", "dataset", "size"), rows, right=("size",))
    for run_id, why in list(done.left.items())[:MAX_LEFT]:
        print_text(f"kept: {run_id[:SHORT]}, {why}")
    if (more := len(done.left) - MAX_LEFT) > 0:
        print(f"kept: {more:,} more (--json shows all)")
    if done.unfinished:
        were = "run that failed or was killed" if done.unfinished == 1 else "runs that failed or were killed"
        print_text(f"kept: {done.unfinished:,} {were}, which can still be resumed (--unfinished prunes them too)")
    what = f"the checkpoints and models of {units.count(len(done.pruned), 'run')}: {units.size(done.bytes)}"
    if not done.pruned:
        print("There is nothing to remove.")
    else:
        print(f"would remove {what} (--dry-run)" if done.dry_run else f"removed {what}")
    print(f"{units.size(done.bytes_left)} {'would be' if done.dry_run and done.pruned else 'are'} left in mlruns/runs")


def report(
    run_id: str = run_argument("A run, or `latest` for the newest one.", default="latest"),
    open_page: bool = option("--open", "Open it in the browser of this machine."),
) -> Result:
    """Write the report of a run again, and print its path.

    report/report.html in the run's folder shows the settings and data, the metrics with their intervals, the model's
    errors, and where the time went. The report of an unfinished run is partial.
    """
    import webbrowser

    from tasks.operations import pipeline, preconditions

    preconditions.check_writable()
    path = pipeline.write_report(run_id)
    yield {"report": path}
    print(path)
    if open_page and not webbrowser.open(path.as_uri()):
        print("cannot open a browser", file=sys.stderr)


def trace(
    reference: str = run_argument(
        "A model version (NAME@ALIAS, NAME/3); a run, flow run, data version or commit, by its id or the first "
        "characters of it; a dataset; or the path of a checkpoint, prepared data, a report or an export.",
        "X",
    ),
) -> Result:
    """Show the lineage of a model, run, dataset or file.

    The chain leads from the source of the data to the versions of the model.
    """
    from tasks.operations import trace

    found = trace.trace(reference)
    yield found
    link = found.link
    root = Tree(_label(link, whole=True), guide_style="none", highlight=False)
    for title, links in (("derived from", link.up), ("derived from it", link.down)):
        if links:
            _grow(root.add(title), links)
    print_text(root)
    if found.registry is not None:
        print_text(f"Versions and aliases come from the records of the runs: {found.registry}")


def _grow(branch: Tree, links: "Iterable[Link]") -> None:
    for number, link in enumerate(links):
        if number == MAX_LINKS:
            branch.add(Text("and more: --json shows all"))
            return
        _grow(branch.add(_label(link)), (*link.up, *link.down))


def _label(link: "Link", whole: bool = False) -> Text:
    """Return the text of a link in the tree, with shortened digests unless ``whole``."""
    name = link.name if whole else shorten_digest(link.name) if link.kind in DIGESTS else link.name
    facts = (text if what in PLAIN else f"{what} {shorten_digest(text)}" for what, text in link.facts.items())
    said = printable(", ".join(facts))
    return Text.assemble((printable(f"{link.kind} {name}"), "bold"), f"\n{said}" if said else "", overflow="fold")


def reproduce(
    name: str = run_argument(f"The run. {NAMED}", default="latest"),
    dry_run: bool = option("--dry-run -n", "Only show what has changed since the run."),
    allow_changes: bool = option("--allow-changes", "Run even if packages or the machine differ."),
) -> Result:
    """Train a run again and compare the results.

    Trains in a separate folder with the run's code, settings and data. A run counts as reproduced if the weights are
    equal, or each metric is within its interval. Exit code 0: reproduced; 1: not.
    """
    from tasks.operations import reproduce

    done = reproduce.reproduce(name, allow_changes, dry_run)
    yield done
    if done.changes:
        changes = [(one.what, format_value(one.then), format_value(one.now), one.effect) for one in done.changes]
        print_table(("", "the run", "today", ""), changes)
    else:
        print("Nothing has changed since this run.")
    if done.metrics:
        print()
        print_metrics(done.metrics, (done.run_id[:SHORT], (done.reproduced_by or "")[:SHORT]))
    verdict = {None: "", True: "reproduced: ", False: "not reproduced: "}[done.same]
    by = f" (run {done.reproduced_by[:SHORT]})" if done.reproduced_by else ""
    print_text(f"\n{verdict}{done.reason}{by}")
    if done.same is False:
        raise SystemExit(1)
