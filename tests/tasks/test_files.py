import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import tasks.process.child  # noqa: F401  The other user may not be able to import Python's own modules later.
from flows.cli.command import ending
from tasks import config
from tasks.runs.entries import find_runs
from tasks.runs.locks import remove_leftovers
from tasks.system import files
from tasks.system.errors import UserError


def test_a_file_is_replaced_whole_and_after_it_is_on_the_disk(tmp_path, monkeypatch):
    done, path = [], tmp_path / "one.json"
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("flushed") or fsync(descriptor))
    monkeypatch.setattr(os, "replace", lambda *names: done.append("renamed") or replace(*names))
    path.write_text("before")
    with files.replacing(path, ".json") as temporary:
        temporary.write_text("after")
        assert path.read_text() == "before"
        assert temporary.parent == tmp_path
        assert re.fullmatch(r"\.one\.json\.[0-9a-f]{8}\.partial\.json", temporary.name)
    assert done == ["flushed", "renamed"]
    assert path.read_text() == "after"
    with pytest.raises(UnicodeEncodeError), files.replacing(path) as temporary:
        temporary.write_text("half \ud800", encoding="utf-8")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("one.json", "after")]


def test_digests_are_those_of_the_bytes(tmp_path):
    (tmp_path / "file").write_bytes(b"bytes")
    assert files.digest(tmp_path / "file") == hashlib.sha256(b"bytes").hexdigest()
    assert files.digest(tmp_path / "file", "md5") == hashlib.md5(b"bytes").hexdigest()


def test_a_scratch_folder_is_removed_by_whoever_made_it_and_after_a_kill(tmp_path):
    with files.scratch(tmp_path, ".scratch.") as folder:
        assert files.remove_scratch([folder], tmp_path) == [], "a process is at work in it"
        killed = shutil.copytree(folder, tmp_path / ".scratch.killed")
        assert files.remove_scratch([killed], tmp_path) == [killed]
    assert list(tmp_path.iterdir()) == []


def test_leftovers_are_only_what_this_program_made_in_the_project(project, tmp_path):
    outside = tmp_path / "outside"
    (outside / ".scratch.marked").mkdir(parents=True)
    (outside / ".scratch.marked" / files.MARK).touch()
    (project / "data" / "elsewhere").symlink_to(outside)
    own = project / "data" / "digits" / ".scratch.mine"
    own.mkdir()
    (project / "data" / "digits" / ".prepared.link").symlink_to(outside / ".scratch.marked")
    killed = project / "data" / "noise" / ".prepared.killed"
    killed.mkdir(parents=True)
    (killed / files.MARK).touch()
    before = sorted(outside.rglob("*"))
    assert remove_leftovers() == [killed]
    assert sorted(outside.rglob("*")) == before, "not even a lock"
    assert own.is_dir()
    assert not killed.exists()


@pytest.fixture
def forbidden():
    """A project whose mlruns/runs this process may not enter: as another user where it is root, else by its mode."""
    umask = os.umask(0o022)  # An earlier test's command may have set 077.
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders let no other user through.
        folder = Path(place)
        (folder / "mlruns" / "runs").mkdir(parents=True)
        (folder / "mlruns" / "runs" / "run.json").touch()
        (folder / "mlruns" / "mlflow.db").touch()
        (folder / "params.yaml").touch()
        (folder / ".dvc").mkdir()
        folder.chmod(0o755)
        own = os.geteuid()
        for path, mode in ((folder / "mlruns" / "runs", 0o700), (folder / "mlruns" / "mlflow.db", 0o600)):
            path.chmod(mode if own == 0 else 0)
        if own == 0:
            os.seteuid(12345)
        try:
            with contextlib.chdir(folder):
                yield folder
        finally:
            os.umask(umask)
            os.seteuid(own)
            (folder / "mlruns" / "runs").chmod(0o700)


def test_what_belongs_to_another_user_is_said_to(forbidden):
    as_root = os.getuid() == 0
    whose = "belongs to the user root, and this is user 12345. Run the command as" if as_root else "change the mode"
    database, run = forbidden / "mlruns" / "mlflow.db", forbidden / "mlruns" / "runs" / "run.json"
    wrapped = RuntimeError("a library's own words")
    try:
        run.read_text()
    except PermissionError as error:
        wrapped.__cause__ = error
    assert re.match(f"{run} cannot be read or written .*{whose}", str(files.find_no_access(wrapped)))
    with pytest.raises(UserError, match=f"{database} cannot be read or written"):
        files.refuse_no_access(database)
    with pytest.raises(UserError, match=f"{run} cannot be read or written"):
        files.refuse_no_access(run)
    files.refuse_no_access(forbidden / "mlruns" / "none")
    assert files.find_no_access(PermissionError("no file of that")) is None


def test_runs_of_another_user_are_not_no_runs(forbidden):
    with pytest.raises(UserError, match=r"mlruns/runs cannot be read or written"):
        find_runs("runs")


def test_a_command_of_another_user_ends_with_one_message(forbidden, capsys):
    with pytest.raises(SystemExit) as ended, ending():
        (forbidden / "mlruns" / "runs" / "run.json").read_text()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {forbidden / 'mlruns' / 'runs' / 'run.json'} cannot be read or written")
    assert message.count("\n") == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from tasks.operations import model_use
from tasks.tracking import trained_models

def killed(request):
    Path(request.to).write_text("half of it")
    os.kill(os.getpid(), signal.SIGKILL)

trained_models.find_trained_model = lambda reference: None
model_use.stages.predict = killed
model_use.predict(["in.csv"], "digits@champion", Path(sys.argv[1]))
"""


AT_THE_LIMIT = """
import httpx, resource, sqlite3
from tasks.system import messages

resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

def in_a_file():
    with open("large", "wb", buffering=0) as file:
        while True:
            file.write(bytes(15_000))

def in_a_database():
    with sqlite3.connect("large.db") as database:
        database.execute("CREATE TABLE a (b)")
        database.execute("INSERT INTO a VALUES (?)", [bytes(50_000)])

def of_prefects_server():
    httpx.Response(500, request=httpx.Request("POST", "http://127.0.0.1:4200/api/flows/")).raise_for_status()

for write in (in_a_file, in_a_database, of_prefects_server):
    try:
        write()
    except Exception as error:
        print(messages.explain(error, "out"))
"""


def test_a_limit_on_the_size_of_files_is_named(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(config.code_root())}
    said = subprocess.check_output([sys.executable, "-c", AT_THE_LIMIT], cwd=tmp_path, env=environment, text=True)
    one = (
        "out cannot be written (File too large). Raise the file-size limit (ulimit -f), and run the same command again"
    )
    assert said.splitlines() == [one] * 3


EXPORTING = """
import os, signal, sys
from pathlib import Path
from tasks.serving import export

with export._new_folder(Path(sys.argv[1])) as new:
    (new / "model").write_text("half of it")
    os.kill(os.getpid(), signal.SIGKILL)
"""
STARTING = """
import os, subprocess, sys
from tasks.system import temporary

environment = os.environ | {"TMPDIR": str(temporary.folder())}
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], env=environment)
os.kill(os.getpid(), 9)
"""


# A child process of the command writes an export.
HALF_WRITTEN = {
    "prediction": ([KILLED], "o.csv", ".o.csv.0123abcd.partial", r"\.o\.csv\.[0-9a-f]{8}\.partial"),
    "export": ([STARTING, EXPORTING], "model", ".export.mine.partial", r"\.export\..+"),
}


@pytest.mark.parametrize(("code", "name", "own", "half"), HALF_WRITTEN.values(), ids=HALF_WRITTEN)
def test_the_next_command_removes_the_output_that_a_killed_one_left_half_written(
    project, tmp_path, code, name, own, half
):
    """In a folder of the user's, which has other files with such names."""
    out, mine = tmp_path / "out" / name, tmp_path / "out" / own
    out.parent.mkdir()
    mine.write_text("the user's own")
    Path("in.csv").write_text("a\n1\n")
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    killed = subprocess.run([sys.executable, "-c", *code, str(out)], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = set(out.parent.iterdir()) - {mine}
    assert re.fullmatch(half, left.name)
    told = "from tasks.system import temporary; print(*temporary.half_written()); temporary.folder()"
    after = subprocess.run([sys.executable, "-c", told], env=environment, check=True, capture_output=True, text=True)
    assert after.stdout == f"{left}\n", "as doctor lists it"
    assert list(out.parent.iterdir()) == [mine]
