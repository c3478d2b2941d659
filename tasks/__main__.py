"""`python -m tasks STAGE`: what DVC and child processes call.

python -m tasks check [RECIPE] [--set section.key=value]...      whether a dataset can be fetched
python -m tasks download NAME           the stages of data/<name>/dvc.yaml
python -m tasks prepare NAME
python -m tasks own_code [RECIPE] [--set section.key=value]...   the stages of the root's dvc.yaml
python -m tasks train [RECIPE] [--set section.key=value]...
python -m tasks evaluate [RECIPE] [--set section.key=value]...
python -m tasks predict REQUEST         writes what a model makes of raw inputs, as a JSON file asks
python -m tasks serve_model REQUEST     serves a model on 127.0.0.1
python -m tasks locate [MODEL]          tells where the files of a trained model are, the only champion's without MODEL
python -m tasks fetch MODEL             the same, of a copy in TMPDIR, where MLflow alone has the model
python -m tasks report RUN              writes the page of a run again
python -m tasks reproduced RUN          tells MLflow which run it was trained to reproduce, and whether it did
python -m tasks reconcile               ends the MLflow runs of processes that were killed
python -m tasks versions                tells which versions of models are registered in MLflow, as JSON lines
python -m tasks sync [FOLDER]           brings runs to the MLflow store of MLFLOW_TRACKING_URI
python -m tasks planned_sync [FOLDER]   tells what that would bring
python -m tasks devices                 tells which devices TensorFlow sees
python -m tasks rollback MODEL          moves the alias `champion` back to a version that it loads first
python -m tasks guard COMMAND...         runs a command, and ends it when standard input closes
python -m tasks serve                   JSON lines on standard input, an answer each on standard output
python -m tasks assist                  the same for a worker that is not the chief: it checks, trains, evaluates
python -m tasks tf_server               a worker or a parameter server: TensorFlow's server, which the chief gives work
"""

import argparse
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tasks import config, records
from tasks.operations import dvc_stages
from tasks.process import serve
from tasks.process.child import run_in_own_process
from tasks.process.environment import keep_private
from tasks.process.model_loader import Clean
from tasks.system import errors, lifetime
from tasks.system.errors import StratagemError, UserError
from tasks.system.imports import import_quietly

if TYPE_CHECKING:
    from tasks.tracking.trained_models import TrainedModel

OF_MLFLOW = ("reproduced", "reconcile", "versions", "fetch", "sync", "planned_sync")
STAGES = (
    "check", "download", "prepare", "own_code", "train", "evaluate", "report", "devices", "serve", "assist",
    "tf_server", "predict", "serve_model", "locate", "rollback", *OF_MLFLOW,
)  # fmt: skip


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
        _run(arguments.stage, arguments.name, arguments.overrides)
    except KeyboardInterrupt as interrupt:
        sys.exit(getattr(interrupt, "exit_code", 130))
    except Exception as error:
        failure = error if isinstance(error, StratagemError) else serve.unexpected(arguments.stage, error)
        if place := os.environ.get("STRATAGEM_ERROR"):
            Path(place).write_text(json.dumps(errors.to_json(failure)), encoding="utf-8")
        else:
            print(f"error: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)


def _run(stage: str, name: str | None, overrides: list[str]) -> None:
    if stage in ("serve", "assist"):
        serve.serve(chief=stage == "serve")
    elif stage == "tf_server":
        serve.run_tf_server()
    elif stage in ("download", "prepare"):
        if name is None:
            raise UserError(f"python -m tasks {stage}: give the name of a folder in data/")
        dvc_stages.make_data(stage, name)
    elif stage == "report":
        if name is None:
            raise UserError("python -m tasks report: give the id of a run")
        from tasks import runs
        from tasks.reports import page

        page.write(runs.find(name))
    elif stage in OF_MLFLOW:
        _ask_mlflow(stage, name or "")
    elif stage == "devices":
        import tensorflow as tf

        print(*(device.name for device in tf.config.list_physical_devices()))
    elif stage == "predict":
        _predict(Path(name or ""))
    elif stage == "locate":
        _locate(name)
    elif stage == "rollback":
        _roll_back(name or "")
    elif stage == "serve_model":
        import_quietly("tasks.serving.server")
        from tasks.serving import server

        server.serve(records.load(records.ServingRequest, Path(name or "")), sys.stdout)
    elif stage == "check":
        dvc_stages.check(config.load(name, overrides).dataset)
    elif stage == "own_code":
        dvc_stages.own_code(config.load(name, overrides))
    elif stage == "train":
        dvc_stages.train(config.load(name, overrides))
    else:
        dvc_stages.evaluate(config.load(name, overrides))


def _ask_mlflow(stage: str, name: str) -> None:
    """Tell MLflow something, or print what it says: a record a line."""
    from tasks import tracking

    if stage == "reproduced":
        tracking.log_reproduction(name)
    elif stage == "reconcile":
        for ended in tracking.end_crashed():
            print(ended.model_dump_json())
    elif stage == "versions":
        for version in tracking.list_versions():
            print(version.model_dump_json())
    elif stage == "fetch":
        _print_place(tracking.fetch_model(name, os.environ["TMPDIR"]))
    else:
        found = tracking.sync(Path(name) if name else None, only_look=stage == "planned_sync")
        print(found.model_dump_json())


def _predict(request: Path) -> None:
    import_quietly("tasks.serving.predict")
    from tasks.serving.predict import predict

    try:
        with contextlib.redirect_stdout(sys.stderr):  # Libraries' own words.
            answer = predict(records.load(records.PredictionRequest, request))
    except BrokenPipeError:  # The reader of the predictions wants no more of them, as `head`.
        sys.exit(128 + signal.SIGPIPE)
    print(answer.model_dump_json())


def _locate(reference: str | None) -> None:
    from tasks.tracking import trained_models

    reference = reference or trained_models.only_champion()
    found = trained_models.find(reference)
    if found is not None:
        _print_place(found)
        return
    # In the environment of a stage, which MLflow needs, but for the folder: the copy is the caller's.
    done = run_in_own_process("fetch", reference, environment={"TMPDIR": os.environ["TMPDIR"]})
    done.check_returncode()
    print(done.stdout, end="")


def _roll_back(name: str) -> None:
    forked: list[Clean] = []
    import_quietly("tasks.register", "tasks.serving.outputs", before_devices=lambda: forked.append(Clean()))
    from tasks.register import rollback

    print(rollback(name, forked[0].ask).model_dump_json())


def _print_place(found: "TrainedModel") -> None:
    code = str(found.code) if found.code is not None else None
    print(json.dumps({"keras_file": str(found.keras_file), "module": found.module, "code": code}))


def _terminate(number: int, frame: object) -> None:
    raise errors.Terminated


if __name__ == "__main__":
    main()
