"""Where a run comes from: the commit, the code, the settings, the data and the weights, each as one digest."""

import ast
import contextlib
import hashlib
import json
import os
import sys
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
    """Return where a run with these settings on this data comes from."""
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
    """Return the version of Stratagem that is installed."""
    return version("stratagem")


def code_of(settings: config.Settings, root: Path | None = None) -> str:
    """Return the digest of the code of a run with these settings, see ``code_digest``."""
    own = settings.model.name, settings.train.loss, *own_code.metrics_of(settings)
    return code_digest(*own, initial=settings.model.initial, root=root)


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return the commit that is checked out and whether any file differs from it or is new and not ignored.

    (None, None) outside of a git checkout; the commit is None before the first one.
    """
    import pygit2

    try:
        repository = find_repository(folder)
        if repository is None:
            return None, None
        commit = None if repository.head_is_unborn else str(repository.head.target)
        return commit, bool(repository.status(untracked_files="normal"))
    except pygit2.GitError:
        return None, None


def is_ignored(path: Path, folder: Path) -> bool:
    """Return whether git ignores a file in a folder of a repository, whether or not the file is there."""
    import pygit2

    try:
        repository = find_repository(folder)
        return repository is not None and repository.path_is_ignored(os.path.relpath(path, repository.workdir))
    except (pygit2.GitError, ValueError):
        return False


def file_at(commit: str, path: str, folder: Path) -> str | None:
    """Return the text of a file as it was in a commit, None where that has none.

    Args:
        commit: what git takes for one: a hash, a branch, a tag, ``HEAD~1``.
        path: from a folder of the repository.

    Raises:
        UserError: there is no such commit, or no repository.
    """
    import pygit2

    repository, found = _find_commit(commit, folder)
    if repository is None:
        raise UserError(f"'{commit}': {folder} is under no version control, so it has no commits")
    if found is None:
        raise UserError(f"'{commit}' is not a commit, branch or tag here: `git log --oneline` lists the commits")
    place = (folder / path).resolve().relative_to(Path(repository.workdir).resolve()).as_posix()
    if place not in found.tree:
        return None
    blob = found.tree[place]
    return blob.data.decode() if isinstance(blob, pygit2.Blob) else None


def export(commit: str, root: Path, folder: Path) -> None:
    """Write the files that a commit has in a folder of the repository into another one; the repository's own, its index
    and its branches stay as they are.

    Args:
        commit: its hash.
        root: a folder of the repository.
        folder: to make.

    Raises:
        UserError: there is no such commit, or it has no such folder.
    """
    import pygit2

    repository, found = _find_commit(commit, root)
    if repository is None or found is None:
        raise UserError(f"git commit {commit} is not in this repository: fetch it (git fetch --unshallow --all)")
    inside = root.resolve().relative_to(Path(repository.workdir).resolve()).as_posix()
    try:
        files = found.tree if inside == "." else found.tree[inside]
    except KeyError:
        raise UserError(f"git commit {commit} has no folder {inside}, where this project lies") from None
    folder.mkdir()
    strategy = pygit2.enums.CheckoutStrategy
    how = strategy.FORCE | strategy.DONT_UPDATE_INDEX | strategy.DISABLE_PATHSPEC_MATCH
    repository.checkout_tree(files, directory=str(folder), strategy=how)  # type: ignore[no-untyped-call]


def commit_of(name: str, folder: Path) -> str | None:
    """Return the hash of what git takes for a commit: a hash or the first letters of one, a branch, a tag, ``HEAD~1``;
    None where there is none."""
    _, found = _find_commit(name, folder)
    return None if found is None else str(found.id)


def subject(commit: str, folder: Path) -> str | None:
    """Return the first line of a commit's message; None where it is not in this repository."""
    _, found = _find_commit(commit, folder)
    return None if found is None else "".join(sign for sign in found.message.partition("\n")[0] if sign.isprintable())


def _find_commit(name: str, folder: Path) -> "tuple[pygit2.Repository | None, pygit2.Commit | None]":
    """Return the repository that a folder is in, and the commit that git takes a name for there; None for each that
    there is not, or that cannot be read."""
    import pygit2

    repository = None
    with contextlib.suppress(pygit2.GitError, KeyError, ValueError):
        repository = find_repository(folder)
        if repository is not None:
            return repository, repository.revparse_single(name).peel(pygit2.Commit)
    return repository, None


def find_repository(folder: Path) -> "pygit2.Repository | None":
    """Return the repository that a folder is in.

    Raises:
        pygit2.GitError: it cannot be read.
    """
    # Here and not above: 0.1 s that `stratagem --help` need not wait for.
    import pygit2

    # Reading runs nothing of the repository's, and a checkout that another user owns is normal in a container.
    pygit2.option(pygit2.enums.Option.SET_OWNER_VALIDATION, False)
    found = pygit2.discover_repository(str(folder))
    return pygit2.Repository(found) if found is not None else None


def code_digest(*own: str, initial: str | None = None, root: Path | None = None) -> str:
    """Return the sha256 of flows/, tasks/, requirements.lock, for each name that is a ``module:function`` the user's
    own code, and of the file that a model starts with, if there is one.

    Of a project without code of its own, the first three are those of the installed package. Comments, docstrings and
    the layout of Python files do not count.

    Args:
        own: names of the user's own code.
        initial: the file that a model starts with.
        root: the project's folder, or a checkout of it.
    """
    cache = config.project_root() / "mlruns" / "code.json"
    root = root or config.project_root()
    code = root if config.has_own_code(root) else config.code_root()
    files = [*code.glob("flows/**/*.py"), *code.glob("tasks/**/*.py"), code / "requirements.lock"]
    found = {file.relative_to(code).as_posix(): file.read_bytes() for file in files if file.is_file()}
    found |= {file.as_posix(): (root / file).read_bytes() for name in own for file in own_code.files(name, root)}
    if initial is not None and (start := root / initial).is_file():
        found[f"model.initial {initial}"] = start.read_bytes()
    names = sorted(found)
    known = {}
    if cache.exists():
        try:
            known = records.load(CodeMeanings, cache).by_bytes
        except UserError:
            print(f"{cache} is damaged: it is made anew", file=sys.stderr)
    digests = {name: hashlib.sha256(found[name]).hexdigest() for name in names}
    # Files that were seen before are not parsed again: all of them take 1 s, their bytes 0.01 s.
    meant = {
        digests[name]: known.get(digests[name]) or meaning(found[name]) if name.endswith(".py") else digests[name]
        for name in names
    }
    if not meant.items() <= known.items():
        with contextlib.suppress(OSError):  # A project that cannot be written is refused elsewhere.
            records.save(CodeMeanings(by_bytes=meant, sha256=CodeMeanings.digest(meant)), cache)
    return hashlib.sha256("".join(f"{name}\0{meant[digests[name]]}\n" for name in names).encode()).hexdigest()


def meaning(source: bytes) -> str:
    """Return the sha256 of what Python makes of a file: no comment, no docstring, no layout; of its bytes where it is
    no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest()
    return hashlib.sha256("\0".join(_parts(tree)).encode()).hexdigest()


def _parts(node: ast.AST) -> Iterator[str]:
    """Yield what a syntax tree holds, without places, empty fields (newer Pythons have more) and bare strings."""
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
    """Return the sha256 over every weight's name, dtype, shape and bytes, in whatever order they come."""
    lines = sorted(
        f"{name}\0{array.dtype.name}\0{array.shape}\0{hashlib.sha256(array.tobytes()).hexdigest()}\n"
        for name, array in weights
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def model_digest(keras_file: Path, weights_digest: str, model_name: str) -> str:
    """Return the sha256 of what a model computes: its weights, its layers, and the user's own code of them.

    The .keras file itself holds the time at which it was written, and addresses in memory.
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
    """Return the md5 of data/<name>/prepared in data/<name>/dvc.lock, without the ``.dir`` that DVC puts after it.

    With ``part`` raw, that of the data/<name>/raw that it was made of. None when DVC has not prepared the dataset.

    Raises:
        UserError: the lock cannot be read.
    """
    lock = config.project_root() / "data" / name / "dvc.lock"
    try:
        return version_in(read_text(lock), name, part)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, yaml.YAMLError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"{lock} cannot be read ({what}): restore it, or delete it to prepare again") from None


def version_in(lock: str, name: str, part: Literal["prepared", "raw"] = "prepared") -> str | None:
    """Return what ``data_version`` does, of the text of a dvc.lock."""
    stages = yaml.safe_load(lock)["stages"]
    files = stages["prepare"]["deps" if part == "raw" else "outs"] if "prepare" in stages else []
    versions = [file["md5"] for file in files if f"/{file['path']}".endswith(f"/data/{name}/{part}")]
    return str(versions[0]).removesuffix(".dir") if versions else None


def finished_run(dataset: str, lineage: records.Lineage) -> records.RunSummary | None:
    """Return the last finished run on a dataset if its data, settings and code are these, else None.

    Only the last one counts: after other settings the same ones train again, and the registered model is theirs again.
    Unreadable records are skipped.
    """
    last = None
    for path in (config.project_root() / "mlruns" / "runs").glob("*/summary.json"):
        with contextlib.suppress(UserError):
            found = records.load(records.RunSummary, path)
            if found.dataset == dataset and (last is None or found.finished_at > last.finished_at):
                last = found
    if last is None:
        return None
    wanted = (lineage.data_version, lineage.settings_digest, lineage.code_digest)
    return last if (last.data_version, last.settings_digest, last.code_digest) == wanted else None
