"""The table of messages: each entry is what a library really says."""

import contextlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert messages.translate(made.value).endswith(f"({type(made.value).__name__}; the whole story: --debug)")


def test_every_entry_has_its_mistake():
    assert sorted(entry.name for entry in messages.entries()) == sorted(MISTAKES)
    assert len(MISTAKES) >= 40


def test_what_the_table_does_not_know_stays_as_it_is():
    assert messages.translate(ValueError("something else")) is None


def test_a_cause_is_found_behind_what_wraps_it():
    error = RuntimeError("the stage failed")
    error.__cause__ = ValueError("You must call `compile()` before using the model.")
    assert messages.find_message(error)[0].name == "keras_not_compiled"


def test_a_stage_says_it_and_debug_has_the_original(project):
    code = (
        "from tasks.process.serve import unexpected\n"
        "try: raise ValueError('You must call `compile()` before using the model.')\n"
        "except ValueError as error: print(unexpected('train', error))\n"
    )
    for debug in ("", "1"):
        done = subprocess.run(
            [sys.executable, "-c", f"import os; os.environ['STRATAGEM_DEBUG'] = '{debug}'\n{code}"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.startswith("train failed: the model has no loss and no optimizer yet. To do: ")
        assert ("Traceback" in done.stderr) == bool(debug)
