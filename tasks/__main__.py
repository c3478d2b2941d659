"""`python -m tasks STAGE`: the entry point of DVC's stages and of our child processes.

Called by DVC:
    download NAME, prepare NAME                         the stages of data/<name>/dvc.yaml
    train, evaluate [RECIPE] [--set section.key=value]...   the stages of the root's dvc.yaml

Started by `process/child.py`, for a command that imports no framework itself:
    check [RECIPE] [--set section.key=value]...         refuses a dataset that cannot be fetched
    predict REQUEST         writes the predictions that a JSON file asks for
    serve_model REQUEST     serves a model on 127.0.0.1
    locate [MODEL]          prints where the files of a trained model are; without MODEL, those of the only champion
    fetch MODEL             copies a model that only MLflow has into TMPDIR, and prints where
    report RUN              writes the page of a run again
    reproduced RUN          records in MLflow which run this one reproduces, and whether it does
    reconcile               ends the MLflow runs of processes that were killed
    versions                prints the versions in MLflow's registry as JSON lines
    sync [FOLDER]           copies runs to the MLflow store of MLFLOW_TRACKING_URI
    devices                 prints the devices that TensorFlow sees
    rollback MODEL          moves the alias `champion` back to an earlier version, after loading it

Started by `process/child.py`, to answer requests (or, on other machines, by an engine: `process/remote_members.py`):
    serve                   the stage process, or a cluster's chief: JSON requests on standard input, one answer each
    assist                  the same for a worker that is not the chief: it checks, trains and evaluates
    tf_server               a worker or parameter server that runs TensorFlow's server for the chief
    load_back               loads models without the project's folder and modules

Started by `stratagem.py`, `process/child.py` and `flows/operate/`:
    guard COMMAND...        runs a command, and ends it when standard input closes
"""

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import config, records
from tasks.operations import dvc_stages
from tasks.process import model_loader, serve
from tasks.process.child import run_stage
from tasks.process.environment import keep_private
from tasks.system import errors, lifetime
from tasks.system.errors import StratagemError, UserError
from tasks.system.imports import import_quietly

if TYPE_CHECKING:
    from tasks.tracking.trained_models import TrainedModel


def main() -> None:
    """Run one stage, and end with its exit code."""
    if sys.argv[1:2] == ["guard"]:
        sys.exit(lifetime.run_guarded(sys.argv[2:]))
    keep_private()
    parser = argparse.ArgumentParser(prog="python -m tasks", description="Run one stage; `stratagem` runs them all.")
    parser.add_argument("stage", choices=[*STAGES])
    parser.add_argument("name", nargs="?", metavar="NAME|RECIPE|RUN|MODEL|FOLDER")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", dest="overrides")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminate)
    if os.environ.get("STRATAGEM_ERROR"):
        lifetime.when_input_closes(lambda: os._exit(1))
    try:
        STAGES[arguments.stage](arguments)
    except KeyboardInterrupt as interrupt:
        sys.exit(getattr(interrupt, "exit_code", 130))
    except Exception as error:
        failure = error if isinstance(error, StratagemError) else serve.unexpected(arguments.stage, error)
        if place := os.environ.get("STRATAGEM_ERROR"):
            Path(place).write_text(json.dumps(errors.to_json(failure)), encoding="utf-8")
        else:
            print(f"error: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)


def _make_data(given: argparse.Namespace) -> None:
    dvc_stages.make_data(given.stage, _name(given, "the name of a folder in data/"))


def _name(given: argparse.Namespace, what: str) -> str:
    if given.name is None:
        raise UserError(f"python -m tasks {given.stage}: give {what}")
    return str(given.name)


def _write_report(given: argparse.Namespace) -> None:
    from tasks import runs
    from tasks.reports import page

    page.write(runs.find_run(_name(given, "the id of a run")))


def _print_devices(given: argparse.Namespace) -> None:
    import tensorflow as tf

    print(*(device.name for device in tf.config.list_physical_devices()))


def _use_tracking(given: argparse.Namespace) -> None:
    """Run a stage that imports MLflow; what it finds is printed as one JSON record a line."""
    from tasks.tracking.copier import sync
    from tasks.tracking.lifecycle import end_crashed, log_reproduction
    from tasks.tracking.models import fetch_model
    from tasks.tracking.registry import list_versions

    if given.stage == "reproduced":
        log_reproduction(given.name)
    elif given.stage == "fetch":
        _print_place(fetch_model(given.name, os.environ["TMPDIR"]))
    elif given.stage == "sync":
        print(sync(Path(given.name) if given.name else None).model_dump_json())
    else:
        found: Iterable[records.Record] = end_crashed() if given.stage == "reconcile" else list_versions()
        for one in found:
            print(one.model_dump_json())


def _predict(given: argparse.Namespace) -> None:
    import_quietly("tasks.serving.predict")
    from tasks.serving.predict import predict

    try:
        with contextlib.redirect_stdout(sys.stderr):  # Libraries print there, too.
            answer = predict(records.load(records.PredictionRequest, Path(given.name or "")))
    except BrokenPipeError:  # The reader of the predictions, such as `head`, has closed the pipe.
        sys.exit(128 + signal.SIGPIPE)
    print(answer.model_dump_json())


def _serve_model(given: argparse.Namespace) -> None:
    import_quietly("tasks.serving.server")
    from tasks.serving import server

    server.serve(records.load(records.ServingRequest, Path(given.name or "")), sys.stdout)


def _locate(given: argparse.Namespace) -> None:
    from tasks.tracking import trained_models

    reference = given.name or trained_models.only_champion()
    found = trained_models.find_trained_model(reference)
    if found is not None:
        _print_place(found)
        return
    # MLflow needs the environment of a stage, but the caller owns the folder of the copy.
    print(run_stage("fetch", reference, environment={"TMPDIR": os.environ["TMPDIR"]}), end="")


def _roll_back(given: argparse.Namespace) -> None:
    import_quietly("tasks.register")
    from tasks.register import rollback

    print(rollback(given.name or "", model_loader.LOADER.ask).model_dump_json())


def _print_place(found: "TrainedModel") -> None:
    code = str(found.code) if found.code is not None else None
    print(json.dumps({"keras_file": str(found.keras_file), "module": found.module, "code": code}))


def _terminate(number: int, frame: object) -> None:
    raise errors.Terminated


STAGES: dict[str, Callable[[argparse.Namespace], object]] = {
    "download": _make_data,
    "prepare": _make_data,
    "train": lambda given: dvc_stages.run_train(given.name, given.overrides),
    "evaluate": lambda given: dvc_stages.run_evaluate(given.name, given.overrides),
    "check": lambda given: dvc_stages.run_check(config.load(given.name, given.overrides).dataset),
    "predict": _predict,
    "serve_model": _serve_model,
    "locate": _locate,
    "report": _write_report,
    "devices": _print_devices,
    "rollback": _roll_back,
    **dict.fromkeys(("fetch", "reproduced", "reconcile", "versions", "sync"), _use_tracking),
    "serve": lambda given: serve.serve(chief=True),
    "assist": lambda given: serve.serve(chief=False),
    "tf_server": lambda given: serve.run_tf_server(),
    "load_back": lambda given: model_loader.serve(serve.Answers().write),
}

if __name__ == "__main__":
    main()
