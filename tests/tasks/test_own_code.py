from pathlib import Path

import pytest

from tasks import config
from tasks.modeling import own_code
from tasks.system.errors import UserError

FILES = {
    "single.py": "import numpy, layers.dense\nraise RuntimeError('nothing is imported')\n",
    "layers/__init__.py": "",
    "layers/dense.py": "from . import shared\nfrom layers.inner import deep\n",
    "layers/shared.py": "",
    "layers/inner/__init__.py": "",
    "layers/inner/deep.py": "def late():\n    import late_one\n",
    "layers/unused.py": "",
    "late_one.py": "",
    "bare/model.py": "",
    "broken.py": "def\n",
}
IMPORTED = {name for name in FILES if name not in ("layers/unused.py", "bare/model.py", "broken.py")}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("single:build", IMPORTED),
        ("layers.dense:build", IMPORTED - {"single.py"}),
        ("bare.model:build", {"bare/model.py"}),
        ("broken:build", {"broken.py"}),
        ("convnet2", set()),
        ("json:build", set()),
        ("not_there:build", set()),
    ],
)
def test_the_files_that_a_model_of_the_users_needs(project: Path, model: str, expected: set[str]) -> None:
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    assert {path.as_posix() for path in own_code.files(model)} == expected


@pytest.mark.parametrize("file", ["tasks.py", "random.py", "tasks/models.py"])
def test_a_module_of_a_name_that_is_taken_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    (tmp_path / ".dvc").mkdir()
    for path in ("params.yaml", file):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = file.removesuffix(".py").replace("/", ".")
    with pytest.raises(UserError, match=f"model.name = '{name}:build': the name {name.partition('.')[0]} is taken"):
        own_code.load(f"{name}:build", "model.name")


OVERRIDES = {
    "model.name": "mine.models:build", "optimizer.kind": "mine.parts:Lion", "schedule.kind": "mine.parts:Step",
    "input.augmentation.custom": "mine.parts:rows", "train.loss": "mine.losses:loss", "dataset.name": "mine.data:Pairs",
    "train.callbacks": ["mine.parts:First", {"mine.parts:Second": {"every": 2}}],
    "train.metrics": ["mine.metrics:first"], "register.metric": "test/mine.metrics:second",
    "checkpoint.monitor": "validation/mine.metrics:third",
    "train.early_stopping": {"monitor": "validation/mine.metrics:fourth", "patience_epochs": 1},
}  # fmt: skip


def test_all_code_that_settings_name_is_found(project: Path) -> None:
    assert own_code.named_in(config.load()) == {}
    found = own_code.named_in(config.load(overrides=OVERRIDES))
    assert set(found) == {
        "mine.models:build", "mine.losses:loss", "mine.data:Pairs", "mine.parts:Lion", "mine.parts:Step",
        "mine.parts:First", "mine.parts:Second", "mine.parts:rows",
        *(f"mine.metrics:{name}" for name in ("first", "second", "third", "fourth")),
    }  # fmt: skip
    for name, key in found.items():
        with pytest.raises(UserError, match=rf"{key} = '{name}': a flow run may not name code"):
            own_code.check_allowed([(key, name)], "a flow run")


def test_no_other_setting_takes_code(project: Path) -> None:
    """A new one belongs into `named_in`, and above."""
    schema, found = config.Settings.model_json_schema(), set()
    for section, properties in schema["$defs"].items():
        for key, value in properties.get("properties", {}).items():
            if r":\\w+$" in repr(value):
                found.add((section, key))
    assert found == {
        ("Augmentation", "custom"), ("Checkpoint", "monitor"), ("Dataset", "builder"), ("EarlyStopping", "monitor"),
        ("OwnOptimizer", "kind"), ("OwnSchedule", "kind"), ("Register", "metric"), ("Train", "callbacks"),
        ("Train", "loss"), ("Train", "metrics"),
    }  # fmt: skip
    assert "pattern" not in schema["$defs"]["Model"]["properties"]["name"], "it has a check of its own"


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        (None, True),
        ("", True),
        ("others my", True),
        ("my.models.deep", True),
        ("my.models", False),
        ("others my.models", False),
        ("*", False),
    ],
)
def test_a_module_is_allowed_by_its_name(monkeypatch: pytest.MonkeyPatch, allowed: str | None, refused: bool) -> None:
    monkeypatch.delenv(own_code.VARIABLE, raising=False)
    if allowed is not None:
        monkeypatch.setenv(own_code.VARIABLE, allowed)
    if refused:
        others = f"{allowed} " if allowed else ""
        with pytest.raises(UserError, match=f"STRATAGEM_OWN_CODE='{others}my.models'"):
            own_code.check_allowed([("model.name", "my.models:build")], "a flow run")
    else:
        own_code.check_allowed([("model.name", "my.models:build")], "a flow run")
