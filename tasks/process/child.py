"""Sets up every process of the project, and calls a single stage in a child process, whose errors it raises again."""

import contextlib
import getpass
import io
import os
import stat
import sys
from typing import TYPE_CHECKING

from pydantic import BaseModel, TypeAdapter

from tasks import config
from tasks.strategies.environment import stage_command, stage_environment
from tasks.system import errors, network
from tasks.system.child import Child, Message
from tasks.system.errors import ProcessDied, UserError

if TYPE_CHECKING:
    from tasks.process.stages import Output, Stage


class StandardError(io.TextIOWrapper):
    """Standard error that stays silent once nobody reads it: with `2>&1 | head`, a print would end the training."""

    def __init__(self, descriptor: int = 2) -> None:
        binary = io.BufferedWriter(io.FileIO(descriptor, "wb", closefd=False))
        super().__init__(binary, encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def write(self, text: str) -> int:
        with contextlib.suppress(BrokenPipeError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            super().flush()


def set_up_process() -> None:
    """Make this process's files private, move passwords out of the addresses in its environment, bypass proxies for
    servers on this machine, name its user if it has no name, and let it continue if nobody reads its standard error.

    `chmod g+ws mlruns` shares mlruns/ with a team: its group may then read and write.
    """
    shared = False
    with contextlib.suppress(UserError, OSError):
        mode = (config.project_root() / "mlruns").stat().st_mode
        shared = bool(mode & stat.S_ISGID and mode & stat.S_IWGRP)
    os.umask(0o007 if shared else 0o077)
    network.separate_credentials(os.environ)
    network.keep_proxies_out(os.environ)
    try:
        getpass.getuser()
    except (KeyError, OSError):  # DVC needs a name, which a user in a container may not have.
        os.environ["LOGNAME"] = f"user{os.getuid()}"
    if sys.stderr is sys.__stderr__:
        sys.stderr = StandardError()


def call(row: "Stage[..., Output]", given: Message) -> "Output":
    """Run a row of the table of stages in a separate process, and return its result.

    Args:
        row: the row.
        given: its arguments, by name: records and JSON values; and ``tell``, if the function has this argument, which
            is called here with each message before the answer.

    Raises:
        StratagemError: the call failed.
        ProcessDied: its process died.
        BrokenPipeError: the reader of its output has closed the pipe.
    """
    group = 0 if row.ends_itself else None
    tell = given.pop("tell", None)
    # With close_fds=False, it inherits the descriptors that the caller made inheritable.
    child = Child(
        stage_command("call"), stage_environment(None), cwd=config.project_root(), process_group=group, close_fds=False
    )
    try:
        child.send({"id": 0, "stage": row.name, "arguments": to_json(given)})
        answer = None
        for answer in child.messages():
            if "id" not in answer and tell is not None:
                tell(answer)
    except BaseException:
        if row.ends_itself:
            child.terminate_group()
        child.kill()
        raise
    child.close()
    if answer is None or "id" not in answer:
        raise ProcessDied(f"the process of `{row.name}` ended with {child.death}")
    if "error" not in answer:
        found: Output = TypeAdapter(row.output).validate_python(answer["record"])
        return found
    if answer.get("cause") == BrokenPipeError.__name__:
        raise BrokenPipeError
    raise errors.from_json(answer)


def to_json(arguments: Message) -> Message:
    """Return the arguments of a row as JSON values."""
    return {name: v.model_dump(mode="json") if isinstance(v, BaseModel) else v for name, v in arguments.items()}
