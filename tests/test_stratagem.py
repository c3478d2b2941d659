"""`import stratagem`, without what it starts: tests/flows/test_library.py has that."""

import importlib.util
import pickle
import shutil
import sys
from pathlib import Path

import pandas
import pytest

import stratagem
from tasks import records
from tasks.system import errors

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The module as a wheel has it: a package, with tasks/ in it."""
    folder = tmp_path / "stratagem"
    folder.mkdir()
    shutil.copyfile(ROOT / "stratagem.py", folder / "__init__.py")
    (folder / "tasks").symlink_to(ROOT / "tasks")
    spec = importlib.util.spec_from_file_location("stratagem", folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "stratagem", module)
    spec.loader.exec_module(module)
    return module


def test_of_a_checkout_it_has_the_errors_and_records_that_all_have():
    assert stratagem.UserError is errors.UserError
    assert stratagem.RunSummary is records.RunSummary
    assert set(stratagem.__all__) == {name for name in stratagem.__all__ if callable(getattr(stratagem, name))}
    with pytest.raises(AttributeError, match="module 'stratagem' has no attribute 'annotations'"):
        _ = stratagem.annotations


def test_what_is_installed_leaves_the_modules_and_the_path_of_its_caller_alone(installed):
    modules, path = dict(sys.modules), sys.path[:]
    error = installed.UserError("a mistake")
    assert type(error) is not errors.UserError, "the caller's `tasks` is another one"
    changed = {name for name in {*modules, *sys.modules} if modules.get(name) is not sys.modules.get(name)}
    assert [name for name in changed if name.partition(".")[0] in ("flows", "tasks")] == []
    assert sys.path == path
    assert f"{type(error).__module__}.{type(error).__name__}" == "stratagem.UserError"
    record = installed.Change(kind="code", what="code", then=None, now=None, effect="matters")
    assert pickle.loads(pickle.dumps(record)) == record  # noqa: S301  # Our own.


@pytest.mark.parametrize(
    ("function", "given", "said"),
    [
        (
            "run",
            {"settings": ["train.epochs=1"]},
            r"settings = \['train.epochs=1'\]: must be .*Mapping\[str, .*\| None",
        ),
        ("run", {"recipe": 3}, r"recipe = 3: must be str \| pathlib.Path \| .*Sequence\[.*`help\(stratagem.run\)`"),
        ("run", {"resume": 5}, r"resume = 5: must be str \| None"),
        ("load_run", {"run": None}, "run = None: must be str"),
        ("load_model", {"project": ["a"]}, r"project = \['a'\]: must be str"),
        ("predict", {"inputs": pandas.DataFrame({"a": [1]})}, "inputs = .*: must be str"),
        ("predict", {"inputs": "a.png", "top_k": 0}, "top_k = 0: must be PositiveInt"),
    ],
)
def test_an_argument_of_another_type_is_refused(function, given, said):
    with pytest.raises(stratagem.UserError, match=f"^{said}"):
        getattr(stratagem, function)(**given)


def test_a_folder_without_a_project_is_refused_also_where_the_code_is_a_project(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(stratagem.UserError, match=f"no project here: neither {tmp_path} nor a folder above it"):
        stratagem.run(settings={"train.epochs": 0}, project=tmp_path)


def test_a_folder_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(stratagem.UserError, match="project = 'nowhere': no such folder"):
        stratagem.load_run(project="nowhere")
