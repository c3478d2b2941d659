"""Loads models back on a CPU to compare their outputs with those of their evaluation.

The stage process clears its session and loads models that consist of Keras' own layers. A child process without the
project's folder and modules loads all others, such as models with the user's own code. It starts before the evaluation,
because it imports the framework, which takes 4 to 5 s of processor time.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from tasks import config
from tasks.records import TrainingResult
from tasks.strategies.environment import stage_command, stage_environment
from tasks.system import lifetime
from tasks.system.child import Child, Message
from tasks.system.errors import StratagemError, last_line
from tasks.system.imports import import_quietly


class ModelLoader:
    """Computes the outputs of models; close it to end its child process, if it has one."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._only_keras = False

    def get_ready(self, settings: config.Settings, training: TrainingResult) -> None:
        """Choose the process that loads a run's models back, start the child process if necessary, and return at
        once."""
        files = [config.project_root() / file for file in {training.final_model, training.best_model}]
        self._only_keras = settings.strategy.cluster is None and all(map(_names_only_keras, files))
        if not self._only_keras:
            self._start()

    def ask(self, what: str, features: Mapping[str, Path], rows: list[int] | None = None, **arguments: Any) -> Any:
        """Return the result of one of ``_functions`` for rows of prepared features, (n, num_outputs).

        Args:
            what: the name of the function.
            features: the absolute paths of the arrays.
            rows: the numbers of the rows; all if not given.
            arguments: the function's other arguments, as JSON values.

        Raises:
            StratagemError: the function failed, or the process died.
        """
        request = {"what": what, "features": {name: str(path) for name, path in features.items()}, "rows": rows}
        request["arguments"] = arguments
        # A champion's file ("score") may name classes that the run's files do not.
        if self._only_keras and what == "load_back":
            return _compute_here(request)
        child = self._start()
        with tempfile.TemporaryDirectory() as folder:
            to = Path(folder) / "outputs.npy"
            child.send({**request, "to": str(to)})
            try:
                answer = next(child.messages(), None)
            except BaseException:  # A late answer must not be mistaken for the next one.
                child.kill()
                raise
            if answer is None:
                raise StratagemError(f"the process that loads models back died ({child.death})")
            if "error" in answer:
                raise StratagemError(answer["error"])
            return np.load(to)

    def _start(self) -> Child:
        if self._child is None or not self._child.alive:
            self.close()
            backend = os.environ.get("KERAS_BACKEND", "tensorflow")
            environment = {"KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
            everything = {**stage_environment(None), **environment}
            root = config.project_root()
            self._child = Child(stage_command("load_back"), everything, cwd=root, stderr=subprocess.DEVNULL)
        return self._child

    def close(self) -> None:
        """End the child process."""
        if self._child is not None:
            self._child.close()
            self._child = None


LOADER = ModelLoader()
"""The loader of this process."""


def _names_only_keras(file: Path) -> bool:
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        text = archive.read("config.json").decode("utf-8")
    modules = re.findall(r'"module": "([^"]*)"', text)
    return all(module.partition(".")[0] == "keras" for module in modules)


def _compute_here(request: Message) -> Any:
    """Load a model back in this process, without the other models' state and registered classes."""
    import keras

    keras.backend.clear_session()  # This also resets the dtype policy and the distribution.
    known = keras.saving.get_custom_objects()
    registered = dict(known)
    known.clear()
    try:
        with keras.device("cpu:0"):
            return _compute(request, _functions())
    finally:
        known.update(registered)


def serve(write: Callable[[Message], None]) -> None:
    """Answer the requests of ``ModelLoader.ask`` in the child process, until standard input closes."""
    requests: SimpleQueue[str] = SimpleQueue()
    lifetime.when_input_closes(lambda: os._exit(0), requests.put)
    lifetime.ignore_signals()
    import_quietly("tasks.tracking.models", "tasks.serving.outputs", "mlflow.pyfunc", "mlflow.keras.load")
    functions = _functions()
    _forget_project()
    while True:
        request = json.loads(requests.get())
        try:
            np.save(request["to"], _compute(request, functions))
            write({})
        except StratagemError as error:
            write({"error": str(error)})


def _functions() -> dict[str, Callable[..., Any]]:
    """Return the functions that load models, by name; each takes a mapping of arrays as ``features``."""
    from tasks.serving import outputs
    from tasks.tracking import models

    return {"load_back": models.predict, "score": outputs.of_keras_file}


def _compute(request: Message, functions: Mapping[str, Callable[..., Any]]) -> Any:
    try:
        arrays = {name: np.load(path, mmap_mode="r") for name, path in request["features"].items()}
        if request["rows"] is not None:
            arrays = {name: np.asarray(array[request["rows"]]) for name, array in arrays.items()}
        return functions[request["what"]](features=arrays, **request["arguments"])
    except StratagemError:  # For example, a file was changed.
        raise
    except Exception as error:
        if os.environ.get("STRATAGEM_DEBUG"):
            raise StratagemError(traceback.format_exc()) from None
        raise StratagemError(last_line(error)) from None


def _forget_project() -> None:
    """Hide the project's folder and modules from this process, because a model server does not have them."""
    root = Path(__file__).resolve().parents[2]
    left = {root, Path.cwd()}
    os.chdir(tempfile.gettempdir())
    sys.path[:] = [path for path in sys.path if path and Path(path).resolve() not in left]
    # Editable installations.
    sys.meta_path[:] = [one for one in sys.meta_path if not getattr(one, "__module__", "").startswith("__editable__")]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tasks", "flows")]:
        del sys.modules[name]
