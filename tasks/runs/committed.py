"""Finds and verifies complete checkpoints: ``state.json`` is written last, and contains its own sha256, that of the
arrays, and its format number."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.records import FORMAT, Run, check_format
from tasks.system import files

STATE = "state.json"


def steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, in numerical order (9, 10, 100)."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdigit())


def digest(content: Mapping[str, Any]) -> str:
    """Return the sha256 of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def signed(content: Mapping[str, Any]) -> bytes:
    """Return a JSON value as the bytes of a file that contains its own sha256 and its format number."""
    content = {**content, "format": FORMAT}
    return json.dumps({**content, "sha256": digest(content)}, indent=1).encode()


def parse(signed: bytes, path: Path | str) -> dict[str, Any]:
    """Return the value that ``signed`` wrote; messages name ``path``.

    Raises:
        ValueError: the content was changed.
        UserError: the file has another format.
    """
    content: dict[str, Any] = json.loads(signed)
    if not isinstance(content, dict) or content.pop("sha256", None) != digest(content):
        raise ValueError(f"the sha256 of {STATE} has changed since it was written")
    check_format(content.pop("format", None), path, Run.remedy)
    return content


def verify(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's ``state.json`` after verifying its arrays.

    Raises:
        OSError, ValueError, KeyError: files are missing or were changed.
        UserError: the file has another format.
    """
    state = parse((folder / STATE).read_bytes(), folder / STATE)
    if files.digest(folder / "arrays.npz") != state["arrays_sha256"]:
        raise ValueError("the sha256 of arrays.npz has changed since it was written")
    return state
