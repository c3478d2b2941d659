"""The lineage of a run: digests of its commit, code, settings, data and weights."""

import ast
import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from tasks import config, records
from tasks.modeling import own_code
from tasks.records import CodeMeanings
from tasks.system.errors import UserError
from tasks.system.files import read_text

if TYPE_CHECKING:
    import numpy as np
    import pygit2


def collect(settings: config.Settings, data_version: str | None) -> records.Lineage:
    """Return the lineage of a run with these settings on this data."""
    root = config.project_root()
    commit, dirty = git_state(root)
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


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the checked-out commit, and whether any file differs from it or is new and not ignored.

    (None, None) outside a git checkout; the commit is None before the first one. What libgit2 cannot read is None.
    """
    import pygit2

    repository = find_repository(folder)
    commit = dirty = None
    if repository is not None:
        with contextlib.suppress(pygit2.GitError):  # An index that libgit2 cannot read, such as a split or sparse one.
            commit = None if repository.head_is_unborn else str(repository.head.target)
            dirty = bool(repository.status(untracked_files="normal"))
    return commit, dirty


def is_ignored(path: Path, folder: Path) -> bool:
    """Return whether git ignores a path in a folder of a repository; the file need not exist."""
    import pygit2

    try:
        repository = find_repository(folder)
        return repository is not None and repository.path_is_ignored(os.path.relpath(path, repository.workdir))
    except (pygit2.GitError, ValueError):
        return False


def file_at(commit: str, path: str, folder: Path) -> str | None:
    """Return the text of a file in a commit, None if the commit does not contain it.

    Args:
        commit: any name that git accepts: a hash, a branch, a tag, ``HEAD~1``.
        path: relative to ``folder``.
        folder: a folder of the repository.

    Raises:
        UserError: the commit does not exist, or the folder is in no repository.
    """
    import pygit2

    repository, found = _find_commit(commit, folder)
    if repository is None:
        raise UserError(f"'{commit}': {folder} is not under version control, so it has no commits")
    if found is None:
        raise UserError(f"'{commit}' is not a commit, branch or tag here: `git log --oneline` lists the commits")
    place = (folder / path).resolve().relative_to(Path(repository.workdir).resolve()).as_posix()
    if place not in found.tree:
        return None
    blob = found.tree[place]
    return blob.data.decode() if isinstance(blob, pygit2.Blob) else None


def export(commit: str, root: Path, folder: Path) -> None:
    """Write the files of a commit below a folder of the repository into a new folder; the working tree, the index and
    the branches stay unchanged.

    Args:
        commit: its hash.
        root: a folder of the repository.
        folder: the folder to create.

    Raises:
        UserError: the commit does not exist, or does not contain the folder.
    """
    import pygit2

    repository, found = _find_commit(commit, root)
    if repository is None or found is None:
        raise UserError(f"git commit {commit} is not in this repository: fetch it (git fetch --unshallow --all)")
    inside = root.resolve().relative_to(Path(repository.workdir).resolve()).as_posix()
    try:
        files = found.tree if inside == "." else found.tree[inside]
    except KeyError:
        raise UserError(f"git commit {commit} has no folder {inside}, where this project is") from None
    folder.mkdir()
    strategy = pygit2.enums.CheckoutStrategy
    how = strategy.FORCE | strategy.DONT_UPDATE_INDEX | strategy.DISABLE_PATHSPEC_MATCH
    repository.checkout_tree(files, directory=str(folder), strategy=how)  # type: ignore[no-untyped-call]


def commit_of(name: str, folder: Path) -> str | None:
    """Return the hash of a commit by any name that git accepts: a hash or its first letters, a branch, a tag,
    ``HEAD~1``; None if it does not exist."""
    _, found = _find_commit(name, folder)
    return None if found is None else str(found.id)


def subject(commit: str, folder: Path) -> str | None:
    """Return the first line of a commit's message; None if the commit is not in this repository."""
    _, found = _find_commit(commit, folder)
    return None if found is None else "".join(sign for sign in found.message.partition("\n")[0] if sign.isprintable())


def _find_commit(name: str, folder: Path) -> "tuple[pygit2.Repository | None, pygit2.Commit | None]":
    """Return the repository of a folder and the commit that a name refers to; None for each that does not exist or
    cannot be read."""
    import pygit2

    repository = find_repository(folder)
    if repository is not None:
        with contextlib.suppress(pygit2.GitError, KeyError, ValueError):
            return repository, repository.revparse_single(name).peel(pygit2.Commit)
    return repository, None


def find_repository(folder: Path) -> "pygit2.Repository | None":
    """Return the repository of a folder; None if the folder is in no readable repository."""
    # Imported here because it takes 0.1 s, which `stratagem --help` should not wait for.
    import pygit2

    # Reading runs no code of the repository, and in a container another user often owns the checkout.
    pygit2.option(pygit2.enums.Option.SET_OWNER_VALIDATION, False)
    with contextlib.suppress(pygit2.GitError):
        found = pygit2.discover_repository(str(folder))
        return pygit2.Repository(found) if found is not None else None
    return None


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
    # Known files are not parsed again: parsing all takes 1 s, hashing their bytes 0.01 s.
    meant = {
        digests[name]: known.get(digests[name]) or meaning(found[name]) if name.endswith(".py") else digests[name]
        for name in names
    }
    if not meant.items() <= known.items():
        with contextlib.suppress(OSError):  # A project that cannot be written is refused elsewhere.
            records.save(CodeMeanings(by_bytes=meant), cache)
    return hashlib.sha256("".join(f"{name}\0{meant[digests[name]]}\n" for name in names).encode()).hexdigest()


def meaning(source: bytes) -> str:
    """Return the sha256 of a file's syntax tree, without comments, docstrings and formatting; if it is not valid
    Python, that of its bytes."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest()
    return hashlib.sha256("\0".join(_parts(tree)).encode()).hexdigest()


def _parts(node: ast.AST) -> Iterator[str]:
    """Yield the parts of a syntax tree, without positions, empty fields (newer Pythons have more) and bare strings."""
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if (
                isinstance(item, ast.Expr)
                and isinstance(item.value, ast.Constant)
                and isinstance(item.value.value, str)
            ):
                continue
            if isinstance(item, ast.AST):
                yield f"{name}("
                yield from _parts(item)
                yield ")"
            elif item is not None or isinstance(value, list):  # In a list, None is a place: `{**a, b: c}`.
                yield f"{name}={item!r}"


def weights_digest(weights: Sequence[tuple[str, "np.ndarray"]]) -> str:
    """Return the sha256 over the name, dtype, shape and bytes of every weight, in any order."""
    lines = sorted(
        f"{name}\0{array.dtype.name}\0{array.shape}\0{hashlib.sha256(array.tobytes()).hexdigest()}\n"
        for name, array in weights
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def model_digest(keras_file: Path, weights_digest: str, model_name: str) -> str:
    """Return the sha256 of a model's weights, layers and user-defined code.

    A digest of the .keras file would not do: it contains the time of writing and memory addresses.
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


def data_version(name: str, part: Literal["prepared", "raw"] = "prepared") -> str | None:
    """Return the md5 of data/<name>/prepared in data/<name>/dvc.lock, without the ``.dir`` that DVC appends.

    With ``part`` raw, that of data/<name>/raw, its source. None if DVC has not prepared the dataset.

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
    return version_in(text, name, part, str(lock))


def version_in(
    lock: str, name: str, part: Literal["prepared", "raw"] = "prepared", place: str = "its dvc.lock"
) -> str | None:
    """Return the same as ``data_version`` from the text of a dvc.lock; messages name ``place``."""
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
