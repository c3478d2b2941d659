"""`stratagem doctor`: finds problems of this machine and this project. A check is a function and a row of `CHECKS`; it
yields what it finds, changes nothing and imports no framework. An error inside a check becomes a finding, too.
"""

import json
import os
import re
import shlex
import shutil
import sqlite3
import stat
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil
import yaml
from configobj import ConfigObj, ConfigObjError
from packaging.requirements import Requirement

from tasks import config, records
from tasks.operations import preconditions
from tasks.process import stages
from tasks.records import Finding, Health, Level
from tasks.runs import dvc as dvc_settings
from tasks.runs import listing, outcome, repository
from tasks.runs.entries import PLACES, find_runs, is_uncopied, read_runs
from tasks.runs.locks import SCRATCH, crashed_holders, half_written, is_abandoned
from tasks.system import files, machine, temporary, units
from tasks.system.errors import StratagemError, UserError, listed, one_line, one_of
from tasks.system.machine import can_write
from tasks.system.network import NEEDS_SCHEME, NO_SCHEME, unreachable_reason, without_secrets, without_userinfo

GIB = 2**30
# A run on the digits takes 1.9 GiB with its server, of which 0.9 GiB is TensorFlow.
LEAST_MEMORY, USUAL_MEMORY = 1 * GIB, 3 * GIB
LEAST_DISK, USUAL_DISK = GIB // 4, 2 * GIB
ANSWER_SECONDS = 2.0
PIN = re.compile(r"^[A-Za-z0-9].*?(?= \\$|$)", re.MULTILINE)
SQLITE = "sqlite:///"
RECONCILE = "stratagem reconcile"
COMMIT = "git add --all && git commit -m 'The project'"


class Remark(NamedTuple):
    """A result of a check."""

    level: Level
    text: str
    fix: str | None = None


ok = partial(Remark, "ok")
"""Nothing is wrong."""
warning = partial(Remark, "warning")
"""A command may fail, or run more slowly."""
error = partial(Remark, "error")
"""A command fails, or something is lost."""


def prefect_home(root: Path) -> Path:
    """Return the folder of Prefect's database and profiles: in mlruns/ if the home folder is not writable, as in
    `flows.operate.prefect_server.set_environment`."""
    given, usual = os.environ.get("PREFECT_HOME"), os.path.expanduser("~/.prefect")
    if not given and not can_write(usual):
        return root / "mlruns" / "prefect"
    return Path(os.path.expanduser(given or usual))


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _existing(place: Path) -> Path:
    """Return a path, or the nearest of its parents that exists."""
    return next(folder for folder in (place, *place.absolute().parents) if os.path.exists(folder))


def access(root: Path) -> Iterator[Remark]:
    """Check that a run can write to its files and folders, without writing anything."""
    folders, database = [root, *(root / name for name in ("data", "mlruns", ".dvc"))], root / "mlruns" / "mlflow.db"
    wrong = []
    for place in (*folders, prefect_home(root), *([database] if os.path.exists(database) else [])):
        there = _existing(place)
        if os.path.islink(place) and there != place:
            text = f"{place} is a link to {os.readlink(place)}, which does not exist"
            wrong.append(error(text, f"rm {_quoted(place)}"))
        elif not there.is_dir() and there != database:
            fix = f"mv {_quoted(there)} {_quoted(there)}.aside"
            wrong.append(error(f"{there} is a file but must be a folder", fix))
        elif not os.access(there, os.R_OK | os.W_OK | (os.X_OK if there.is_dir() else 0)):
            own = there.stat().st_uid == os.getuid()
            fix = f"chmod u+rwX {_quoted(there)}" if own else f"sudo chown -R $(id -un) {_quoted(there)}"
            if os.statvfs(there).f_flag & os.ST_RDONLY:
                fix = "copy the project to another file system: this one is read-only"
            wrong.append(error(f"{there} cannot be written", fix))
    yield from wrong or [ok("the project, its data/, mlruns/ and .dvc/, and Prefect's folder can be written")]


def devices(root: Path) -> Iterator[Remark]:
    """Report the cores, the GPUs and the strategies that they allow; check the strategy in params.yaml."""
    cores = machine.usable_cores()
    yield ok(f"{units.count(cores, 'processor core')}, {units.count(len(machine.visible_gpus()), 'GPU')}")
    try:
        own = config.load(root=root).strategy.kind
    except UserError:
        return  # `settings` reports it.
    allowed: list[str] = []
    refused: list[Remark] = []
    for kind, section in config.strategy_kinds().items():
        values = {} if kind == own else {"strategy.kind": kind, "train.loop": section.loops[0]}
        try:
            preconditions.check_devices(config.load(overrides=values, root=root))
            allowed.append(kind)
        except UserError as why:
            if kind == own:
                refused.append(error(f"params.yaml: {why}", "stratagem run --set strategy.kind=one_device"))
            else:
                refused.append(ok(f"not available: {kind} ({str(why).partition('. ')[0]})"))
    yield ok(f"available strategies: {', '.join(allowed) or 'none'}")
    yield from refused


def devices_of_tensorflow(root: Path) -> Iterator[Remark]:
    """Compare TensorFlow's devices with the driver's."""
    gpus = machine.visible_gpus()
    try:
        seen = stages.devices()
    except StratagemError as reason:
        yield error(f"TensorFlow cannot be imported: {reason}", "make setup")
        return
    if (count := sum("GPU" in name for name in seen)) < len(gpus):
        there = units.count(len(gpus), "GPU")
        text = f"the driver reports {there}, but TensorFlow sees {count}: it trains on the CPU"
        yield error(text, "pip install 'tensorflow[and-cuda]', or install the driver of its CUDA version: nvidia-smi")
    else:
        yield ok(f"TensorFlow sees {', '.join(seen) or 'no device'}")


def disk(root: Path) -> Iterator[Remark]:
    """Check the free space on each file system that a run writes to."""
    places = {"the project": root, "temporary files": Path(tempfile.gettempdir()), "Prefect": prefect_home(root)}
    places |= {f"{name}/": root / name for name in ("mlruns", "data")}  # They may be links to other file systems.
    seen = set()
    for what, place in places.items():
        there = _existing(place)
        if (device := there.stat().st_dev) in seen:
            continue
        seen.add(device)
        free = shutil.disk_usage(there).free
        text = f"{units.size(free)} free for {what} ({there})"
        if free >= USUAL_DISK:
            yield ok(text)
        else:
            level = error if free < LEAST_DISK else warning
            yield level(text, "stratagem runs prune --keep-last 10; df -h")


def dvc(root: Path) -> Iterator[Remark]:
    """Check DVC's configuration, its lock file and the datasets."""
    folder = root / ".dvc"
    if not folder.is_dir():
        yield error(f"{root} is not a DVC repository: it has no .dvc/", "dvc init, or git checkout .dvc")
        return
    yield from _dvc_remotes(folder)
    locks = folder / "tmp" / "rwlock"
    try:
        json.loads(locks.read_text(encoding="utf-8") or "{}" if locks.exists() else "{}")
    except ValueError:  # DVC was killed while it wrote the file.
        yield error(f"{locks} is damaged, so DVC refuses every command", f"rm {_quoted(locks)}")
    for path in dvc_settings.damaged_databases(root):
        yield error(f"{path} is damaged, so DVC refuses every command", f"rm {_quoted(path)}")
    yield from _datasets(root)


def _dvc_remotes(folder: Path) -> Iterator[Remark]:
    remotes: dict[str, str] = {}
    for path in (one for name in ("config", "config.local") if (one := folder / name).exists()):
        try:
            known = ConfigObj(str(path), encoding="utf-8")
        except (ConfigObjError, OSError, UnicodeDecodeError) as reason:
            fix = "git checkout .dvc/config" if path.name == "config" else f"rm {_quoted(path)}"
            yield error(f"{path} cannot be read ({str(reason).splitlines()[0]})", fix)
            return
        for section, values in known.items():
            if section.startswith(("'remote ", "remote ")) and "url" in values:  # A password has its own section.
                remotes[section.split('"')[1]] = without_userinfo(str(values["url"]))
    for name, url in remotes.items():
        if url.startswith("/") and not Path(url).is_dir():
            yield warning(f"remote {name}: the folder {url} does not exist", f"dvc remote modify {name} url FOLDER")
        else:
            yield ok(f"remote {name}: {url}")
    if not remotes:
        yield ok("no remote: `stratagem data push` and `pull` need one")


def _datasets(root: Path) -> Iterator[Remark]:
    names = sorted(path.parent.name for path in (root / "data").glob("*/params.yaml"))
    needed = (f"data/{name}/{file}" for name in names or ["NAME"] for file in ("dvc.yaml", "dvc.lock"))
    if ignored := [file for file in needed if repository.is_ignored(root / file, root)]:
        text = f"git ignores {listed(ignored, 3)}, and DVC refuses files that git ignores"
        yield error(text, f"git check-ignore -v {ignored[0]} shows the line of .gitignore: remove it")
    for name in names:
        folder = root / "data" / name
        try:
            config.read_description(folder)
            for path in (one for file in ("dvc.yaml", "dvc.lock") if (one := folder / file).exists()):
                if not isinstance(yaml.safe_load(files.read_text(path)), dict):
                    raise UserError(f"{path} defines no stages")
        except (UserError, yaml.YAMLError, OSError, UnicodeDecodeError) as reason:
            fix = f"git checkout data/{name}, or stratagem data remove {name} and data add"
            yield error(f"data/{name}: {' '.join(str(reason).split())}", fix)
        raw, prepared = folder / "raw", folder / "prepared" / "manifest.json"
        if damaged := files.damaged_json([*raw.glob("manifest.json"), *raw.rglob("dataset_info.json")]):
            yield error(f"{damaged} is damaged", f"rm {_quoted(damaged)}; the next run makes it again")
        if prepared.exists() and records.load_or_none(records.PreparedDataset, prepared) is None:
            fix = f"stratagem data prepare --set dataset.name={name} --force"
            yield error(f"{prepared} is damaged, or another version of Stratagem wrote it", fix)
    count = sum((root / "data" / name / "prepared" / "manifest.json").exists() for name in names)
    yield ok(f"{units.count(len(names), 'dataset')} in data/, {count} prepared")


def git(root: Path) -> Iterator[Remark]:
    """Check that the project is in a git repository with a commit, which each run records."""
    commit, dirty = repository.state(root)
    if commit is not None:
        yield ok(f"commit {commit[:12]}{', with uncommitted changes' if dirty else ''}")
    elif dirty is not None:
        yield warning("the repository has no commit yet", COMMIT)
    else:
        yield warning("the project is not under version control: its runs record no commit", f"git init && {COMMIT}")


def leftovers(root: Path) -> Iterator[Remark]:
    """Check what killed commands left: runs that seem active, messages that were not sent, half-written files."""
    at_work, found = 0, defaultdict[str, list[str]](list)
    for run in find_runs(*PLACES):
        is_running = outcome.is_running(run)
        is_busy = is_running and not is_abandoned(run)
        at_work += is_busy
        states = {
            "runs whose process died": is_running and not is_busy,
            "runs that are only partly copied to the MLflow server": is_uncopied(run),
            "half-written files of runs": not is_busy and half_written(root / run.folder),
        }
        for what in (what for what, is_so in states.items() if is_so):
            found[what].append(run.run_id[:8])
    for path in (path for one in SCRATCH for path in root.glob(one) if files.is_left(path, root)):
        found["half-prepared or cached data"].append(str(path.relative_to(root)))
    for path in temporary.half_written():
        found["half-written outputs of commands that were killed"].append(str(path))
    for _, holder in crashed_holders():
        found["commands that were killed"].append(holder.what)
    for _, end in outcome.unreported():
        found["flow runs whose end is not recorded in Prefect"].append(str(end.flow_run_id))
    for what, names in found.items():
        fix = RECONCILE + ", or stratagem runs sync" * ("MLflow" in what)
        yield warning(f"{what}: {listed(sorted(names), 3)}", fix)
    _, unreadable = read_runs("runs")
    for folder, why in unreadable.items():
        yield warning(why, f"restore its records from a backup, or rm -r {folder}")
    if not found and not unreadable:
        yield ok(f"none; {at_work} run{'s are' if at_work != 1 else ' is'} active")


def memory(root: Path) -> Iterator[Remark]:
    """Check how much memory is free."""
    free, all_of_it = machine.free_memory(), psutil.virtual_memory()
    where = f"of {units.size(all_of_it.total)}" if free >= all_of_it.available else "within this container's limit"
    text = f"{units.size(free)} free {where}"
    fix = "end other programs (ps aux --sort -rss | head), or give the container more memory"
    if free < LEAST_MEMORY:
        yield error(f"{text}: a run does not fit", fix)
    else:
        yield warning(f"{text}: a run may not fit", fix) if free < USUAL_MEMORY else ok(text)


def mlflow(root: Path) -> Iterator[Remark]:
    """Check that the server in MLFLOW_TRACKING_URI answers, and that the database of the runs is intact."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if uri.startswith(("http://", "https://")):
        fix = "start it, or unset MLFLOW_TRACKING_URI; runs keep their records until it answers"
        yield _server("MLFLOW_TRACKING_URI", uri, "MLflow", fix)
    elif NO_SCHEME.match(uri):
        yield error(NEEDS_SCHEME, "export MLFLOW_TRACKING_URI=http://$MLFLOW_TRACKING_URI")
    elif uri and not uri.startswith(SQLITE):
        yield ok(f"MLFLOW_TRACKING_URI = {uri}: this kind of store is not checked")
    own = Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else root / "mlruns" / "mlflow.db"
    yield from _database(own, "mlflow")


def prefect(root: Path) -> Iterator[Remark]:
    """Check that the server in PREFECT_API_URL answers, or that the database is intact."""
    if url := os.environ.get("PREFECT_API_URL"):
        of_up = prefect_home(root) == root / "mlruns" / "up" / "prefect"  # By mlruns/up/environment.
        others = " PREFECT_API_AUTH_STRING PREFECT_HOME PROJECT_ROOT" if of_up else ""
        start = "stratagem up" if others else "prefect server start"
        fix = f"{start}, or unset PREFECT_API_URL{others}: a run then starts its own"
        yield _server("PREFECT_API_URL", url, "Prefect", fix)
    elif any(os.environ.get(f"PREFECT_{part}DATABASE_CONNECTION_URL") for part in ("API_", "SERVER_")):
        yield ok("the database in PREFECT_SERVER_DATABASE_CONNECTION_URL is not checked")
    else:
        yield from _database(prefect_home(root) / "prefect.db", "prefect")


def _server(variable: str, url: str, package: str, fix: str) -> Remark:
    if (reason := unreachable_reason(f"{url.rstrip('/')}/health", ANSWER_SECONDS)) is None:
        return ok(f"{variable} = {url} answers")
    return error(f"{variable} = {url}: no {package} server answers ({reason})", fix)


def _database(path: Path, package: str) -> Iterator[Remark]:
    """Check that an SQLite database is intact and private, without writing to it.

    Args:
        path: the file.
        package: the package that uses it, such as ``mlflow``.
    """
    if not path.exists():
        yield ok(f"{path} does not exist yet: the first run creates it")
        return
    fix = f"mv {_quoted(path)} {_quoted(path)}.aside; the next run creates a new one"
    whole = units.size(path.stat().st_size)
    if (mode := stat.S_IMODE(path.stat().st_mode)) & stat.S_IROTH:
        yield warning(f"{path} can be read by every user of this machine ({mode:o})", f"chmod o-rwx {_quoted(path)}")
    try:
        # Not `immutable`: it ignores the journal that a killed process left, and would report damage.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1)) as connection:
            ((judgement,),) = connection.execute("PRAGMA quick_check(1)")
    except sqlite3.Error as reason:
        if "locked" in str(reason):
            yield ok(f"another process is writing to {path} ({whole}): not checked")
        else:
            yield error(f"{path} is not a database of {package} ({reason})", fix)
        return
    yield ok(f"{path}: {whole}, intact") if judgement == "ok" else error(f"{path} is damaged: {judgement}", fix)


def models(root: Path) -> Iterator[Remark]:
    """Check that each registered model has a champion, and that no champion has a perfect test metric."""
    by_name: dict[str, list[records.ModelVersion]] = {}
    summaries = [one for run in find_runs("runs") if (one := outcome.load_readable(run, records.RunSummary))]
    for version in stages.list_versions() if summaries else ():
        by_name.setdefault(version.name, []).append(version)
    champions = {str(one.model_version).rpartition("/")[0]: one for one in summaries if config.CHAMPION in one.aliases}
    for name in champions.keys() - by_name.keys():
        text = f"{name} has no version any more, and so no @{config.CHAMPION}: it was deleted in MLflow"
        yield warning(text, f"stratagem models register {champions[name].run_id}")
    for name, versions in by_name.items():
        champion = next((one for one in versions if config.CHAMPION in one.aliases), None)
        if champion is None:
            text = (
                f"{name} has no @{config.CHAMPION} ({len(versions)} versions): none passed the gate, or it was deleted"
            )
            yield warning(text, f"stratagem models rollback {name}, or stratagem models register RUN --force")
            continue
        figures = {key: text for key, text in champion.tags.items() if key.startswith("test/")}
        if perfect := [key for key, text in figures.items() if text == "1.0000" and not listing.lower_is_better(key)]:
            text = f"{name}/{champion.version} @{config.CHAMPION} has {perfect[0]} 1: do its inputs contain the target?"
            yield warning(text, f"stratagem report {champion.run_id}")
    yield ok(units.count(len(by_name), "registered model"))


def packages(root: Path) -> Iterator[Remark]:
    """Compare the installed packages with the project's requirements.lock, or else with the installed stratagem's.

    The latter lists all extras, so this check then ignores packages that are not installed.
    """
    own = (root / "requirements.lock").is_file()
    lock = (root if own else config.code_root()) / "requirements.lock"
    if not lock.is_file():
        yield ok("no requirements.lock to compare with")
        return
    pins = [Requirement(line) for line in PIN.findall(lock.read_text(encoding="utf-8"))]
    known, missing, others = 0, [], []
    for one in (one for one in pins if one.marker is None or one.marker.evaluate()):
        # An interrupted pip leaves a folder without a version.
        installed = next((found.version for found in metadata.distributions(name=one.name) if found.version), None)
        if installed is None:
            missing += [f"{one.name}{one.specifier}"] if own else []
            continue
        known += 1
        if not one.specifier.contains(installed, prereleases=True):
            others.append(f"{one.name} {installed} (locked: {str(one.specifier).removeprefix('==')})")
    if missing:
        yield error(f"not installed: {listed(missing, 5)}", "make setup")
    if others:
        fix = "make setup" if own else f"pip install --no-deps --require-hashes -r {_quoted(lock)}"
        yield warning(f"versions that differ from requirements.lock: {listed(others, 5)}", fix)
    if not missing and not others:
        yield ok(f"all {known} pins of requirements.lock{'' if own else ' that are installed'} match")


def settings(root: Path) -> Iterator[Remark]:
    """Check params.yaml and the recipes, and name the first wrong key of each."""
    known, wrong = config.recipes(root), 0
    for recipe in (None, *known):
        try:
            config.load(recipe, root=root)
        except UserError as reason:
            wrong += 1
            place = "params.yaml" if recipe is None else known[recipe].relative_to(root)
            yield error(f"{place}: {str(reason).removeprefix(f'{root}/{place}: ')}", f"edit {place}")
            if recipe is None:  # All recipes build on it, and would report the same.
                return
    if not wrong:
        yield ok(f"params.yaml and {len(known)} recipes")


CHECKS: dict[str, Callable[[Path], Iterator[Remark]]] = {
    one.__name__: one
    for one in (
        access, devices, disk, dvc, git, leftovers, memory, mlflow, models, packages, prefect, settings,
    )
}  # fmt: skip


def examine(names: Collection[str] = (), with_devices: bool = False) -> Health:
    """Run the checks, and return their findings.

    Args:
        names: the checks to run; all if empty.
        with_devices: also list TensorFlow's devices, which needs an import of several seconds.

    Raises:
        UserError: the current folder is in no project, or a name is not that of a check.
    """
    for name in names:
        if name not in CHECKS:
            raise UserError(one_of("check", name, CHECKS))
    root = config.project_root()
    found = [one for name in CHECKS if not names or name in names for one in _examine(name, CHECKS[name], root)]
    if with_devices and (not names or "devices" in names):
        found += _examine("devices", devices_of_tensorflow, root)
    return Health(findings=tuple(found))


def _examine(name: str, check: Callable[[Path], Iterator[Remark]], root: Path) -> Iterator[Finding]:
    try:
        for level, text, fix in check(root):
            yield Finding(check=name, level=level, text=without_secrets(text), fix=fix and without_secrets(fix))
    except Exception as error:
        text = without_secrets(f"cannot be checked ({one_line(error)})")
        yield Finding(check=name, level="error", text=text, fix=f"check {getattr(error, 'filename', None) or root}")
