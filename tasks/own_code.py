"""The user's own code of a model: what `module:function` needs from the project's folder."""

import modulefinder
from pathlib import Path

from tasks import config


def files(model_name: str) -> list[Path]:
    """Return the files, relative to the project's folder, that a model's module imports, and the module's own.

    They are found by reading, nothing is imported. There are none for a model of ours, and none for a module that is
    installed elsewhere.
    """
    module, colon, _ = model_name.partition(":")
    if not colon:
        return []
    root = config.project_root()
    finder = modulefinder.ModuleFinder(path=[str(root)])
    try:
        finder.import_hook(module)
        found = {Path(file) for one in finder.modules.values() if (file := getattr(one, "__file__", None))}
    except (ImportError, SyntaxError, AttributeError, TypeError):  # A folder without __init__.py is no package to it.
        found = set()
    place = root.joinpath(*module.split("."))
    found |= {place.with_suffix(".py"), place / "__init__.py"}
    return sorted(path.relative_to(root) for path in found if path.is_relative_to(root) and path.is_file())
