"""The lineage of a run: digests of its commit, code, settings, data and weights."""

import ast
import contextlib
import hashlib
import json
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from tasks import config, records
from tasks.modeling import own_code
from tasks.records import CodeMeanings
from tasks.runs import repository
from tasks.system.errors import UserError
from tasks.system.files import read_text

if TYPE_CHECKING:
    import numpy as np


def collect(settings: config.Settings, data_version: str | None) -> records.Lineage:
    """Return the lineage of a run with these settings on this data."""
    root = config.project_root()
    commit, dirty = repository.state(root)
    return records.Lineage(
        git_commit=commit,
        git_dirty=dirty,
        code_digest=code_of(settings),
        settings_digest=settings.digest(),
        data_version=data_version,
        package_version=None if config.has_own_code(root) else package_version(),
    )


def package_version() -> str:
    """Return the installed version of Stratagem."""
    return version("stratagem")


def code_of(settings: config.Settings, root: Path | None = None) -> str:
    """Return the sha256 of the code of a run: flows/, tasks/, requirements.lock, the user code that its settings name
    as ``module:function``, and the file of its initial weights.

    In a project without its own code, the first three come from the installed package. Comments, docstrings and the
    formatting of Python files do not count.

    Args:
        settings: the run's settings.
        root: the project's folder, or a checkout of it.
    """
    # A user-defined dataset builder produces the data, which have their own version.
    own = [name for name, key in own_code.named_in(settings).items() if key != "dataset.name"]
    initial = settings.model.initial
    cache = config.project_root() / "mlruns" / "code.json"
    root = root or config.project_root()
    code = root if config.has_own_code(root) else config.code_root()
    files = [*code.glob("flows/**/*.py"), *code.glob("tasks/**/*.py"), code / "requirements.lock"]
    found = {file.relative_to(code).as_posix(): file.read_bytes() for file in files if file.is_file()}
    found |= {file.as_posix(): (root / file).read_bytes() for name in own for file in own_code.files(name, root)}
    if initial is not None and (start := root / initial).is_file():
        found[f"model.initial {initial}"] = start.read_bytes()
    names = sorted(found)
    kept = records.load_or_none(CodeMeanings, cache)
    known = kept.by_bytes if kept is not None else {}
    digests = {name: hashlib.sha256(found[name]).hexdigest() for name in names}
    # Unchanged files are not parsed again: parsing all files takes 1 s, hashing their bytes 0.01 s.
    meant = {
        digests[name]: known.get(digests[name]) or meaning(found[name]) if name.endswith(".py") else digests[name]
        for name in names
    }
    if not meant.items() <= known.items():
        with contextlib.suppress(OSError):  # A project that cannot be written is refused elsewhere.
            records.save(CodeMeanings(by_bytes=meant), cache)
    return hashlib.sha256("".join(f"{name}\0{meant[digests[name]]}\n" for name in names).encode()).hexdigest()


def meaning(source: bytes) -> str:
    """Return the sha256 of a file's syntax tree, without comments, docstrings and formatting, or the sha256 of its
    bytes if it is not valid Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest()
    for node in ast.walk(tree):
        for name, value in list(ast.iter_fields(node)):
            if isinstance(value, list):
                value[:] = [one for one in value if not _is_text(one)]
                if not value:  # Newer Pythons have more fields.
                    delattr(node, name)
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def weights_digest(weights: Sequence[tuple[str, "np.ndarray"]]) -> str:
    """Return the sha256 over the name, dtype, shape and bytes of every weight, in any order."""
    lines = sorted(
        f"{name}\0{array.dtype.name}\0{array.shape}\0{hashlib.sha256(array.tobytes()).hexdigest()}\n"
        for name, array in weights
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def model_digest(keras_file: Path, weights_digest: str, model_name: str) -> str:
    """Return the sha256 of a model's weights, layers and user-defined code.

    A digest of the .keras file is not suitable, because the file contains the time of writing and memory addresses.
    """
    with zipfile.ZipFile(keras_file) as archive:
        layers = json.loads(archive.read("config.json"), object_hook=_without_addresses)
    layers.pop("compile_config", None)
    digest = hashlib.sha256(f"{weights_digest}\n{json.dumps(layers, sort_keys=True)}".encode())
    for file in own_code.files(model_name):
        digest.update((config.project_root() / file).read_bytes())
    return digest.hexdigest()


def _without_addresses(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != "shared_object_id"}


def data_version(name: str) -> str | None:
    """Return the md5 of data/<name>/prepared from data/<name>/dvc.lock, without the suffix ``.dir``; None if DVC has
    not prepared the dataset.

    Raises:
        UserError: the lock cannot be read.
    """
    lock = config.project_root() / "data" / name / "dvc.lock"
    try:
        text = read_text(lock)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(str(lock), error) from None
    return version_in(text, name, place=str(lock))


def version_in(
    lock: str, name: str, part: Literal["prepared", "raw"] = "prepared", place: str = "its dvc.lock"
) -> str | None:
    """Return ``data_version``, or that of the source data/<name>/raw, from the text of a dvc.lock in ``place``."""
    try:
        stages = yaml.safe_load(lock)["stages"]
        files = stages["prepare"]["deps" if part == "raw" else "outs"] if "prepare" in stages else []
        versions = [file["md5"] for file in files if f"/{file['path']}".endswith(f"/data/{name}/{part}")]
    except (ValueError, RecursionError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(place, error) from None
    return str(versions[0]).removesuffix(".dir") if versions else None


def _unreadable(place: str, error: Exception) -> UserError:
    what = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return UserError(f"{place} cannot be read ({what}): restore it, or delete it to prepare again")
