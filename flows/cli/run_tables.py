"""What `stratagem runs` and `stratagem trace` print for a person: tables that fit 80 columns."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from flows.cli.tables import print_rows
from tasks.records import (
    JobState,
    Link,
    MetricPair,
    Provenance,
    Pruning,
    Reproduction,
    RunDetails,
    RunDifference,
    RunLine,
    RunList,
    Sync,
)
from tasks.runs import FIGURES, kind_of_parent
from tasks.system.errors import cut, listed

SHORT = 8
"""Letters of an id; `runs show` takes as few as no other run begins with."""
MAX_LEFT = 10
MAX_LINKS = 30
DIGESTS = ("code", "settings")
# Facts that need no name of their own.
PLAIN = ("status", "dataset", "model", "strategy", "aliases", "subject", "state")
DIGEST = re.compile(r"[0-9a-f]{32,64}")


def print_runs(found: RunList, sort: str | None) -> None:
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
        kept = f"checkpoints {size(found.checkpoint_bytes)}, models {size(found.model_bytes)}"
        take = "run takes" if found.num_runs == 1 else "runs take"
        print(f"{found.num_runs:,} {take} {size(found.bytes)}: {kept}")
    for folder, problem in list(found.unreadable.items())[:MAX_LEFT]:
        _print(f"{folder}: {problem}")


def _print_lines(lines: Iterable[RunLine], sort: str | None) -> None:
    metric = sort if sort not in FIGURES else None
    measured = {metric or line.headline for line in lines} - {None}
    same = measured.pop() if len(measured) == 1 else None
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("run", "began", "dataset", "model", "strategy", "status"):
        table.add_column(heading, no_wrap=heading in ("run", "began", "status"), overflow="fold")
    table.add_column(same.removeprefix("test/") if same else "metric", justify="right", overflow="fold")
    table.add_column("size" if sort == "bytes" else "ex/s", justify="right", no_wrap=True)
    for line in lines:
        name = metric or line.headline
        value = line.metrics.get(name) if name else None
        cell = "-" if value is None else f"{value:.4f}" if same else f"{(name or '').removeprefix('test/')} {value:.4f}"
        table.add_row(
            line.run_id[:SHORT],
            _local(line.began),
            line.dataset,
            _model(line),
            f"{line.strategy} {line.loop}",
            "pruned" if line.pruned else line.status or "-",
            cell,
            size(line.bytes) if sort == "bytes" else _speed(line.examples_per_second),
        )
    _print(table)


def _model(line: RunLine) -> str:
    """Return a run's model with the number of its version; with its whole name where that is not the usual one."""
    if line.model_version is None:
        return line.model
    name, _, number = line.model_version.rpartition("/")
    return f"{line.model} v{number}" if name == f"{line.dataset}-{line.model}" else f"{line.model} {line.model_version}"


def _speed(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value < 100_000 else f"{value / 1000:,.0f}k"


def _local(moment: str) -> str:
    """Return a time as the clock here shows it, with the year where that is another one."""
    local, now = datetime.fromisoformat(moment).astimezone(), datetime.now().astimezone()
    return local.strftime("%m-%d %H:%M" if local.year == now.year else "%Y-%m-%d")


def print_jobs(found: Sequence[JobState]) -> None:
    """Print a line for each job that was submitted, with its folder below it."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("job", "launcher", "state", "where or why", "submitted", "run"):
        table.add_column(column, overflow="fold")
    for one in found:
        job = one.job
        table.add_row(job.id, job.engine, one.state, one.detail, _local(job.submitted_at), job.name)
    Console().print(table)


def print_details(found: RunDetails) -> None:
    """Print one run, a name and a value a line."""
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
        _print_columns(("", "the run", "params.yaml"), found.settings)
    print(f"\n{found.folder}: {size(line.bytes)}" + (", pruned" if line.pruned else ""))
    kept = (*found.checkpoints, *found.models)
    print_rows({f"  {one.path.removeprefix(found.folder + '/')}": size(one.bytes) for one in kept})


def print_difference(found: RunDifference) -> None:
    """Print what differs between two runs, a line each."""
    if not found.differences:
        print(f"{found.first[:SHORT]} and {found.second[:SHORT]} do not differ")
        return
    names = (found.first[:SHORT], found.second[:SHORT])
    others = {what: values for what, values in found.differences.items() if what not in found.metrics}
    _print_columns(("", *names), others)
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
        _print(f"\ntest metrics, with intervals of 95 %; {rows if found.same_test_rows else unlike}")
        _print_metrics(found.metrics, names)


def print_reproduction(done: Reproduction) -> None:
    """Print what of a run is otherwise today, and what came of training it once more."""
    if done.changes:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("", "the run", "today", ""):
            table.add_column(heading, overflow="fold")
        for one in done.changes:
            table.add_row(one.what, _text(one.then), _text(one.now), one.effect)
        _print(table)
    else:
        print("Nothing of it is otherwise today.")
    if done.metrics:
        print()
        _print_metrics(done.metrics, (done.run_id[:SHORT], (done.reproduced_by or "")[:SHORT]))
    verdict = {None: "", True: "reproduced: ", False: "not reproduced: "}[done.same]
    by = f" (run {done.reproduced_by[:SHORT]})" if done.reproduced_by else ""
    _print(f"\n{verdict}{done.reason}{by}")


def _print_metrics(metrics: Mapping[str, MetricPair], names: tuple[str, str]) -> None:
    """Print the metrics of two runs with their intervals, and how far apart they are."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", *names, "difference"):
        table.add_column(heading, overflow="fold")
    for name, one in metrics.items():
        ends = [_interval(found) for found in (one.first_interval, one.second_interval)]
        values = [
            "-" if value is None else f"{value:.4f}{end}"
            for value, end in zip((one.first, one.second), ends, strict=True)
        ]
        apart = "-" if one.difference is None else f"{one.difference:+.4f}{_interval(one.difference_interval, '+')}"
        table.add_row(name.removeprefix("test/"), *values, apart)
    _print(table)


def _interval(ends: tuple[float, float] | None, sign: str = "") -> str:
    return f"\n{ends[0]:{sign}.4f} to {ends[1]:{sign}.4f}" if ends is not None else ""


def print_pruning(done: Pruning) -> None:
    """Print what was removed, or would be, and what was left alone."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("run", "began", "dataset", "bytes"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left", overflow="fold")
    for one in done.pruned:
        table.add_row(one.run_id[:SHORT], _local(one.began), one.dataset, f"{one.bytes:,}")
    if done.pruned:
        _print(table)
    for run_id, why in list(done.left.items())[:MAX_LEFT]:
        _print(f"left alone: {run_id[:SHORT]}, {why}")
    if (more := len(done.left) - MAX_LEFT) > 0:
        print(f"left alone: {more:,} more (--json names all)")
    if done.unfinished:
        were = "run that failed or was killed" if done.unfinished == 1 else "runs that failed or were killed"
        _print(f"left alone: {done.unfinished:,} {were} and can be resumed (--unfinished removes theirs, too)")
    what = (
        f"the checkpoints and models of {len(done.pruned):,} run{'s' * (len(done.pruned) != 1)}: {done.bytes:,} bytes"
    )
    if not done.pruned:
        print("There is nothing to remove.")
    else:
        print(f"would remove {what} (--dry-run)" if done.dry_run else f"removed {what}")
    print(f"{size(done.bytes_left)} {'would be' if done.dry_run and done.pruned else 'are'} left in mlruns/runs")


def print_provenance(found: Provenance) -> None:
    """Print a chain as a tree: what a thing was made of, and what was made of it."""
    link = found.link
    root = Tree(_label(link, whole=True), guide_style="none", highlight=False)
    for title, links in (("made of", link.up), ("made of it", link.down)):
        if links:
            _grow(root.add(title), links)
    _print(root)
    if found.registry is not None:
        _print(f"Versions and aliases are as the runs' records have them: {found.registry}")


def _grow(branch: Tree, links: Iterable[Link]) -> None:
    """Add links to a branch, each with what it was made of, or what was made of it."""
    for number, link in enumerate(links):
        if number == MAX_LINKS:
            branch.add(Text("and more: --json has all"))
            return
        _grow(branch.add(_label(link)), (*link.up, *link.down))


def _label(link: Link, whole: bool = False) -> Text:
    """Return what a tree says of a thing; digests in it whole, or as many letters of them as tell them apart."""
    name = link.name if whole else _short(link.name) if link.kind in DIGESTS else link.name
    facts = (text if what in PLAIN else f"{what} {_short(text)}" for what, text in link.facts.items())
    said = ", ".join(facts)
    return Text.assemble((f"{link.kind} {name}", "bold"), f"\n{said}" if said else "", overflow="fold")


def _short(text: str) -> str:
    return text[:12] if DIGEST.fullmatch(text) else text


def size(num_bytes: int) -> str:
    """Return a number of bytes as a person reads it.

    >>> size(1_234_567)
    '1.2 MB'
    """
    value = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _print_columns(headings: tuple[str, str, str], rows: Mapping[str, tuple[object, object]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for what, values in rows.items():
        table.add_row(what, *(_text(value) for value in values))
    _print(table)


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return cut(_short(str(value)))


def _print(what: Table | Tree | str) -> None:
    Console(highlight=False, markup=False).print(what)


def print_sync(done: Sync) -> None:
    """Print how many runs were brought to a store, and what stays to be seen to; the runs were told as they came."""
    for note in done.notes:
        print(note)
    if not done.runs:
        print("There is no run to deliver.")
        return
    counts = Counter(one.outcome for one in done.runs)
    print(f"{done.to}: {', '.join(f'{counts[outcome]} {outcome}' for outcome in sorted(counts))}")
    versions = [version for one in done.runs for version in one.versions]
    if versions:
        print(f"versions: {listed(versions)}")
