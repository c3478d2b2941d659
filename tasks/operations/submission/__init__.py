"""Jobs: hands a run to a cluster that someone else operates, and follows it there.

Each file in this folder is an engine: a module with the names of `Engine`. What it hands over is a template beside it.
A job has a folder in mlruns/jobs/ with the file that was handed over, its log and its record, `job.json`.
"""

import contextlib
import importlib
import secrets
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import yaml

from tasks import config, records
from tasks.system import clock
from tasks.system.errors import StratagemError, UserError, one_of

FOLDER = Path("mlruns/jobs")
# Files in a job's folder: the run's settings as a recipe, and what the nodes look for, see `engines.slurm.TOKEN`.
SETTINGS_FILE, TOKEN_FILE = "settings.yaml", "token"


@dataclass(frozen=True)
class Request:
    """A run to be handed over."""

    name: str
    """The job's name in the engine's lists."""
    settings: config.Settings
    options: Mapping[str, str]
    """Values of the engine's ``OPTIONS`` by name, such as `nodes` and `time`."""
    folder: Path
    """The job's own folder, with its script, its log, `SETTINGS_FILE` and `TOKEN_FILE`."""

    @property
    def num_processes(self) -> int:
        """The number of processes of the cluster, or 1."""
        return self.settings.strategy.num_processes

    @property
    def recipe(self) -> str:
        """The settings as the text of a recipe, so that later changes of params.yaml do not reach the job."""
        return yaml.safe_dump(self.settings.model_dump(mode="json", by_alias=True), sort_keys=False)


class Engine(Protocol):
    """The names that a module of this package defines."""

    OPTIONS: Mapping[str, str]
    """The options that it knows, and what each means."""
    FILE: str
    """The name of the file to hand over."""

    def write(self, request: Request) -> str:
        """Return the text of the file to hand over.

        Raises:
            UserError: an option has a wrong value.
        """

    def submit(self, file: Path) -> tuple[str, tuple[str, ...]]:
        """Hand a file over; if that fails, leave nothing with the engine.

        Return the job's id there, and the words that lead the engine's commands to it, such as ``--namespace team``.

        Raises:
            UserError: the engine is not installed here, or refuses the job.
            StratagemError: the engine does not answer.
        """

    def state(self, job: records.Job) -> tuple[str, str]:
        """Return a job's state in the engine's word, and details; ("", "") for a job that the engine has forgotten.

        Raises:
            StratagemError: the engine does not answer.
        """

    def cancel(self, job: records.Job) -> None:
        """End a job; its processes save their step first.

        Raises:
            StratagemError: the engine does not answer, or refuses.
        """

    def logs(self, job: records.Job) -> str | None:
        """Return what the job's processes have printed so far; None if they have not begun.

        Raises:
            StratagemError: the engine does not answer.
        """


def number(options: dict[str, str], name: str, default: int) -> int:
    """Remove a numeric option from the options and return its value.

    Raises:
        UserError: it is not a whole number of at least 1.
    """
    text = options.pop(name, str(default))
    if not text.isdecimal() or not int(text):
        raise UserError(f"{name} = {text}: give a number from 1 on")
    return int(text)


def render(template: str, **values: object) -> str:
    """Return the text of a template in this folder; its filter ``quote`` writes a word for a shell."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tasks.operations.submission", "."),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template(template).render(values)


def find_engine(name: str) -> Engine:
    """Return an engine by its name.

    Raises:
        UserError: there is none of this name.
    """
    known = config.names_of("operations/submission")
    if name not in known:
        raise UserError(one_of("launcher", name, known))
    found: Any = importlib.import_module(f"tasks.operations.submission.{name}")
    engine: Engine = found
    return engine


def submit(
    engine: str, settings: config.Settings, options: Mapping[str, str], only_write: bool = False
) -> tuple[str, records.Job | None]:
    """Write a job's file, hand it over, and return its text and the job's record.

    Args:
        engine: the engine's name.
        settings: of the run.
        options: for the engine, by name.
        only_write: hand nothing over, leave nothing behind, and return None for the record.

    Raises:
        UserError: an option has a wrong value, or the engine is not installed or refuses the job.
        StratagemError: the engine does not answer.
    """
    found = find_engine(engine)
    for name in options:
        if name not in found.OPTIONS:
            raise UserError(one_of(f"option of --launcher {engine}", name, found.OPTIONS))
    folder = config.project_root().resolve() / FOLDER / secrets.token_hex(4)
    request = Request(f"{settings.dataset.name}-{settings.strategy.kind}", settings, options, folder)
    text = found.write(request)
    if only_write:
        return text, None
    folder.mkdir(parents=True, mode=0o700)
    job = None
    try:
        (folder / TOKEN_FILE).write_text(folder.name, encoding="ascii")
        (folder / SETTINGS_FILE).write_text(request.recipe, encoding="utf-8")
        (folder / found.FILE).write_text(text, encoding="utf-8")
        job_id, place = found.submit(folder / found.FILE)
        job = records.Job(
            engine=engine,
            id=job_id,
            place=place,
            name=request.name,
            folder=str(FOLDER / folder.name),
            num_processes=request.num_processes,
            submitted_at=clock.now(),
        )
        records.save(job, folder / "job.json")
    except BaseException:
        if job is not None:  # Without its record nobody would know of it.
            with contextlib.suppress(StratagemError):
                found.cancel(job)
        shutil.rmtree(folder)
        raise
    return text, job


def jobs() -> list[records.Job]:
    """Return the jobs that were handed over from this project, the newest first; name damaged records on stderr."""
    found = []
    for file in (config.project_root() / FOLDER).glob("*/job.json"):
        try:
            found.append(records.load(records.Job, file))
        except StratagemError:
            print(f"{file} is damaged, so nothing is known of this job", file=sys.stderr)
    return sorted(found, key=lambda job: job.submitted_at, reverse=True)


def find_job(job_id: str) -> records.Job:
    """Return a job by its id, or the newest one for `latest`.

    Raises:
        UserError: there is no such job.
    """
    known = jobs()
    for job in known:
        if job_id in (job.id, "latest"):
            return job
    see = None if known else "None was submitted from this project: `stratagem submit` does"
    raise UserError(one_of("job", job_id, [job.id for job in known], see))


def state(job: records.Job) -> records.JobState:
    """Return a job's state; `unknown`, with the reason, if its engine does not answer."""
    try:
        said, detail = find_engine(job.engine).state(job)
    except StratagemError as error:
        return records.JobState(job=job, state="unknown", detail=str(error))
    if not said:
        code = config.project_root() / job.folder / "exit_code"
        said = f"ended ({code.read_text(encoding='ascii').strip()})" if code.is_file() else "gone"
    return records.JobState(job=job, state=said, detail=detail)


def logs(job: records.Job) -> str:
    """Return what a job's processes have printed so far.

    Raises:
        UserError: they have printed nothing yet.
        StratagemError: its engine does not answer.
    """
    printed = find_engine(job.engine).logs(job)
    if printed is None:
        raise UserError(f"job {job.id} has printed nothing yet: it is {state(job).state}")
    return printed
