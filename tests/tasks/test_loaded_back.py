"""Models are loaded back as on a machine that has no copy of the project."""

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.modeling import models
from tasks.serving.model_loader import ModelLoader
from tasks.system.errors import StratagemError
from tasks.tracking.models import log_model
from tasks.tracking.registry import model_place
from tasks.tracking.store import store_uri
from tests.tasks.registering import IMAGES, Trained


@pytest.fixture
def loader(store: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelLoader]:
    monkeypatch.syspath_prepend(project)
    loader = ModelLoader()
    yield loader
    loader.close()


def ask(loader: ModelLoader, what: str, rows: list[int] | None = None, **given: Any) -> Any:
    return loader.ask(what, {"image": Path("data/digits/prepared/test_images.npy").absolute()}, rows, **given)


def saved(trained: Trained) -> tuple[Any, dict[str, Any]]:
    """Save a new model as that of the run, and log it; return what it gives, and where it lies."""
    model = models.build(trained.settings.model, trained.prepared, "scale")
    for file in (trained.training.final_model, trained.training.best_model):
        model.save(file)
    trained.sign()
    uri = log_model(trained.run, "own", trained.training.final_model, trained.prepared, 20, {})
    place = {"place": model_place(uri), "tracking_uri": store_uri(), "encoded": False}
    return model.predict(IMAGES, verbose=0), place


def test_the_stage_process_loads_a_model_of_keras_layers_back_itself(loader):
    trained = Trained()
    expected, place = saved(trained)
    loader.get_ready(trained.settings, trained.training)
    assert abs(ask(loader, "load_back", [0, 4], **place) - expected[[0, 4]]).max() < 1e-5
    assert "MLFLOW_TRACKING_URI" not in os.environ, "where this process tracks is as before"
    assert not children()
    Path(place["place"].removeprefix("file://"), "data", "model.keras").write_bytes(b"no model")
    with pytest.raises(StratagemError, match=r"^the model: .*model\.keras is damaged or was changed"):
        ask(loader, "load_back", **place)


@pytest.mark.slow
def test_a_child_process_that_knows_nothing_of_the_project_loads_others_back(loader):
    (block,) = re.findall(r"```python\n(# my_models.py\n.*?)```", Path("docs/own-model.md").read_text(), re.DOTALL)
    Path("my_models.py").write_text(block)
    trained = Trained("model.name=my_models:build", "model.options={units: 8}")
    expected, place = saved(trained)
    loader.get_ready(trained.settings, trained.training)
    (child,) = children()
    score = {"file": str(Path(trained.training.final_model).absolute()), "root": str(Path.cwd())}
    with pytest.raises(StratagemError, match="Could not locate class 'Small'"):  # Its file is not looked for.
        ask(loader, "score", **score)
    assert abs(ask(loader, "load_back", [0, 4], **place) - expected[[0, 4]]).max() < 1e-5
    assert abs(ask(loader, "score", own_code="my_models", **score) - expected).max() < 1e-5
    Path(place["place"].removeprefix("file://"), "data", "model.keras").write_bytes(b"no model")
    with pytest.raises(StratagemError, match=r"^the model: .*model\.keras is damaged or was changed"):
        ask(loader, "load_back", **place)
    assert children() == [child]
    assert child.cwd() != str(Path.cwd())
    child.suspend()
    threading.Timer(1.0, child.kill).start()
    with pytest.raises(StratagemError, match=r"the process that loads models back died \(SIGKILL\)"):
        ask(loader, "score", **score)


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if one.cmdline()[-1:] == ["load_back"]]
