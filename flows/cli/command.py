"""What most commands take, and how each ends: with the exit code that the shell expects, and one message where
something went wrong."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from flows.cli import completion

if TYPE_CHECKING:
    from tasks.config import Settings
    from tasks.system.errors import StratagemError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON record to standard output, and nothing else there.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Prefect's log.")]
Recipe = Annotated[
    str | None,
    typer.Argument(
        help="A name in recipes/ or a path; without one, params.yaml alone.", autocompletion=completion.recipes
    ),
]
Set = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting, such as train.epochs=3.",
        autocompletion=completion.settings,
    ),
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="RUN|latest",
        help="Resume this run, from its latest checkpoint.",
        autocompletion=completion.runs,
    ),
]
AllowChanges = Annotated[
    bool, typer.Option("--allow-changes", help="With --resume: also with settings or data of another training.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start a new run, also where one of the same is unfinished.")]
Explain = Annotated[
    bool,
    typer.Option(
        "--dry-run", "--explain", help="Only tell what would run, what is there, and where each setting comes from."
    ),
]
NO_SETTINGS: list[str] = []


def run_argument(help: str, metavar: str = "RUN") -> Any:
    """Return the declaration of an argument that names a run; a shell completes it."""
    return typer.Argument(metavar=metavar, help=help, autocompletion=completion.runs)


def open_standard_streams() -> None:
    """Let descriptors 0 to 2 lead nowhere where the command was started without them.

    A database or a socket that is opened next would have their numbers, and what is printed would go into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # The lowest number that is free.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


@contextmanager
def command(debug: bool) -> Iterator[None]:
    """End a command as the shell expects: one message and the error's exit code, no traceback."""
    from tasks.process.environment import keep_private, show_tracebacks
    from tasks.system.errors import Interrupted, StratagemError, Terminated, to_json
    from tasks.system.network import without_secrets

    keep_private()
    if debug:
        show_tracebacks()
    # Of whoever started this command and tells its error itself: it is not that of a process which this one starts.
    place = os.environ.pop("STRATAGEM_ERROR", None)

    def end(error: StratagemError, word: str = "error") -> NoReturn:
        if place is not None:
            Path(place).write_text(dumps(to_json(error)), encoding="utf-8")
        else:
            print(f"{word}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    for number in (signal.SIGTERM, signal.SIGHUP):  # SIGHUP: the terminal was closed.
        if signal.getsignal(number) != signal.SIG_IGN:  # As under nohup.
            signal.signal(number, terminate)
    try:
        try:
            yield
            sys.stdout.flush()
        finally:
            _disarm_signals()
    except BrokenPipeError:  # The reader of the output wants no more of it, as `head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends.
        sys.exit(128 + signal.SIGPIPE)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # In the middle of a table, which rich ends with 1.
            sys.exit(128 + signal.SIGPIPE)
        raise
    except Interrupted as interrupted:
        end(interrupted, "interrupted")
    except StratagemError as error:
        if debug:
            print(without_secrets(traceback.format_exc()), file=sys.stderr)
        end(error)
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(getattr(interrupt, "exit_code", 130))
    except Exception as error:
        if debug:
            print(without_secrets(traceback.format_exc()), file=sys.stderr)
        end(_explained(error))


def _explained(error: Exception) -> "StratagemError":
    """Return the one message for an error that is none of ours."""
    from tasks.system import files, messages
    from tasks.system.errors import StratagemError

    if full := files.find_full_disk(error, "the project's folder, or Prefect's,"):
        return full
    if forbidden := files.find_no_access(error):
        return forbidden
    if (words := messages.translate(error)) is not None:
        return StratagemError(words)
    cause = (str(error).strip() or "no message").splitlines()[0]
    return StratagemError(f"{type(error).__name__}: {cause} (the whole story: --debug)")


def _disarm_signals() -> None:
    """Let Python end in peace: an exception of ours in Prefect's last messages leaves it waiting, for 20 s at worst.

    A first signal to a command that ends anyway does nothing, a second one ends it at once.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: signal.signal(number, signal.SIG_DFL))


def check_resume(
    settings: "Settings",
    recipe: str | None,
    resume: str | None,
    allow_changes: bool,
    fresh: bool,
    if_changed: bool = False,
) -> None:
    """Refuse options that contradict each other, and a run that is another training, before anything is looked up."""
    from tasks import config, runs
    from tasks.operations import pipeline, preconditions
    from tasks.system.errors import UserError

    if resume is not None and fresh:
        raise UserError(f"--resume {resume} resumes a run, and --fresh starts a new one: give one of them")
    if if_changed and (resume is not None or fresh):
        raise UserError("--if-changed may train nothing, and --resume and --fresh ask for a training: give one of them")
    if resume is None and allow_changes:
        raise UserError("--allow-changes is about a run that you name: give --resume RUN too")
    if if_changed and pipeline.in_foreign_cluster(settings):
        raise UserError(
            "--if-changed: the other members of a cluster would wait for a chief that has nothing to do. "
            "Leave it out, or give --set strategy.launcher=local"
        )
    preconditions.check_remote(settings, resume)
    # What follows from the data is compared when these are prepared.
    runs.refuse_resume(settings, resume, allow_changes or config.follows_data(recipe, settings))
