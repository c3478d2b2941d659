"""The project's folder, its recipes, and the names in registries."""

import os
from pathlib import Path
from typing import Literal

from tasks.system.errors import UserError

CODE = Path(__file__).resolve().parents[2]


def project_root() -> Path:
    """Return the folder with params.yaml and .dvc/: the current one or one above it."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        # A dataset's folder has a params.yaml, too. Without pathlib, because this runs often.
        if os.path.isdir(f"{folder}/.dvc") and os.path.lexists(f"{folder}/params.yaml"):
            return folder
    raise UserError(
        f"no project here: neither {here} nor a folder above it has params.yaml and .dvc/. `stratagem init FOLDER` "
        "creates a project"
    )


def code_root() -> Path:
    """Return the folder of flows/, tasks/ and requirements.lock that this process runs: a checkout, or the installed
    package."""
    return CODE


def has_own_code(root: Path) -> bool:
    """Return whether a project contains the code that it runs, as a checkout does, instead of an installed package."""
    return (root / "tasks" / "__main__.py").is_file()


Registry = Literal[
    "data/builders", "data/checks", "data/kinds", "modeling/metrics", "modeling/models", "operations/submission",
    "serving/formats", "strategies",
]  # fmt: skip


def names_of(registry: Registry) -> list[str]:
    """Return the keys of a registry: the names of the files in ``tasks/<registry>/``."""
    return sorted(p.stem for p in (Path(__file__).parents[1] / registry).glob("*.py") if not p.stem.startswith("_"))


def recipes(root: Path) -> dict[str, Path]:
    """Return the recipes of the project by name."""
    return {path.stem: path for path in sorted((root / "recipes").glob("*.yaml"))}
