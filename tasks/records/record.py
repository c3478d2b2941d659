"""The base of all records, and how to save and load them. Their times are ISO 8601, in UTC, to the second."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from tasks.system import files
from tasks.system.errors import UserError, shown

FORMAT = 1
"""The ``format`` number of files that another version of Stratagem may find. It rises when their content changes; a
file with another number, or with none, is rejected."""
# Part of a path: an edited record must not lead out of mlruns/, where files are read and removed.
Name = Annotated[str, Field(pattern=r"^[^./][^/]*$")]
Place = Annotated[str, Field(pattern=r"^mlruns(/[^./][^/]*)+$")]
"""A file or folder in mlruns/, relative to the project's folder."""
Inside = Annotated[str, Field(pattern=r"^[^./][^/]*(/[^./][^/]*)*$")]
"""A file, relative to the folder that it belongs to."""


class Record(BaseModel):
    """A frozen value that is JSON on disk and between processes. Paths in it are relative to the project's folder."""

    # A loss may be NaN, which JSON cannot express as a number, and null could not be read back as one.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", defer_build=True)
    remedy: ClassVar[str] = ""
    """What to do about a file of another format. Only records with a remedy carry ``FORMAT``."""


R = TypeVar("R", bound=Record)


def save(record: Record, path: Path) -> Path:
    """Write a record as JSON under a temporary name, flush it, and rename it: readers see all of it or nothing."""
    text = record.model_dump_json(indent=2)
    if record.remedy:
        text = text.replace("{", f'{{\n  "format": {FORMAT},', 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return path


def load(record_type: type[R], path: Path) -> R:
    """Return the record in a JSON file.

    Raises:
        UserError: the file is missing, is of another format, or is not such a record.
    """
    try:
        text = files.read_text(path)
        if not record_type.remedy:
            return record_type.model_validate_json(text)
        content = json.loads(text)
        if isinstance(content, dict):
            check_format(content.pop("format", None), path, record_type.remedy)
        return record_type.model_validate(content)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the stage that writes it has not finished") from None
    except (OSError, ValueError, RecursionError) as error:
        first, remedy = str(error).splitlines()[0], record_type.remedy or "run the stage that writes it again"
        raise UserError(f"{path} is not a readable {record_type.__name__} ({first}): {remedy}") from None


def check_format(found: object, path: Path | str, remedy: str) -> None:
    """Raise ``UserError`` if a file's format number is not ``FORMAT``; the message ends with the remedy."""
    if found != FORMAT:
        number = "no format number" if found is None else f"format {shown(found)}"
        raise UserError(f"{path} has {number}, but this version of Stratagem reads only format {FORMAT}: {remedy}")


def load_or_none(record_type: type[R], path: Path) -> R | None:
    """Return the record in a JSON file; None if the file is missing or is not such a record."""
    try:
        return load(record_type, path)
    except UserError:
        return None


def now() -> str:
    """Return the current time."""
    return at(time.time())


def at(seconds: float) -> str:
    """Return the time of a number of seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
