"""`python -m tasks`: what DVC calls."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tasks import config
from tasks.process import stages
from tasks.system import errors


def test_a_users_mistake_is_one_message(project, run, tmp_path):
    arguments, message = ["train", "nosuch"], "unknown recipe 'nosuch'"
    command = [sys.executable, "-m", "tasks", *arguments]
    result = run(command)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    # Under DVC the message goes into a file, and from there to whoever started DVC and holds standard input open.
    told = tmp_path / "error.json"
    environment = os.environ | {"STRATAGEM_ERROR": str(told)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as stage:
        assert stage.wait(600) == 2
        assert stage.stderr.read() == ""
    assert message in str(errors.from_json(json.loads(told.read_text())))
    assert json.loads(told.read_text())["type"] == "UserError"


def test_an_unknown_stage_is_refused(project, run):
    result = run([sys.executable, "-m", "tasks", "trian"])
    assert result.returncode == 2
    assert "invalid choice: 'trian'" in result.stderr


def test_an_interrupt_during_the_imports_ends_a_process_without_a_traceback(project, run, tmp_path):
    (tmp_path / "pydantic.py").write_text("import os, signal\n\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    result = run([sys.executable, "-m", "tasks", "serve"], env={"PYTHONPATH": path})
    assert (result.returncode, result.stderr) == (-signal.SIGINT, "")


@pytest.mark.slow
def test_a_dataset_that_is_refused_is_one_message_without_tensorflows_own_lines(project, capfd):
    with pytest.raises(errors.UserError, match=r"dataset.name = 'div2k' cannot be trained on"):
        stages.check_source(dataset=config.load(None, ["dataset.name=div2k"]).dataset)
    assert capfd.readouterr() == ("", "")
