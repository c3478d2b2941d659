"""What a record is: a small frozen value, JSON on disk and between processes."""

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.system import files
from tasks.system.errors import UserError

# What becomes part of a path: a record that was edited must not lead out of mlruns/, where files are read and removed.
Name = Annotated[str, Field(pattern=r"^[^./][^/]*$")]
Place = Annotated[str, Field(pattern=r"^mlruns(/[^./][^/]*)+$")]
"""A file or folder in mlruns/, from the project's folder."""


class Record(BaseModel):
    """A frozen value that is JSON on disk and between processes. Paths in it are relative to the project's folder."""

    # A loss that is not a number is written as "NaN": JSON has no number for it, and null would not be read back.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


R = TypeVar("R", bound=Record)


def save(record: Record, path: Path) -> Path:
    """Write a record as JSON under a temporary name, flush it, and rename it: a reader sees all of it or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as temporary:
        temporary.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return path


def load(record_type: type[R], path: Path) -> R:
    """Return the record in a JSON file.

    Raises:
        UserError: the file is missing or is not such a record.
    """
    try:
        return record_type.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: the stage that writes it has not finished") from None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise UserError(
            f"{path} is not a readable {record_type.__name__} ({first}): run the stage that writes it again"
        ) from None


def load_or_none(record_type: type[R], path: Path) -> R | None:
    """Return the record in a JSON file; None where the file is missing or is not such a record."""
    try:
        return load(record_type, path)
    except UserError:
        return None
