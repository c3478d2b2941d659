"""`python -m tasks STAGE`: the entry point of DVC's stages and of our child processes.

DVC calls:
    download NAME, prepare NAME                         the stages of data/<name>/dvc.yaml
    train, evaluate [RECIPE] [--set section.key=value]...   the stages of the root's dvc.yaml

The library (`stratagem.py`) calls:
    locate [MODEL]          prints the paths of a trained model's files; without MODEL, those of the only champion

`Child` in `system/child.py` (on other machines an engine, see `strategies/engines/remote_members.py`) starts processes
that answer requests, which are JSON lines on standard input; `process/stages.py` is their table:
    serve                   the stage process, or a cluster's chief
    assist                  a worker that is not the chief: it checks, trains and evaluates
    call                    one request: ends with its answer
    tf_server               a worker or parameter server that runs TensorFlow's server for the chief
    load_back               loads models without the project's folder and modules
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tasks.system import errors, lifetime
from tasks.system.errors import StratagemError, UserError


def main() -> None:
    """Run one stage, and end with its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Nothing has begun: Ctrl-C need not wait for the imports.
    from tasks.process.child import set_up_process

    set_up_process()
    parser = argparse.ArgumentParser(prog="python -m tasks", description="Run one stage; `stratagem` runs them all.")
    parser.add_argument("stage", choices=[*ENTRIES])
    parser.add_argument("name", nargs="?", metavar="NAME|RECIPE|RUN|MODEL|FOLDER")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", dest="overrides")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, errors.terminate)
    if os.environ.get("STRATAGEM_ERROR"):
        lifetime.when_input_closes(lambda: os._exit(1))
    try:
        ENTRIES[arguments.stage](arguments)
    except KeyboardInterrupt as interrupt:
        sys.exit(getattr(interrupt, "exit_code", 130))
    except Exception as error:
        from tasks.process.serve import unexpected

        failure = error if isinstance(error, StratagemError) else unexpected(arguments.stage, error)
        if place := os.environ.get("STRATAGEM_ERROR"):
            Path(place).write_text(json.dumps(errors.to_json(failure)), encoding="utf-8")
        else:
            print(f"error: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)


def _run_for_dvc(given: argparse.Namespace) -> None:
    from tasks.operations import dvc_stages

    signal.signal(signal.SIGINT, signal.default_int_handler)
    if given.stage == "train":
        dvc_stages.run_train(given.name, given.overrides)
    elif given.stage == "evaluate":
        dvc_stages.run_evaluate(given.name, given.overrides)
    else:
        if given.name is None:
            raise UserError(f"python -m tasks {given.stage}: name a folder in data/")
        dvc_stages.make_data(given.stage, given.name)


def _serve(given: argparse.Namespace) -> None:
    """Answer the requests of the process that started this one."""
    from tasks.process import serve

    if given.stage == "load_back":
        from tasks.serving import model_loader

        model_loader.serve(serve.Answers().write)
    elif given.stage == "tf_server":
        serve.run_tf_server()
    else:
        serve.serve(given.stage)


def _locate(given: argparse.Namespace) -> None:
    from tasks.process import stages
    from tasks.tracking import trained_models

    if trained_models.is_registered(given.name):  # MLflow has the files, and its import needs a stage's environment.
        places = stages.fetch_model(address=given.name, folder=os.environ["TMPDIR"])
    else:
        places = trained_models.find_trained_model(given.name).places
    print(json.dumps(places))


ENTRIES: dict[str, Callable[[argparse.Namespace], object]] = {
    **dict.fromkeys(("download", "prepare", "train", "evaluate"), _run_for_dvc),
    "locate": _locate,
    **dict.fromkeys(("serve", "assist", "call", "tf_server", "load_back"), _serve),
}

if __name__ == "__main__":
    main()
