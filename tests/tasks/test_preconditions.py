"""What is refused before anything is started for a run."""

import re
import shutil
import sys

import pytest

from flows.cli import runs
from tasks import config
from tasks.operations import preconditions
from tasks.system.errors import UserError

pytestmark = pytest.mark.usefixtures("on_cpus")


# Each: the variable, its value, the strategy, what is refused.
CONTRADICTED = [
    ("KERAS_BACKEND", "tensorflow", ["strategy.kind=data_parallel"], "contradicts strategy.kind = 'data_parallel'"),
    ("KERAS_BACKEND", "jax", ["strategy.kind=mirrored"], "Unset KERAS_BACKEND, or set strategy.kind=data_parallel or"),
    ("KERAS_BACKEND", "torch", [], r"which trains on tensorflow\. Unset KERAS_BACKEND$"),
    ("TF_CONFIG", "{", ["strategy.kind=multi_worker"], r"TF_CONFIG = '\{': Invalid JSON"),
]


@pytest.mark.parametrize(("variable", "value", "overrides", "message"), CONTRADICTED)
def test_what_contradicts_a_strategy_is_refused_at_once(project, monkeypatch, variable, value, overrides, message):
    settings = config.load(None, overrides)
    preconditions.check_devices(settings)
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=message):
        preconditions.check_devices(settings)


def test_what_fits_is_not_refused(project, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setenv("all_proxy", "socks://h:1080")
    for overrides in ([], ["strategy.kind=mirrored"], ["strategy.kind=multi_worker", "strategy.launcher=local"]):
        preconditions.check_devices(config.load(None, overrides))


def test_a_strategy_on_jax_needs_jax(project, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)  # Python then finds no such module.
    preconditions.check_devices(config.load())
    with pytest.raises(UserError, match=r"strategy.kind = 'data_parallel' trains on JAX, which is not installed"):
        preconditions.check_devices(config.load(None, ["strategy.kind=data_parallel"]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.name", "nosuch.parts:build"),
        ("optimizer.kind", "nosuch:Thing"),
        ("schedule.kind", "nosuch:Thing"),
        ("train.loss", "nosuch:loss"),
        ("train.metrics", ["nosuch:f"]),
        ("train.callbacks", ["nosuch:Thing"]),
        ("input.augmentation.custom", "nosuch:f"),
    ],
)
def test_own_code_without_its_module_is_refused_before_anything_starts(project, key, value):
    settings = config.load(None, {key: value})
    with pytest.raises(UserError, match=rf"{key} = 'nosuch[.:].*': there is no module 'nosuch' in .* environment"):
        preconditions.check_settings(settings)
    preconditions.check_settings(config.load(None, {"model.name": "./nosuch.py:build"}))
    code = project.joinpath(*re.search(r"nosuch[.\w]*", str(value))[0].split(".")).with_suffix(".py")
    code.parent.mkdir(exist_ok=True)
    code.write_text("raise RuntimeError('it is not imported')")
    with pytest.raises(UserError, match=rf"{key} = 'nosuch[.:].*: nosuch[.\w]* has no function or class '\w+'"):
        preconditions.check_settings(settings)
    for text in ("def build(): ...\nf = loss = Thing = build", "from others import *"):
        code.write_text(text)
        preconditions.check_settings(settings)


@pytest.mark.parametrize("folder", ["data", "mlruns", ".dvc"])
def test_a_folder_that_cannot_be_written_is_named(project, folder):
    shutil.rmtree(project / folder)
    (project / folder).symlink_to("/proc/self")  # Nobody can make a file there, root neither.
    for check in (preconditions.check_writable, lambda: next(iter(runs.report("latest", open_page=False)))):
        with pytest.raises(UserError, match=rf"{folder} cannot be written \(.+\): make the project's folder writable"):
            check()
