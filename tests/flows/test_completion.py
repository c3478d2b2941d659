"""What Tab completes, by the protocol between a shell and the command: what is typed so far goes in by variables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import main
from tasks import config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def complete(monkeypatch):
    """Return what a shell would be told of a line whose last word is being typed, in this project."""
    monkeypatch.chdir(ROOT)

    def told(line: str) -> list[str]:
        environment = {"_STRATAGEM_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        done = CliRunner().invoke(main.app, prog_name="stratagem", env={**environment, "_TYPER_COMPLETE_ARGS": line})
        assert done.exit_code == 0, done.output
        return [one.partition("\t")[0] for one in done.output.splitlines() if one]

    return told


@pytest.fixture
def ids(complete, tmp_path, monkeypatch):
    """Two runs of a project that has nothing else, by their folders."""
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "params.yaml").touch()
    made = [f"{number}" * 32 for number in (3, 4)]
    for number, one in enumerate(made):
        (tmp_path / "mlruns" / "runs" / one).mkdir(parents=True)
        os.utime(tmp_path / "mlruns" / "runs" / one, (number, number))
    monkeypatch.chdir(tmp_path)
    return made


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("stratagem recon", ["reconcile"]),
        ("stratagem run --if", ["--if-changed"]),
        ("stratagem run fashion-b", ["fashion-best"]),
        ("stratagem run --set checkpoint.every_s", ["checkpoint.every_steps=", "checkpoint.every_seconds="]),
        (
            "stratagem run --set strategy.kind=m",
            [f"strategy.kind={one}" for one in ("mirrored", "multi_worker", "model_parallel")],
        ),
        ("stratagem compare --strategies mirrored,one", ["mirrored,one_device"]),
        ("stratagem compare --strategies mirrored,mir", []),
        ("stratagem compare --loops fit,", ["fit,custom"]),
        ("stratagem sweep d", ["digits"]),
        ("stratagem data show d", ["digits"]),
        ("stratagem runs --strategy tp", ["tpu"]),
        ("stratagem runs --strat", ["--strategy"]),
        ("stratagem runs sh", ["show"]),
        ("stratagem export latest --format sa", ["savedmodel"]),
        ("stratagem doctor di", ["disk"]),
    ],
)
def test_a_word_is_completed_by_the_names_of_the_project(complete, line, wanted):
    assert complete(line) == wanted


@pytest.mark.parametrize("line", ["run --resume ", "evaluate ", "runs show ", "report ", "predict x.png --model "])
def test_runs_are_completed_the_newest_first(complete, ids, line):
    assert complete(f"stratagem {line}") == ["latest", *reversed(ids)]
    assert complete(f"stratagem {line}33") == ids[:1]


def test_every_key_of_the_settings_is_completed(complete):
    assert set(complete("stratagem run --set ")) == {f"{key}=" for key, _ in config.fields_of(config.Settings)}


def test_nothing_is_completed_where_nothing_can_be_read(complete, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert complete("stratagem run m") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_printed(monkeypatch, shell):
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    done = CliRunner().invoke(main.app, ["--show-completion"], prog_name="stratagem")
    assert done.exit_code == 0
    assert f"_STRATAGEM_COMPLETE=complete_{shell}" in done.output


@pytest.mark.slow
def test_nothing_heavy_is_imported_for_it():
    code = (
        "import atexit, sys\n"
        "heavy = {'tensorflow', 'keras', 'jax', 'mlflow', 'prefect', 'numpy', 'pandas', 'dvc', 'requests'}\n"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        "from flows.cli.main import app\n"
        "app(prog_name='stratagem')\n"
    )
    given = {
        "_STRATAGEM_COMPLETE": "complete_bash",
        "COMP_WORDS": "stratagem\nrun\n--set\ntrain.epo",
        "COMP_CWORD": "3",
    }
    typed = [sys.executable, "-c", code]
    done = subprocess.run(typed, cwd=ROOT, env=os.environ | given, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["train.epochs="]
    assert done.stderr.strip() == "[]"


@pytest.mark.slow
def test_bash_itself_completes_by_the_script(run):
    script = (
        "source <(stratagem --show-completion)\n"
        "COMP_WORDS=(stratagem run --set checkpoint.every_s) COMP_CWORD=3\n"
        "_stratagem_completion stratagem\n"
        'echo "${COMPREPLY[@]}"'
    )
    done = run(["bash", "-c", script], cwd=ROOT)
    assert done.stdout.split() == ["checkpoint.every_steps=", "checkpoint.every_seconds="], done.stderr
