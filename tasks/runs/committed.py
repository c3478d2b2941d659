"""When a checkpoint's folder is whole: ``state.json`` is written last, and holds the sha256 of the arrays and of
itself, and the number of its format."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.records import FORMAT, Run, check_format
from tasks.system import files

STATE = "state.json"


def digest(content: Mapping[str, Any]) -> str:
    """Return the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def signed(content: Mapping[str, Any]) -> bytes:
    """Return a JSON value as the bytes of a file that holds its own sha256 and the number of its format."""
    content = {**content, "format": FORMAT}
    return json.dumps({**content, "sha256": digest(content)}, indent=1).encode()


def parse(signed: bytes, path: Path | str) -> dict[str, Any]:
    """Return the value of ``signed``; ``path`` is the file's, for messages.

    Raises:
        ValueError: it is not what was written.
        UserError: it is of another format.
    """
    content: dict[str, Any] = json.loads(signed)
    if not isinstance(content, dict) or content.pop("sha256", None) != digest(content):
        raise ValueError(f"{STATE} has another sha256 than when it was written")
    check_format(content.pop("format", None), path, Run.remedy)
    return content


def verify(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's ``state.json``, once the arrays beside it are found to be those it names.

    Raises:
        OSError, ValueError, KeyError: files are missing, or are not what was written.
        UserError: it is of another format.
    """
    state = parse((folder / STATE).read_bytes(), folder / STATE)
    for name, sha256 in {"arrays.npz": state["arrays_sha256"], **state.get("pieces", {})}.items():
        if files.digest(folder / Path(name).name) != sha256:
            raise ValueError(f"{name} has another sha256 than when it was written")
    return state
