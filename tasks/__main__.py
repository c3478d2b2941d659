"""`python -m tasks STAGE`: what DVC and child processes call.

python -m tasks check [RECIPE] [--set section.key=value]...      whether a dataset can be fetched
python -m tasks download NAME           the stages of data/<name>/dvc.yaml
python -m tasks prepare NAME
python -m tasks own_code [RECIPE] [--set section.key=value]...   the stages of the root's dvc.yaml
python -m tasks train [RECIPE] [--set section.key=value]...
python -m tasks evaluate [RECIPE] [--set section.key=value]...
python -m tasks predict REQUEST         writes what a model makes of raw inputs, as a JSON file asks
python -m tasks serve_model REQUEST     serves a model on 127.0.0.1
python -m tasks report RUN              writes the page of a run again
python -m tasks reproduced RUN          tells MLflow which run it was trained to reproduce, and whether it did
python -m tasks reconcile               ends the MLflow runs of processes that were killed
python -m tasks versions                tells which versions of models are registered in MLflow, as JSON lines
python -m tasks sync [FOLDER]           brings runs to the MLflow store of MLFLOW_TRACKING_URI
python -m tasks devices                 tells which devices TensorFlow sees
python -m tasks rollback MODEL          moves the alias `champion` back
python -m tasks guard COMMAND...         runs a command, and ends it when standard input closes
python -m tasks serve                   JSON lines on standard input, an answer each on standard output
python -m tasks assist                  the same for a worker that is not the chief: it checks, trains, evaluates
python -m tasks tf_server               a worker or a parameter server: TensorFlow's server, which the chief gives work
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

from tasks import config, dvc_stages, errors, records
from tasks.errors import StratagemError, UserError
from tasks.process import guard, serve
from tasks.process.environment import keep_private
from tasks.process.imports import import_quietly

STAGES = (
    "check", "download", "prepare", "own_code", "train", "evaluate", "report", "reproduced", "reconcile", "rollback",
    "versions", "devices", "sync", "serve", "assist", "tf_server", "predict", "serve_model",
)  # fmt: skip


def main() -> None:
    """Run one stage, and end with its exit code."""
    if sys.argv[1:2] == ["guard"]:
        sys.exit(guard.run_guarded(sys.argv[2:]))
    keep_private()
    parser = argparse.ArgumentParser(prog="python -m tasks", description="Run one stage; `stratagem` runs them all.")
    parser.add_argument("stage", choices=[*STAGES])
    parser.add_argument("name", nargs="?", metavar="NAME|RECIPE|RUN|MODEL|FOLDER")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", dest="overrides")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _terminate)
    if os.environ.get("STRATAGEM_ERROR"):
        guard.when_input_closes(lambda: os._exit(1))
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
        from tasks.report import page

        page.write(runs.find(name))
    elif stage == "reproduced":
        from tasks import tracking

        tracking.log_reproduction(name or "")
    elif stage == "reconcile":
        from tasks import tracking

        for ended in tracking.end_crashed():
            print(ended.model_dump_json())
    elif stage == "versions":
        from tasks import tracking

        for version in tracking.list_versions():
            print(version.model_dump_json())
    elif stage == "sync":
        from tasks import tracking

        print(tracking.sync(Path(name) if name else None).model_dump_json())
    elif stage == "devices":
        import tensorflow as tf

        print(*(device.name for device in tf.config.list_physical_devices()))
    elif stage == "rollback":
        from tasks import tracking

        with tracking.registering():
            print(tracking.rollback(name or "").model_dump_json())
    elif stage == "predict":
        _predict(Path(name or ""))
    elif stage == "serve_model":
        import_quietly("tasks.serving")
        from tasks import serving

        serving.serve(records.load(records.ServingRequest, Path(name or "")), sys.stdout)
    elif stage == "check":
        dvc_stages.check(config.load(name, overrides).dataset)
    elif stage == "own_code":
        dvc_stages.own_code(config.load(name, overrides))
    elif stage == "train":
        dvc_stages.train(config.load(name, overrides))
    else:
        dvc_stages.evaluate(config.load(name, overrides))


def _predict(request: Path) -> None:
    import_quietly("tasks.predict")
    from tasks.predict import predict

    answers = sys.stdout
    sys.stdout = sys.stderr  # Libraries' own words.
    try:
        answer = predict(records.load(records.PredictionRequest, request))
    except BrokenPipeError:  # The reader of the predictions wants no more of them, as `head`.
        sys.exit(128 + signal.SIGPIPE)
    print(answer.model_dump_json(), file=answers)


def _terminate(number: int, frame: object) -> None:
    raise errors.Terminated


if __name__ == "__main__":
    main()
