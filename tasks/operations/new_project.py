"""`stratagem init`: makes a project with settings, recipes, the pipelines of DVC and Prefect, and the dataset digits.

The code stays where it is installed.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

import pygit2

from tasks import config
from tasks.data import dataset_folder
from tasks.records import NewProject
from tasks.system import files
from tasks.system.errors import UserError, listed

GITIGNORE = """\
.venv
__pycache__/
# What a run leaves behind, but for metrics/: DVC's outputs name themselves in data/<name>/.gitignore.
/mlruns/*
!/mlruns/.gitkeep
/dvc_plots/
"""
# As in a checkout.
DVC = {
    ".dvc/config": "[core]\n    analytics = false\n    autostage = false\n",
    ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n/site\n",
    ".dvcignore": (
        "# Folders that DVC need not look through for dvc.yaml files, and what must not change a dependency.\n"
        ".venv\nmlruns\n__pycache__\n"
    ),
}
ONLY_IN_A_CHECKOUT = ("      - requirements.lock\n", "      - tasks\n")
"""Dependencies of the stages in a checkout's dvc.yaml."""
GIT = ".git"


def make(folder: Path, git: bool | None = None, only_look: bool = False) -> NewProject:
    """Make a project in a new folder, or in one that has none of its files: all of it, or nothing.

    Args:
        folder: new or existing.
        git: also make a git repository; None makes one unless the folder is in one.
        only_look: return what would be made, and leave nothing behind.

    Raises:
        UserError: the folder is in a project, is a file, has files that would be overwritten, or cannot be written.
    """
    folder = Path(os.path.abspath(folder))
    try:
        _refuse(folder)
        if git is None:
            git = pygit2.discover_repository(str(folder if folder.exists() else folder.parent)) is None
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise files.unwritable(folder, error) from None
    try:
        _write(made)
        parts = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
        if there := [str(part) for part in parts if _is_taken(folder, part)]:
            raise UserError(
                f"{folder} holds {listed(there, 5)}, which a new project would overwrite: move that away, or give "
                "another folder"
            )
        if git and not only_look:
            pygit2.init_repository(str(made))
        if not only_look:
            _move(made, folder, [*parts, *([Path(GIT)] if git else [])])
    except OSError as error:
        raise files.unwritable(folder, error) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return NewProject(folder=str(folder), files=tuple(map(str, parts)), git=git)


def _refuse(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give the folder that the project is to be made in")
    if not folder.parent.is_dir():
        raise UserError(f"{folder}: there is no folder {folder.parent}: make it first")
    for above in (folder, *folder.parents):
        if (above / "params.yaml").is_file() and (above / ".dvc").is_dir():
            where = "is a project already" if above == folder else f"is in the project {above}"
            raise UserError(f"{folder} {where}: give a folder that is in none")


def _write(folder: Path) -> None:
    """Write all files of a project."""
    code = config.code_root()
    texts = dict(DVC) | {".gitignore": GITIGNORE, "mlruns/.gitkeep": ""}
    for file in [code / name for name in ("params.yaml", "dvc.yaml", "prefect.yaml")] + [
        *code.glob("recipes/**/*.yaml")
    ]:
        texts[file.relative_to(code).as_posix()] = file.read_text(encoding="utf-8")
    # These lines point to files that the project does not have.
    texts["params.yaml"] = re.sub(r"(?m)^#.* tasks/.*\n", "", texts["params.yaml"])
    texts["dvc.yaml"] = texts["dvc.yaml"].replace("python -m tasks", dataset_folder.INSTALLED_COMMAND)
    for line in ONLY_IN_A_CHECKOUT:
        texts["dvc.yaml"] = texts["dvc.yaml"].replace(line, "")
    # A flow by its module: the project does not have its file.
    texts["prefect.yaml"] = re.sub(r"flows/(\w+)\.py:(\w+)", r"flows.\1.\2", texts["prefect.yaml"])
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    dataset_folder.add(config.load(root=folder).dataset, folder)


def _is_taken(folder: Path, part: Path) -> bool:
    """Return whether the file exists, or one of its folders is a file."""
    above = [folder / one for one in part.parents]
    return os.path.lexists(folder / part) or any(os.path.lexists(one) and not one.is_dir() for one in above)


def _move(made: Path, folder: Path, parts: list[Path]) -> None:
    """Move a project to its place: a new folder at once, otherwise file by file, the settings last."""
    if not folder.exists():
        made.rename(folder)
        return
    moved: list[Path] = []
    try:
        for part in sorted(parts, key=lambda part: (part == Path("params.yaml"), part)):
            moved += [above for above in (folder / part).parents if not above.exists()]
            (folder / part).parent.mkdir(parents=True, exist_ok=True)
            (made / part).rename(folder / part)
            moved.append(folder / part)
    except BaseException:
        if folder / GIT in moved:
            moved.remove(folder / GIT)
            shutil.rmtree(folder / GIT)
        dataset_folder.take_away(moved)
        raise
