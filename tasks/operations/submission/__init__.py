"""Jobs: a run that is handed to a cluster which someone else keeps, and what became of it.

One file an engine: what it has, `Engine` says. A job has a folder in mlruns/jobs/ with what was handed over, its log,
and the record of it, `job.json`.
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
# Files in a job's folder: the run's settings as a recipe, and what the nodes look for, see `launchers.slurm.TOKEN`.
SETTINGS_FILE, TOKEN_FILE = "settings.yaml", "token"


@dataclass(frozen=True)
class Request:
    """What is asked of an engine."""

    name: str
    """Of the job, for the engine's lists."""
    settings: config.Settings
    """Of the run."""
    options: Mapping[str, str]
    """By name, such as `nodes` and `time`: what the engine's ``OPTIONS`` says."""
    folder: Path
    """The job's own, where its script, its log, `SETTINGS_FILE` and `TOKEN_FILE` lie."""

    @property
    def num_processes(self) -> int:
        """All members of the cluster, or 1."""
        return self.settings.strategy.num_processes

    @property
    def recipe(self) -> str:
        """The settings as the text of a recipe: later changes of params.yaml do not reach the job."""
        return yaml.safe_dump(self.settings.model_dump(mode="json", by_alias=True), sort_keys=False)


class Engine(Protocol):
    """What a file of this package has to have."""

    OPTIONS: Mapping[str, str]
    """The options that it knows, and what each means."""
    FILE: str
    """What the file is called that it is handed."""

    def write(self, request: Request) -> str:
        """Return the text of the file to hand over.

        Raises:
            UserError: an option cannot be.
        """

    def submit(self, file: Path) -> tuple[str, tuple[str, ...]]:
        """Hand a file over; nothing of it is left with the engine where it fails.

        Return the job's id there, and the words that lead the engine's commands to it, such as ``--namespace team``.

        Raises:
            UserError: the engine is not installed here, or refuses the job.
            StratagemError: it does not answer.
        """

    def state(self, job: records.Job) -> tuple[str, str]:
        """Return how a job is, in the engine's word, and more of it; ("", "") for one that it has forgotten.

        Raises:
            StratagemError: the engine does not answer.
        """

    def cancel(self, job: records.Job) -> None:
        """End a job; its processes save the step that they are at.

        Raises:
            StratagemError: the engine does not answer, or refuses.
        """

    def logs(self, job: records.Job) -> str | None:
        """Return what the job's processes have printed so far; None as long as they have not begun.

        Raises:
            StratagemError: the engine does not answer.
        """


def number(options: dict[str, str], name: str, default: int) -> int:
    """Take an option that is a number out of the others.

    Raises:
        UserError: it is no number from 1 on.
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
    """Write a job's file, hand it over, and return its text and the record; None for the record where it is only shown.

    Args:
        engine: its name.
        settings: of the run.
        options: for the engine, by name.
        only_write: return the text, leave nothing behind and hand nothing over.

    Raises:
        UserError: an option cannot be, or the engine is not there or refuses the job.
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
        if job is not None:  # Nobody would know of it.
            with contextlib.suppress(StratagemError):
                found.cancel(job)
        shutil.rmtree(folder)
        raise
    return text, job


def jobs() -> list[records.Job]:
    """Return the jobs that were handed over from this project, the newest first; of one whose record is damaged, say
    so."""
    found = []
    for file in (config.project_root() / FOLDER).glob("*/job.json"):
        try:
            found.append(records.load(records.Job, file))
        except StratagemError:
            print(f"{file} is damaged, so nothing is known of this job", file=sys.stderr)
    return sorted(found, key=lambda job: job.submitted_at, reverse=True)


def find_job(job_id: str) -> records.Job:
    """Return a job by what its engine calls it, or `latest`.

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
    """Return how a job is; `unknown`, and why, where its engine does not answer."""
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
        UserError: nothing yet.
        StratagemError: its engine does not answer.
    """
    printed = find_engine(job.engine).logs(job)
    if printed is None:
        raise UserError(f"job {job.id} has printed nothing yet: it is {state(job).state}")
    return printed
