"""`stratagem init`: creates a project with settings, recipes, the pipelines of DVC and Prefect, and the dataset digits.

The project uses the installed code.
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
# Of plain DVC, in the folder where it runs, as long as .dvc/config.local names no other.
.dvc_site/
"""
DVC = {
    ".dvc/config": "[core]\n    analytics = false\n    autostage = false\n    site_cache_dir = .dvc_site\n",
    ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n/site\n",
    ".dvcignore": (
        "# Folders that DVC need not look through for dvc.yaml files, and what must not change a dependency.\n"
        ".venv\nmlruns\n__pycache__\n.dvc_site\n"
    ),
}


def make(folder: Path, git: bool | None = None, only_look: bool = False) -> NewProject:
    """Create a project in a new folder, or in an existing one that has none of the project's files.

    Args:
        folder: the project's folder, new or existing.
        git: also create a git repository; None creates one unless the folder is in a repository.
        only_look: only return what would be created.

    Raises:
        UserError: the folder is in a project, is a file, has files of the same names, or cannot be written.
    """
    folder = Path(os.path.abspath(folder))
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file: choose a folder for the project")
        if not folder.parent.is_dir():
            raise UserError(f"{folder}: the folder {folder.parent} does not exist: create it first")
        for above in (folder, *folder.parents):
            if (above / "params.yaml").is_file() and (above / ".dvc").is_dir():
                where = "is already a project" if above == folder else f"is in the project {above}"
                raise UserError(f"{folder} {where}: choose a folder outside of any project")
        if git is None:
            git = pygit2.discover_repository(str(folder if folder.exists() else folder.parent)) is None
        git = git and not os.path.lexists(folder / ".git")
        with tempfile.TemporaryDirectory() as made:
            _write(Path(made))
            parts = sorted(path.relative_to(made) for path in Path(made).rglob("*") if path.is_file())
            files_above = [one for part in parts for one in part.parents if not (folder / one).is_dir()]
            if there := [str(one) for one in sorted({*parts, *files_above}) if os.path.lexists(folder / one)]:
                raise UserError(
                    f"{folder} contains {listed(there, 5)}, which a new project would overwrite: move them away, or "
                    "choose another folder"
                )
            for part in parts if not only_look else ():
                (folder / part).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(made, part), folder / part)
        if git and not only_look:
            pygit2.init_repository(str(folder))
    except OSError as error:
        raise files.unwritable(folder, error) from None
    return NewProject(folder=str(folder), files=tuple(map(str, parts)), git=git)


def _write(folder: Path) -> None:
    code = config.code_root()
    texts = dict(DVC) | {".gitignore": GITIGNORE, "mlruns/.gitkeep": ""}
    for file in [code / name for name in ("params.yaml", "dvc.yaml", "prefect.yaml")] + [
        *code.glob("recipes/**/*.yaml")
    ]:
        texts[file.relative_to(code).as_posix()] = file.read_text(encoding="utf-8")
    # These lines refer to files that the project does not have.
    texts["params.yaml"] = re.sub(r"(?m)^#.* tasks/.*\n", "", texts["params.yaml"])
    texts["dvc.yaml"] = texts["dvc.yaml"].replace("python -m tasks", dataset_folder.INSTALLED_COMMAND)
    for line in ("      - requirements.lock\n", "      - tasks\n"):  # Only a checkout has these dependencies.
        texts["dvc.yaml"] = texts["dvc.yaml"].replace(line, "")
    # Name a flow by its module, because the project does not have its file.
    texts["prefect.yaml"] = re.sub(r"flows/(\w+)\.py:(\w+)", r"flows.\1.\2", texts["prefect.yaml"])
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    dataset_folder.add(config.load(root=folder).dataset, folder)
