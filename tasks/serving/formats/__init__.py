"""Export formats for trained models: each file in this folder is a format of the same name, and its ``FORMAT`` writes
a model to files and loads them back.

``stratagem models export RUN --format NAME`` uses the format, loads every export back and compares it with Keras on the
test split.
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

PROGRAM = '''\
"""Predicts images, texts, rows of tables or arrays with the model in this folder.

    python FOLDER/predict.py photo.jpg photos/     # a JSON line for each file
    python FOLDER/predict.py rows.csv              # for each row, also of .tsv, .jsonl and .parquet; for each .txt line
    python FOLDER/predict.py arrays.npz            # arrays as prepared, by name; .npy if there is only one

``-`` is standard input: rows of CSV or JSON, lines of text, names of images or one image; no arrays. The exit code is 1
if an example has an error instead of a prediction. In a program, ``load(FOLDER)`` returns a ``Predictor``. It needs
NumPy, Pillow for images, pandas for datetimes and Parquet, and the library that runs the model.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # Python does this by itself only for a script.
from PACKAGE.program import Predictor, main, verify

del sys.path[0]


LOAD_MODEL

def load(folder: str | os.PathLike[str]) -> Predictor:
    """Return the model of a folder, whose files must be those that were exported."""
    verify(Path(folder))
    return Predictor(Path(folder), load_model(Path(folder)))


if __name__ == "__main__":
    sys.exit(main(__doc__, lambda: load(Path(__file__).parent), sys.argv[1:]))
'''


@dataclass(frozen=True)
class Format:
    """How to write a trained model to files, and how to load them elsewhere."""

    write: Callable[[Any, Path, Path], object]
    """Takes the ``keras.Model``, the .keras file that it was loaded from, and an empty folder, which it fills. Any
    exception is reported as the reason why the model does not support the format."""
    load: Callable[[Path], Callable[[Any], Any]]
    """Takes the folder; returns a function from a batch (an array or a dict of arrays, as for the Keras model) to
    outputs of the same shape. Must be named ``load_model`` and be self-contained, because its source is copied into
    each export: it may use ``Any``, ``Callable`` and ``Path``, and must import everything else."""
    packages: tuple[str, ...] = ()
    """The packages of its extra in pyproject.toml that it imports."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """By ``train.dtype_policy``: why a model that was trained with it does not support the format."""
    rounds: bool = False
    """Whether it rounds the weights, so that the outputs differ from Keras': then the metrics of both on the whole test
    split are reported, instead of limiting the difference."""
    extra: str | None = None
    """The extra that it shares with another format; None if its extra has the format's name, or it needs none."""


def find_format(name: str) -> Format:
    """Return a format by name, without importing a framework.

    Raises:
        UserError: the format does not exist, or a package that it needs is not installed.
    """
    known = config.names_of("serving/formats")
    if name not in known:
        raise UserError(one_of("export format", name, known))
    found: Format = importlib.import_module(f"tasks.serving.formats.{name}").FORMAT
    if missing := [package for package in found.packages if importlib.util.find_spec(package) is None]:
        raise UserError(f"--format {name} needs {' and '.join(missing)}, not installed: {_remedy(found.extra or name)}")
    return found


def _remedy(name: str) -> str:
    """Return how to install an extra: from a checkout, or by the packages that the installed one names."""
    if (config.code_root() / "pyproject.toml").is_file():
        return (
            f"install requirements.lock (`make setup`), or the extra '{name}' alone: `pip install -e '.[{name}]'` in "
            "the project's folder"
        )
    extra = f'; extra == "{name}"'
    wanted = [one.removesuffix(extra) for one in requires("stratagem") or () if one.endswith(extra)]
    return f"`pip install {shlex.join(wanted)}`"


def program(format: Format, package: str) -> str:
    """Return the text of an export's predict.py, which imports the copy of tasks.data.encoding in its folder."""
    return PROGRAM.replace("PACKAGE", package).replace("LOAD_MODEL", inspect.getsource(format.load))
