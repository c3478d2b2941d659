"""Formats that a trained model is exported to, by name: the file is the key, and its ``FORMAT`` says how a model
becomes files, and how these are loaded back to give outputs.

``stratagem export RUN --format NAME`` has it then: every export is loaded back, and compared with Keras on the test
split.
"""

import importlib
import importlib.util
import inspect
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from tasks import config
from tasks.system.errors import UserError, one_of


@dataclass(frozen=True)
class Format:
    """How a trained model lies in files, for whoever uses it elsewhere."""

    write: Callable[[Any, Path, Path], object]
    """Takes the ``keras.Model``, the .keras file that it was loaded from, and an empty folder, which it fills. What it
    raises is printed as the reason why this model has no such format."""
    load: Callable[[Path], Callable[[Any], Any]]
    """Takes the folder; returns a function from a batch, an array or a dict of them as the Keras model takes it, to
    outputs of the same shape. It is called ``load_model`` and stands alone, because its lines go with each export to
    where nothing of this project is. They may name ``Any``, ``Callable`` and ``Path``, and import all else."""
    packages: tuple[str, ...] = ()
    """What it imports of its extra in pyproject.toml."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """By ``train.dtype_policy``: why a model that was trained with it has no such format."""
    rounds: bool = False
    """Whether its weights are rounded, so that its outputs are not Keras': the metrics of both on the whole test split
    are stated in place of a difference that is allowed."""
    extra: str | None = None
    """The extra that it shares with another format; None where it has one of its own name, or needs none."""


def find_format(name: str) -> Format:
    """Return the format of a name, a file of this folder. No framework is imported before it is used.

    Raises:
        UserError: there is none, or a package that it needs is not installed.
    """
    known = config.names_of("serving/formats")
    if name not in known:
        raise UserError(one_of("export format", name, known))
    found: Format = importlib.import_module(f"tasks.serving.formats.{name}").FORMAT
    if missing := [package for package in found.packages if importlib.util.find_spec(package) is None]:
        raise UserError(
            f"--format {name} needs {' and '.join(missing)}, not installed here: {_remedy(found.extra or name)}"
        )
    return found


def _remedy(name: str) -> str:
    """Return how an extra is installed: of a checkout, or by the packages that the installed one names."""
    if (config.code_root() / "pyproject.toml").is_file():
        return (
            f"install requirements.lock (`make setup`), or the extra '{name}' alone: `pip install -e '.[{name}]'` in "
            "the project's folder"
        )
    extra = f'; extra == "{name}"'
    wanted = [one.removesuffix(extra) for one in requires("stratagem") or () if one.endswith(extra)]
    return f"`pip install {shlex.join(wanted)}`"


def program(format: Format, package: str) -> str:
    """Return the text of predict.py of an exported folder: _predict.py with the format's ``load_model``, and with the
    copy of tasks.data.encoding that lies beside it."""
    text = Path(__file__).with_name("_predict.py").read_text(encoding="utf-8")
    own, other = "from tasks.data.encoding", "from tasks.serving.formats.keras import load_model\n"
    # Python looks beside a file by itself only where that file is the program.
    text = text.replace(own, f"sys.path.insert(0, str(Path(__file__).parent))\n{own}", 1)
    text = text.replace(other, f"del sys.path[0]\n\n\n{inspect.getsource(format.load)}\n")
    return text.replace(own, f"from {package}")
