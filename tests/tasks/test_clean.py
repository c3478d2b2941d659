"""The process that loads models back: it knows nothing of the project, and ends with the one that forked it."""

import json
import re
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

# As `python -m tasks serve` begins; then a model is registered whose class is in a file of the project's own.
SCRIPT = """
import json, os, sys, time
from pathlib import Path
from tasks.process import model_loader
from tasks.process.model_loader import Clean
from tasks.system.imports import import_quietly

import_quietly("tasks.process.tracked", "tasks.train", before_devices=model_loader.clean)
clean = model_loader.clean()
clean.get_ready()
sys.path.insert(0, sys.argv[1])
import keras, numpy as np
from tasks.system import files
from tasks.modeling import models
from tasks.tracking.models import log_model
from tasks.tracking.registry import model_place
from tasks.tracking.store import store_uri
from tasks.system.errors import StratagemError
from tests.tasks.registering import IMAGES, Trained

told = {}
trained = Trained("model.name=my_models:build", "model.options={units: 8}")
model = models.build(trained.settings.model, trained.prepared, "scale")
model.save(trained.training.final_model)
expected = model.predict(IMAGES, verbose=0)
features = {"image": Path("data/digits/prepared/test_images.npy").absolute()}

def ask(what, rows=None, **given):
    try:
        return clean.ask(what, features, rows, **given)
    except StratagemError as error:
        return str(error)

uri = log_model(trained.run, "own", trained.training.final_model, trained.prepared, 20, {})
given = {"place": model_place(uri), "tracking_uri": store_uri(), "encoded": False}
score = {"file": str(Path(trained.training.final_model).absolute()), "root": str(Path.cwd())}
told["without its code"] = ask("score", **score)
told["loaded back"] = float(abs(ask("load_back", [0, 4], **given) - expected[[0, 4]]).max())
told["scored"] = float(abs(ask("score", own_code="my_models", **score) - expected).max())
Path(given["place"].removeprefix("file://"), "data", "model.keras").write_bytes(b"no model")
told["damaged"] = ask("load_back", **given)
told["pid"], told["own_pid"] = clean._pid, os.getpid()
told["cwd"] = os.readlink(f"/proc/{clean._pid}/cwd")
os.kill(clean._pid, 9)
told["killed"] = [ask("score", **score), ask("score", **score)]
second = Clean()
told["left"] = second._pid
print(json.dumps(told), flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_process_that_knows_nothing_of_the_project(store, project, run):
    (block,) = re.findall(r"```python\n(# my_models.py\n.*?)```", Path("docs/own-model.md").read_text(), re.DOTALL)
    Path("my_models.py").write_text(block)
    checkout = str(Path(__file__).parents[2])
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu", "MLFLOW_DISABLE_TELEMETRY": "true"}
    ended = run([sys.executable, "-c", SCRIPT, checkout], env=environment)
    assert ended.returncode == -9, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["loaded back"] < 1e-5
    assert told["scored"] < 1e-5
    assert "Could not locate class 'Small'" in told["without its code"], "its file is not looked for"
    assert told["damaged"].startswith("ValueError: "), told["damaged"]
    assert told["cwd"] != str(project)
    assert told["killed"] == ["the process that loads models back has died"] * 2
    _, alive = psutil.wait_procs([p for p in psutil.process_iter() if p.pid in (told["pid"], told["left"])], 20)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == [], "the kernel ends it with its parent"
