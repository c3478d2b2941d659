"""The table of messages: each entry is what a library really says."""

import contextlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import config
from tasks.system import messages
from tests.tasks import mistakes

MISTAKES = {
    name: function for name, function in inspect.getmembers(mistakes, inspect.isfunction) if not name.startswith("_")
}


@pytest.fixture(scope="module")
def base(tmp_path_factory, empty_store):
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "empty.db").write_bytes(empty_store.read_bytes())
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_plain_words(base, monkeypatch, name):
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("PREFECT_HOME", str(base / "prefect"))
    folder = base / name
    folder.mkdir()
    with contextlib.chdir(folder), pytest.raises(Exception) as made:  # Of six libraries.
        MISTAKES[name](Path("."))
    entry, words = messages.find_message(made.value) or pytest.fail(f"{type(made.value).__name__}: {made.value}")
    assert entry.name == name
    assert "{" not in words
    assert words.endswith(f"({type(made.value).__name__}; --debug shows the traceback)")


def test_every_entry_has_its_mistake():
    assert sorted(entry.name for entry in messages.entries()) == sorted(MISTAKES)


def test_what_the_table_does_not_know_stays_as_it_is():
    assert messages.find_message(ValueError("something else")) is None


def test_a_cause_is_found_behind_what_wraps_it():
    error = RuntimeError("the stage failed")
    error.__cause__ = ValueError("Unknown image file format. One of JPEG, PNG required.")
    assert messages.find_message(error)[0].name == "tensorflow_no_image"


UNEXPECTED = """
from tasks.process.serve import unexpected
try: raise ValueError('Unknown image file format.')
except ValueError as error: print(unexpected('train', error))
"""
OWN = """
from types import SimpleNamespace
from tasks.modeling.own_code import blamed
from tasks.process import serve
def train(*given):
    with blamed("model.name = 'mine:build' cannot be built"): [][0]
serve._run = train
print(serve._answer(SimpleNamespace(name="train"), {}, True, None)["error"])
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (UNEXPECTED, "train failed: a file is not an image. To do: "),
        (OWN, "model.name = 'mine:build' cannot be built (IndexError: "),
    ],
)
def test_a_stage_says_it_and_debug_has_the_original(project, code, said):
    for debug in ("", "1"):
        done = subprocess.run(
            [sys.executable, "-c", f"import os; os.environ['STRATAGEM_DEBUG'] = '{debug}'\n{code}"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.startswith(said)
        assert ("Traceback" in done.stderr) == bool(debug)


SECTIONS = "|".join(name for name in config.Settings.model_fields if name != "register_") + "|register"
SETTING = re.compile(rf"(?<![\w./])({SECTIONS})\.([a-z_]+)(?![\w(./])")


def test_every_setting_in_a_hint_exists():
    kinds = (config.Tfds, config.ImageFolder, config.Arrays, config.Table)
    known = {".".join(key.split(".")[:2]) for key, _ in config.fields_of(config.Settings)}
    known |= {f"dataset.{key}" for kind in kinds for key in kind.model_fields}
    hints = {f"messages.yaml, {entry.name}": entry.do for entry in messages.entries()}
    root = config.project_root()
    for path in [*root.glob("tasks/**/*.py"), *root.glob("flows/**/*.py")]:
        for given in re.findall(r"--set [\"']?([a-z_]+\.[a-z_]+)[=. ]", path.read_text()):
            hints[f"{path.relative_to(root)}, {given}"] = given
    wrong = {place: m[0] for place, text in hints.items() for m in SETTING.finditer(text) if m[0] not in known}
    assert wrong == {}
