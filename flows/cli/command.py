"""The options that commands share, and how each command ends: with a shell's exit code, and one message on an error."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from contextvars import ContextVar
from functools import wraps
from inspect import Parameter, isgeneratorfunction, signature
from io import StringIO
from json import dumps
from pathlib import Path
from typing import Any, NoReturn, TextIO

import typer

from flows.cli import completion
from tasks.system.errors import Interrupted, StratagemError, terminate, to_json


def option(names: str, help: str, metavar: str | None = None, complete: Any = None, **given: Any) -> Any:
    """Return the declaration of an option, with names such as ``--set -S``, for the default of a command's parameter.

    Without a metavar it is a switch. The default is None, or False for a switch.
    """
    default = given.pop("default", None if metavar else False)
    return typer.Option(default, *names.split(), metavar=metavar, help=help, autocompletion=complete, **given)


def argument(metavar: str, help: str, complete: Any = None, **given: Any) -> Any:
    """Return the declaration of an argument, as ``option`` does; without a default it is required."""
    return typer.Argument(given.pop("default", ...), metavar=metavar, help=help, autocompletion=complete, **given)


Result = Iterator[Any]
"""A command that returns this yields its result and then prints it for people; see ``command``."""
JSON = option("--json", "Print the result as one JSON record on standard output.")
QUIET = option("--quiet -q", "Print only the result, and errors.")
VERBOSE = option("--verbose -v", "Also print Prefect's log.")
DEBUG = option("--debug", "Also print Prefect's log and tracebacks.")
RECIPES = argument(
    "RECIPE",
    "Names in recipes/ or paths: each overrides those before it, and params.yaml.",
    complete=completion.recipes,
    default=[],
)
SETTINGS = option(
    "--set -S",
    "One setting, such as train.epochs=3; it overrides the recipes.",
    "KEY=VALUE",
    complete=completion.settings,
    default=[],
)
RESUME = option("--resume", "Resume this run from its latest checkpoint.", "RUN|latest", complete=completion.runs)
ALLOW_CHANGES = option("--allow-changes", "With --resume: allow settings and data that differ from the run's.")
FRESH = option("--fresh", "Start a new run even if the same one is unfinished.")
DRY_RUN = option("--dry-run -n", "Only print the plan: what would run and why, and where each setting comes from.")
_verbose: ContextVar[bool] = ContextVar("verbose", default=False)


def run_argument(help: str, metavar: str = "RUN", **given: Any) -> Any:
    """Return the declaration of an argument that names a run; a shell completes it."""
    return argument(metavar, help, complete=completion.runs, **given)


def command(function: Callable[..., Result | None]) -> Callable[..., None]:
    """Return a function as a command, with the options of all commands and a shell's exit codes.

    The function's parameters are the command's own arguments and options. If it yields its result, the command also has
    `--json`, which prints only this result, as JSON.
    """
    own = signature(function, eval_str=True)
    shared = {"quiet": QUIET, "verbose": VERBOSE, "debug": DEBUG}
    takes_json = "json" in own.parameters
    if isgeneratorfunction(function) and not takes_json:
        shared = {"json": JSON, **shared}

    @wraps(function)
    def run(*, quiet: bool, verbose: bool, debug: bool, json: bool = False, **given: Any) -> None:
        if takes_json:
            given["json"] = json
        from pydantic_core import to_json

        with ending(quiet, verbose, debug), ExitStack() as stack:
            for result in function(**given) or ():
                if json:
                    print(to_json(result, inf_nan_mode="strings").decode(), flush=True)
                    stack.enter_context(redirect_stdout(StringIO()))

    parameters = [
        *own.parameters.values(),
        *(Parameter(name, Parameter.KEYWORD_ONLY, default=one, annotation=bool) for name, one in shared.items()),
    ]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def as_parameter(recipes: list[str]) -> str | list[str] | None:
    """Return recipes as a flow's parameter: a single one as its name."""
    return recipes[0] if len(recipes) == 1 else recipes or None


def is_verbose() -> bool:
    """Return whether this command shows Prefect's log."""
    return _verbose.get()


@contextmanager
def ending(quiet: bool = False, verbose: bool = False, debug: bool = False) -> Iterator[None]:
    """End a command as the shell expects: one message and the error's exit code, no traceback.

    Args:
        quiet: print only the result and errors, also in child processes.
        verbose: see ``is_verbose``.
        debug: also show tracebacks.
    """
    from tasks.process.child import StandardError, set_up_process
    from tasks.system.network import without_secrets

    set_up_process()
    _verbose.set(verbose or debug)
    if debug:
        os.environ["STRATAGEM_DEBUG"] = "1"
    errors: TextIO = sys.stderr
    if quiet:
        errors = StandardError(os.dup(2))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # Set by a parent process that reports this command's error itself; children must not inherit it.
    place = os.environ.pop("STRATAGEM_ERROR", None)

    def end(error: StratagemError, word: str = "error") -> NoReturn:
        if place is not None:
            Path(place).write_text(dumps(to_json(error)), encoding="utf-8")
        else:
            print(f"{word}: {error}", file=errors, flush=True)
        sys.exit(error.exit_code)

    for number in (signal.SIGTERM, signal.SIGHUP):  # SIGHUP: the terminal was closed.
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP.
            signal.signal(number, terminate)
    try:
        try:
            yield
            sys.stdout.flush()
        finally:
            # Ignore the first signal while Python exits, because an exception in Prefect's last messages would delay
            # the exit by 20 s; a second one ends the process at once.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, lambda number, frame: signal.signal(number, signal.SIG_DFL))
    except BrokenPipeError:  # The reader has closed the pipe, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends.
        sys.exit(128 + signal.SIGPIPE)
    except Interrupted as interrupted:
        end(interrupted, "interrupted")
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=errors, flush=True)
        sys.exit(getattr(interrupt, "exit_code", 130))
    except Exception as error:
        if debug:
            print(without_secrets(traceback.format_exc()), file=errors, flush=True)
        end(error if isinstance(error, StratagemError) else _explained(error))


def _explained(error: Exception) -> StratagemError:
    from tasks.system import messages

    if (explained := messages.explain(error, "the project's folder, or Prefect's,")) is not None:
        return explained
    cause = (str(error).strip() or "no message").splitlines()[0]
    return StratagemError(f"{type(error).__name__}: {cause} (--debug shows the traceback)")
