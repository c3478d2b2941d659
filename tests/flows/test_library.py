"""A wheel, installed beside the locked packages, without a checkout: `stratagem init`, the command, the library."""

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=1200, startup_timeout=600, iopub_timeout=60).execute()
nbformat.write(notebook, sys.argv[2])
"""
# A program with modules of its own by the names of ours, one imported before and one after.
SCRIPT = """
import os, pickle, sys
import tasks
import stratagem

environment, umask = dict(os.environ), os.umask(0o022)
summary = stratagem.run(settings={"train.epochs": 1, "register.minimum": 0}, project=sys.argv[1])
run = stratagem.load_run(project=sys.argv[1])
predicted = stratagem.predict(["digit.png", "broken.png"], summary.run_id, project=sys.argv[1])
refused = {}
for what, call in {
    "settings": lambda: stratagem.run(settings={"train.epochs": 0}, project=sys.argv[1]),
    "folder": lambda: stratagem.run(project="nowhere"),
    "project": lambda: stratagem.load_run(project="."),
    "run": lambda: stratagem.load_run("0000", project=sys.argv[1]),
    "model": lambda: stratagem.load_model("models:/other@champion", project=sys.argv[1]),
}.items():
    try:
        call()
    except stratagem.UserError as error:
        refused[what] = str(error)
import flows
assert (tasks.OWN, flows.OWN) == (True, True)
assert (dict(os.environ), os.umask(umask)) == (environment, 0o022)
assert not [name for name in sys.modules if name.startswith(("tasks.", "flows.", "prefect", "tensorflow", "keras"))]
assert pickle.loads(pickle.dumps(summary)) == summary
print(summary.model_dump_json())
print(run.model_dump_json())
import json
print(json.dumps([predicted, refused]))
"""
ACCURACY, FLOAT = re.compile(r"'test/accuracy': ([\d.]+)"), re.compile(r"float64\(([\d.]+)\)")

pytestmark = pytest.mark.slow


def build(what: str, source: Path, to: Path) -> Path:
    """Let the build backend make a wheel or an sdist, as pip does without a network."""
    to.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, f"build_{what}", to]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return to / done.stdout.splitlines()[-1]


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


@pytest.fixture(scope="module")
def source(project_template, tmp_path_factory) -> Path:
    """A checkout, of which an earlier build has left something."""
    folder = tmp_path_factory.mktemp("source") / "checkout"
    shutil.copytree(project_template, folder, symlinks=True)
    (folder / "build" / "lib" / "tasks").mkdir(parents=True)
    (folder / "build" / "lib" / "tasks" / "gone.py").touch()
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@dataclass
class Installed:
    """An environment with the wheel, and a project that its `stratagem init` made."""

    bin: Path
    project: Path
    start: Callable

    def do(self, *command: str | Path, cwd: Path | None = None, **more: str) -> "subprocess.CompletedProcess[str]":
        """Run a program of the environment; return how it ended, and what it said."""
        environment = self.environment | more
        started = self.start(str(self.bin / command[0]), *map(str, command[1:]), cwd=cwd or self.project, **environment)
        started.process.wait(1200)
        out, err = started.out.read_text(), started.err.read_text()
        return subprocess.CompletedProcess(command, started.process.returncode, out, err)

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": "", "PATH": f"{self.bin}{os.pathsep}/usr/bin{os.pathsep}/bin", "COLUMNS": "80"}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory, start) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # Of the locked packages. Files .pth in there, such as that of an editable install, are not read.
    locked = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "locked.pth").write_text("".join(f"{path}\n" for path in locked))
    pip = [sys.executable, "-m", "pip", "--python", folder / "venv" / "bin" / "python", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--disable-pip-version-check", wheel], check=True)
    made = Installed(folder / "venv" / "bin", folder / "my project", start)
    done = made.do("stratagem", "init", "my project", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "next: cd 'my project' && stratagem run\n" in done.stdout
    git = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    for command in (["add", "--all"], ["commit", "--quiet", "-m", "mine"]):
        subprocess.run([*git, *command], cwd=made.project, check=True)
    return made


def test_a_wheel_takes_one_name_and_the_one_of_an_sdist_is_the_same(source, wheel, tmp_path):
    names = names_in(wheel)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"stratagem"}
    code = [path.relative_to(ROOT) for folder in ("flows", "tasks") for path in ROOT.joinpath(folder).rglob("*.py")]
    data = [
        "tasks/system/messages.yaml",
        "tasks/operations/submission/kubernetes.yaml.j2",
        "tasks/operations/submission/slurm.sh.j2",
        "tasks/reports/report.html.j2",
        "recipes/mnist.yaml",
        "recipes/sweeps/digits.yaml",
    ]
    brought = ["__init__.py", "__main__.py", "params.yaml", "dvc.yaml", "prefect.yaml", "requirements.lock"]
    assert {f"stratagem/{name}" for name in (*code, *data, *brought)} <= set(names)
    assert not [name for name in names if re.search(r"tests|benchmarks|pyproject|\.dvc/|gone", name)]

    sdist = build("sdist", source, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    assert names_in(build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path / "again")) == names

    # An editable one leads to the checkout, by the names that it has there.
    with zipfile.ZipFile(build("editable", source, tmp_path / "editable")) as archive:
        finder = next(name for name in archive.namelist() if name.endswith("_finder.py"))
        mapping = re.search(r"^MAPPING.*? = (.*)$", archive.read(finder).decode(), re.MULTILINE)[1]
    assert mapping == repr({name: f"{source}/{name}" for name in ("flows", "stratagem", "tasks")})


@pytest.mark.exhaustive
def test_a_script_in_another_folder_with_modules_of_our_names(installed, tmp_path, digits_folder):
    import numpy as np
    from PIL import Image

    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "digit.png")
    (tmp_path / "broken.png").write_text("broken")
    (tmp_path / "script.py").write_text(SCRIPT)
    for folder in (tmp_path, installed.project):  # The project may have such modules, too.
        (folder / "tasks.py").write_text("OWN = True")
        (folder / "flows").mkdir()
        (folder / "flows" / "__init__.py").write_text("OWN = True")
    done = installed.do("python", "script.py", installed.project, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "  1/1 " in done.stderr, "what the command says is said"
    summary, run, (predicted, refused) = map(json.loads, done.stdout.splitlines())
    assert summary["run_id"] == run["run"]["run_id"]
    assert summary["data_version"] == "3c18f53eff0927cf84d227dcc2cdcf79"
    assert summary["model_version"] == "digits-convnet2/1"
    lineage = run["record"]["lineage"]
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=installed.project, capture_output=True, text=True, check=True
    )
    version = installed.do("stratagem", "--version").stdout.split()[1]
    assert (lineage["git_commit"], lineage["package_version"]) == (head.stdout.strip(), version)
    assert [one["error"] is None for one in predicted] == [True, False]
    assert Path(predicted[0]["source"]) == tmp_path / "digit.png"
    assert refused["settings"].startswith("train.epochs = 0: ")
    assert refused["folder"] == "project = 'nowhere': no such folder. `stratagem init FOLDER` creates a project"
    assert refused["project"].startswith("no project here: ")
    assert "0000" in refused["run"]
    assert refused["model"].startswith("unknown model 'models:/other@champion'")
    assert "error: " not in done.stderr, "whoever gets an error tells it"
    page = (installed.project / run["record"]["folder"] / "report" / "report.html").read_text()
    assert f"stratagem {version}" in page
    with contextlib.closing(sqlite3.connect(installed.project / "mlruns" / "mlflow.db")) as store:
        tags = store.execute("SELECT value FROM tags WHERE key = 'stratagem_version'").fetchall()
    assert tags == [(version,)]
    for asked in (["runs", "show", "latest"], ["trace", summary["run_id"]]):
        assert f"stratagem {version}" in " ".join(installed.do("stratagem", *asked).stdout.split())

    asked = ["python", "-m", "stratagem", "stage", "locate", "models:/digits-convnet2@champion"]
    done = installed.do(*asked, TMPDIR=str(tmp_path))
    assert Path(json.loads(done.stdout.splitlines()[-1])["keras_file"]).is_file()


def text_of(output: dict) -> str:
    return output.get("text") or output.get("data", {}).get("text/plain", "")


@pytest.mark.exhaustive
def test_a_notebook(installed, tmp_path):
    import nbformat

    done = installed.do("python", "-c", EXECUTE, ROOT / "docs" / "library.ipynb", tmp_path / "executed.ipynb")
    assert done.returncode == 0, done.stderr
    notebook = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    told = ["".join(map(text_of, one.outputs)) for one in cells]
    assert "'test/accuracy': " in told[0]
    assert "  3/3 " in told[0], "what the command says shows below the cell"
    assert "'finished'" in told[1]
    evaluated, computed = (re.search(pattern, text)[1] for pattern, text in ((ACCURACY, told[0]), (FLOAT, told[2])))
    assert f"{float(computed):.4f}" == f"{float(evaluated):.4f}", "the model that was evaluated is loaded"
    assert "'prediction_2'" in told[3]
    assert told[4].startswith("train.epochs = 0: ")
