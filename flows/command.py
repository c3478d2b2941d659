"""What most commands take, and how each ends: with the exit code that the shell expects, and one message where
something went wrong."""

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tasks.config import Settings

Json = Annotated[bool, typer.Option("--json", help="Print one JSON record to standard output, and nothing else there.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Prefect's log.")]
Recipe = Annotated[str | None, typer.Argument(help="A name in recipes/ or a path; without one, params.yaml alone.")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="One setting, such as train.epochs=3.")]
Resume = Annotated[
    str | None, typer.Option("--resume", metavar="RUN|latest", help="Resume this run, from its latest checkpoint.")
]
AllowChanges = Annotated[
    bool, typer.Option("--allow-changes", help="With --resume: also with settings or data of another training.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start a new run, also where one of the same is unfinished.")]
NO_SETTINGS: list[str] = []


@contextmanager
def command(debug: bool) -> Iterator[None]:
    """End a command as the shell expects: one message and the error's exit code, no traceback."""
    from tasks import files, messages
    from tasks.errors import Interrupted, StratagemError, Terminated
    from tasks.network import without_secrets
    from tasks.process.environment import keep_private, show_tracebacks

    keep_private()
    if debug:
        show_tracebacks()

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
    except Interrupted as interrupted:
        print(f"interrupted: {interrupted}", file=sys.stderr)
        sys.exit(interrupted.exit_code)
    except StratagemError as error:
        if debug:
            print(without_secrets(traceback.format_exc()), file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(getattr(interrupt, "exit_code", 130))
    except Exception as error:
        if debug:
            print(without_secrets(traceback.format_exc()), file=sys.stderr)
        if full := files.find_full_disk(error, "the project's folder, or Prefect's,"):
            print(f"error: {full}", file=sys.stderr)
            sys.exit(full.exit_code)
        if forbidden := files.find_no_access(error):
            print(f"error: {forbidden}", file=sys.stderr)
            sys.exit(forbidden.exit_code)
        if (words := messages.translate(error)) is not None:
            print(f"error: {without_secrets(words)}", file=sys.stderr)
            sys.exit(1)
        cause = (str(error).strip() or "no message").splitlines()[0]
        print(f"error: {type(error).__name__}: {without_secrets(cause)} (the whole story: --debug)", file=sys.stderr)
        sys.exit(1)


def _disarm_signals() -> None:
    """Let Python end in peace: an exception of ours in Prefect's last messages leaves it waiting, for 20 s at worst.

    A first signal to a command that ends anyway does nothing, a second one ends it at once.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: signal.signal(number, signal.SIG_DFL))


def check_resume(
    settings: "Settings", resume: str | None, allow_changes: bool, fresh: bool, if_changed: bool = False
) -> None:
    """Refuse options that contradict each other, and a run that is another training, before anything is looked up."""
    from tasks import runs
    from tasks.errors import UserError

    if resume is not None and fresh:
        raise UserError(f"--resume {resume} resumes a run, and --fresh starts a new one: give one of them")
    if if_changed and (resume is not None or fresh):
        raise UserError("--if-changed may train nothing, and --resume and --fresh ask for a training: give one of them")
    if resume is None and allow_changes:
        raise UserError("--allow-changes is about a run that you name: give --resume RUN too")
    runs.refuse_resume(settings, resume, allow_changes)
