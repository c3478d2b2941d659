"""Jobs: submits a run to a cluster that someone else operates, and follows it there.

Each file in this folder is an engine: a module with `OPTIONS`, `FILE`, `LAUNCHER` (the `strategy.launcher` of the job's
processes), `write`, `submit`, `state`, `cancel` and `logs`, such as `slurm`; an engine with `OWN` passes on all options
except these. It submits a template from this folder.
A job has a folder in mlruns/jobs/ with the submitted file, its log and its record, `job.json`.
"""

import importlib
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from tasks import config, records
from tasks.system.errors import StratagemError, UserError, one_of

FOLDER = Path("mlruns/jobs")
SETTINGS_FILE = "settings.yaml"
"""In a job's folder: the run's settings as a recipe."""


def name_of(settings: config.Settings) -> str:
    """Return a run's name in the engine's lists."""
    return f"{settings.dataset.name}-{settings.strategy.kind}"


def recipe_of(settings: config.Settings) -> str:
    """Return settings as a recipe, so that later changes of params.yaml do not affect the job."""
    return yaml.safe_dump(settings.to_json(), sort_keys=False)


def ask(launcher: str, command: Sequence[str], install: str, silent: Collection[str], see: str) -> str:
    """Return the output of an engine's command.

    Args:
        launcher: the engine's name.
        command: the words.
        install: what to do if the command is not installed.
        silent: words in the error of a command whose server does not answer.
        see: a command that shows more about that.

    Raises:
        UserError: it is not installed, or fails.
        StratagemError: its server does not answer.
    """
    name = f"launcher {launcher}: `{command[0]}`"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise UserError(f"{name} is not on the PATH. {install}") from None
    except subprocess.TimeoutExpired:
        raise StratagemError(f"{name} gave no answer within 120 s") from None
    said = " ".join(done.stderr.split())
    if done.returncode and any(one in said for one in silent):
        raise StratagemError(f"{name} cannot reach its server ({said}). `{see}` shows more")
    if done.returncode:
        raise UserError(f"{name} fails ({said})")
    return done.stdout


def number(options: dict[str, str], name: str, default: int) -> int:
    """Remove a numeric option from the options and return its value.

    Raises:
        UserError: it is not a whole number of at least 1.
    """
    text = options.pop(name, str(default))
    if not text.isdecimal() or not int(text):
        raise UserError(f"{name} = {text}: use a whole number of at least 1")
    return int(text)


def render(template: str, **values: object) -> str:
    """Return the text of a template in this folder; its filter ``quote`` quotes a word for a shell."""
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


def find_engine(name: str) -> Any:
    """Return an engine by its name.

    Raises:
        UserError: there is none of this name.
    """
    known = config.names_of("operations/submission")
    if name not in known:
        raise UserError(one_of("launcher", name, known))
    return importlib.import_module(f"tasks.operations.submission.{name}")


def submit(
    engine: str, settings: config.Settings, options: Mapping[str, str], only_write: bool = False
) -> tuple[str, records.Job | None]:
    """Write a job's file, hand it over, and return its text and the job's record.

    Args:
        engine: the engine's name.
        settings: of the run.
        options: for the engine, by name.
        only_write: only return the text, and None for the record.

    Raises:
        UserError: an option has a wrong value, or the engine is not installed or refuses the job.
        StratagemError: the engine does not answer.
    """
    found = find_engine(engine)
    for name, value in options.items():
        own = getattr(found, "OWN", None)  # Only engines with this pass on other options.
        if name not in found.OPTIONS and (own is None or not re.fullmatch("[a-z][a-z-]*", name)):
            raise UserError(one_of(f"option of --launcher {engine}", name, found.OPTIONS))
        if own is not None and name in own:
            raise UserError(f"--option {name}: `stratagem submit` sets {', '.join(f'--{one}' for one in own)} itself")
        if not value.isprintable():  # A new line in the script could be another directive.
            raise UserError(f"{name} = {value!r}: remove line breaks and other control characters")
    folder = config.project_root().resolve() / FOLDER / secrets.token_hex(4)
    text: str = found.write(settings, options, folder)
    if only_write:
        return text, None
    folder.mkdir(parents=True, mode=0o700)
    try:
        (folder / SETTINGS_FILE).write_text(recipe_of(settings), encoding="utf-8")
        (folder / found.FILE).write_text(text, encoding="utf-8")
        job_id, place = found.submit(folder / found.FILE)
        job = records.Job(
            engine=engine,
            id=job_id,
            place=place,
            name=name_of(settings),
            folder=str(FOLDER / folder.name),
            num_processes=settings.strategy.num_processes,
            submitted_at=records.now(),
        )
        records.save(job, folder / "job.json")
    except BaseException:
        shutil.rmtree(folder)
        raise
    return text, job


def jobs() -> list[records.Job]:
    """Return the jobs that were submitted from this project, the newest first."""
    found = [records.load(records.Job, file) for file in (config.project_root() / FOLDER).glob("*/job.json")]
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
    if not known:
        raise UserError("no job was submitted from this project yet: use `stratagem submit`")
    raise UserError(one_of("job", job_id, [job.id for job in known]))


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
    """Return the output of a job's processes so far.

    Raises:
        UserError: there is none yet.
        StratagemError: its engine does not answer.
    """
    printed: str | None = find_engine(job.engine).logs(job)
    if printed is None:
        raise UserError(f"job {job.id} has printed nothing yet: its state is {state(job).state}")
    return printed
