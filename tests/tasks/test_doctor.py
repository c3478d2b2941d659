"""Each check of the doctor on something that really is wrong."""

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from tasks import config, records, runs
from tasks.operations import doctor
from tasks.operations.doctor import Here, prefect_home, size
from tasks.records import RunStatus
from tasks.system.machine import free_ports
from tests.tasks.written_runs import write_run


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A Prefect home of the test's own, and nobody's server or proxy."""
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "KERAS_BACKEND", "TF_CONFIG", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect_home"))
    return tmp_path / "prefect_home"


@pytest.fixture
def look(project, home):
    """``look("git")`` is what a check finds that is not ok, as (level, text, mend)."""

    def look(name, level="error"):
        found = [one for one in doctor.examine([name]).findings if one.level != "ok"]
        assert [one.level for one in found] == [level], found
        assert found[0].mend
        return found[0].text, found[0].mend

    return look


def state_of(folder):
    return {
        str(path): (path.lstat().st_mtime_ns, path.lstat().st_size, path.lstat().st_mode) for path in folder.rglob("*")
    }


def test_a_new_project_is_well_and_nothing_is_written(project, home):
    write_run(1)
    before = state_of(project)
    health = doctor.examine()
    assert [one for one in health.findings if one.level == "error"] == []
    assert state_of(project) == before
    assert not home.exists()
    assert {one.check for one in health.findings} == set(config.names_of("operations/doctor"))


def test_the_worst_finding_is_that_of_all():
    ok, warning = (records.Finding(check="c", level=level, text="t") for level in ("ok", "warning"))
    assert records.Health(findings=(ok,)).worst == "ok"
    assert records.Health(findings=(warning, ok)).worst == "warning"


def test_python(project, look):
    text = (project / "pyproject.toml").read_text()
    (project / "pyproject.toml").write_text(
        text.replace('requires-python = ">=3.11,<3.14"', 'requires-python = ">=3.99"')
    )
    assert "wants >=3.99" in look("python")[0]


@pytest.mark.usefixtures("own_code")
def test_packages(project, look):
    with (project / "requirements.lock").open("a") as lock:
        lock.write("no-such-package-of-ours==1.0 \\\n    --hash=sha256:00\n")
        lock.write("windows-only-package==1.0 ; sys_platform == 'win32' \\\n    --hash=sha256:00\n")
    assert look("packages") == ("not installed: no-such-package-of-ours==1.0", "make setup")


@pytest.mark.usefixtures("own_code")
def test_packages_of_another_version(project, look):
    lock = (project / "requirements.lock").read_text()
    (project / "requirements.lock").write_text(
        lock.replace("\nrich==", "\nrich==0.1 #", 1).replace("rich==0.1 #", "rich==0.")
    )
    text, _ = look("packages", "warning")
    assert text.startswith("another version than the locked one: rich ")


@pytest.mark.usefixtures("own_code")
def test_packages_of_a_project_without_a_lock(project, look, tmp_path, code_in):
    """As `stratagem init` makes it: the installed package's lock counts, of which an extra may be missing."""
    lock = (project / "requirements.lock").read_text()
    (project / "requirements.lock").unlink(missing_ok=True)
    brought = tmp_path / "brought"
    brought.mkdir()
    code_in(brought)
    missing = "no-such-package-of-ours==1.0 \\\n    --hash=sha256:00\n"
    (brought / "requirements.lock").write_text(lock + missing)
    found = doctor.examine(["packages"]).findings
    assert [(one.level, one.text.endswith("that are installed, in its versions")) for one in found] == [("ok", True)]
    (brought / "requirements.lock").write_text(lock.replace("\nrich==", "\nrich==0.", 1))
    text, mend = look("packages", "warning")
    assert text.startswith("another version than the locked one: rich ")
    assert mend == f"pip install --no-deps --require-hashes -r {brought}/requirements.lock"


def test_settings(project, look):
    text = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(text.replace("epochs:", "epocs:", 1))
    text, mend = look("settings")
    assert "epocs" in text
    assert mend == "edit params.yaml"


def test_a_recipe(project, look):
    (project / "recipes" / "mine.yaml").write_text("train: {epochs: -1}\n")
    assert look("settings")[0].startswith("recipes/mine.yaml: train.epochs")


@pytest.mark.parametrize(
    ("check", "place"),
    [("settings", "params.yaml"), ("settings", "recipes/mine.yaml"), ("dvc", "data/digits/params.yaml"),
     ("dvc", "data/digits/dvc.yaml")],
)  # fmt: skip
def test_a_pipe_in_the_place_of_a_file(project, look, check, place):
    (project / place).unlink(missing_ok=True)
    os.mkfifo(project / place)
    text, _ = look(check)
    assert Path(place).parts[0] in text
    assert "no file" in text


@pytest.mark.parametrize(
    ("line", "file"), [("data/", "dvc.yaml"), ("/data/*", "dvc.yaml"), ("dvc.yaml", "dvc.yaml"), ("*.lock", "dvc.lock")]
)
def test_data_that_git_ignores(project, look, line, file):
    (project / ".gitignore").write_text(f"{line}\n")
    text, mend = look("dvc")
    assert text.startswith(f"git ignores data/digits/{file}")
    assert mend.startswith(f"git check-ignore -v data/digits/{file} shows the line")


def test_devices(look, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    text, mend = look("devices")
    assert "KERAS_BACKEND" in text
    assert "strategy.kind" in mend


@pytest.mark.parametrize(("number", "words"), [(0, "0 GPUs"), (1, "1 GPU"), (2, "2 GPUs")])
def test_devices_are_counted_in_words(project, home, gpus, machine_with_cores, number, words):
    gpus(number, None)
    machine_with_cores(1)
    assert doctor.examine(["devices"]).findings[0].text == f"1 processor core, {words}"


@pytest.mark.slow
def test_devices_of_tensorflow(project, home, gpus):
    health = doctor.examine(["devices"], with_devices=True)
    assert any("TensorFlow sees /physical_device:CPU:0" in one.text for one in health.findings)
    gpus(1, None)
    found = [one for one in doctor.examine(["devices"], with_devices=True).findings if one.level == "error"]
    assert any("the driver has 1 GPU, and TensorFlow sees 0: it trains on the processor" in one.text for one in found)
    (project / "tensorflow.py").write_text("raise ImportError('libcudart.so.12 is not there')\n")
    found = [one for one in doctor.examine(["devices"], with_devices=True).findings if one.level == "error"]
    assert ["libcudart.so.12 is not there" in one.text for one in found] == [True]


def test_memory(project, home):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))"
    command = f"{limit}; from flows.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "doctor", "memory", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    found = [one for one in json.loads(done.stdout)["findings"] if one["check"] == "memory" and one["level"] == "error"]
    assert [one["mend"] for one in found] == ["ulimit -v unlimited"]


@pytest.mark.parametrize(("option", "words"), [("size=64k", "0 MiB free"), ("size=3g,nr_inodes=50", "room for 4")])
def test_disk(look, project, mount_small, option, words):
    (project / "mlruns").mkdir(exist_ok=True)
    mount_small(project / "mlruns", option)
    assert words in look("disk")[0]


def test_access(project, look):
    shutil.rmtree(project / "mlruns", ignore_errors=True)
    (project / "mlruns").write_text("")
    text, mend = look("access")
    assert text == f"{project / 'mlruns'} is a file, and must be a folder"
    assert mend.startswith("mv ")


def test_access_where_the_home_cannot_be_written(project, home, monkeypatch, tmp_path):
    """As in a container: Prefect's files go into the project then."""
    monkeypatch.delenv("PREFECT_HOME")
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert prefect_home(project) == project / "mlruns" / "prefect"
    assert [one.level for one in doctor.examine(["access"]).findings] == ["ok"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prefect_home(project) == tmp_path / ".prefect"


def test_access_by_a_link_to_nothing(project, look, tmp_path):
    shutil.rmtree(project / "mlruns", ignore_errors=True)
    (project / "mlruns").symlink_to(tmp_path / "gone")
    assert "is a link to" in look("access")[0]


def test_access_of_another_user(project, home):
    """In a process that is not root's, for whom everything can be written."""
    (project / "mlruns").mkdir(exist_ok=True)
    (project / "mlruns").chmod(0o500)
    code = (
        "import os, pathlib\n"
        "from tasks.operations.doctor import Here, access\n"
        "root = pathlib.Path.cwd()\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "print(*access.look(Here(root)), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Remark(level='error'" in done.stdout, done.stderr
    assert " cannot be written'" in done.stdout


def test_mlflow_that_is_damaged(project, look, empty_store):
    store = project / "mlruns" / "mlflow.db"
    content = bytearray(empty_store.read_bytes())
    content[4096 * 3 : 4096 * 40] = b"\xff" * (4096 * 37)
    store.write_bytes(content)
    store.chmod(0o600)
    text, mend = look("mlflow")
    assert "is damaged" in text or "is not a database" in text
    assert mend.startswith("mv ")


def test_mlflow_that_others_can_read(project, look, empty_store):
    shutil.copy(empty_store, project / "mlruns" / "mlflow.db")
    (project / "mlruns" / "mlflow.db").chmod(0o644)
    assert "can be read by every user" in look("mlflow", "warning")[0]


def test_a_store_that_is_being_written_to_is_no_error(project, home, empty_store):
    store = project / "mlruns" / "mlflow.db"
    shutil.copy(empty_store, store)
    store.chmod(0o600)
    connection = sqlite3.connect(store, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    (found,) = doctor.examine(["mlflow"]).findings
    connection.close()
    assert found.level == "ok"
    assert "is being written to" in found.text


@pytest.mark.parametrize(("check", "variable"), [("mlflow", "MLFLOW_TRACKING_URI"), ("prefect", "PREFECT_API_URL")])
def test_a_server_that_is_down(look, monkeypatch, check, variable):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv(variable, f"http://me:s3cretpassword@127.0.0.1:{port}")
    text, mend = look(check)
    assert text.startswith(f"{variable} = http://127.0.0.1:{port}: no ")
    assert "s3cret" not in text + mend


def test_prefect(look, home):
    home.mkdir()
    (home / "prefect.db").write_bytes(b"no database at all, but long enough to be looked at" * 100)
    (home / "prefect.db").chmod(0o600)
    assert "is not a database of prefect" in look("prefect")[0]


def test_a_port_that_is_taken_is_told(project, home):
    from tasks.operations.doctor.network import PORTS

    try:
        taken = socket.create_server(("127.0.0.1", PORTS["MLflow"]))
    except OSError:
        pytest.skip("the port is another program's")
    with taken:
        (found,) = doctor.examine(["network"]).findings
    assert "5000 (MLflow's)" in found.text


@pytest.mark.parametrize(
    ("place", "content", "words"),
    [
        (".dvc/config", "[core\n", ".dvc/config cannot be read"),
        (".dvc/tmp/rwlock", '{"half', "rwlock is damaged"),
        ("data/digits/dvc.lock", "schema: [2.0\n", "data/digits: "),
        ("data/digits/params.yaml", "dataset: {name: other}\n", "dataset.name = 'other'"),
    ],
)
def test_dvc(project, look, place, content, words):
    (project / place).parent.mkdir(exist_ok=True)
    (project / place).write_text(content)
    assert words in look("dvc")[0]


def test_dvc_whose_cache_others_can_write(project, look, monkeypatch):
    monkeypatch.delenv("DVC_SITE_CACHE_DIR", raising=False)
    (project / ".dvc" / "site").mkdir(mode=0o777)
    (project / ".dvc" / "site").chmod(0o777)
    assert "open to other users" in look("dvc")[0]


def test_dvc_whose_remote_is_gone(project, look):
    (project / ".dvc" / "config.local").write_text("['remote \"disk\"']\n    url = /no/such/folder\n")
    assert look("dvc", "warning")[0] == "remote disk: the folder /no/such/folder is not there"


def test_git(project, look):
    shutil.rmtree(project / ".git")
    assert "under no version control" in look("git", "warning")[0]


def test_git_without_a_commit(project, look):
    shutil.rmtree(project / ".git")
    subprocess.run(["git", "init", "--quiet"], check=True)
    assert look("git", "warning")[0] == "the repository has no commit yet"


def test_clock(project, look):
    later = time.time() + 86_400
    os.utime(project / "params.yaml", (later, later))
    assert look("clock", "warning")[0].startswith("params.yaml is of ")


def test_leftovers(project, look):
    run = write_run(1, status=None)
    runs.set_status(run, "RUNNING")
    text, mend = look("leftovers", "warning")
    assert text == f"runs whose process died: {run.run_id[:8]}"
    assert mend == "stratagem reconcile"


def test_a_run_at_work_is_none(project, home):
    run = write_run(1, status=None)
    runs.set_status(run, "RUNNING")
    with runs.lock(run.key, "a run"):
        (found,) = doctor.examine(["leftovers"]).findings
    assert (found.level, found.text) == ("ok", "nothing; 1 run is at work")


def test_what_mlflow_was_not_told(project, look):
    run = write_run(1)
    Path(run.folder, "unsent.jsonl").write_text('{"name": "n"}\n')
    assert look("leftovers", "warning")[0] == f"runs with more to tell MLflow: {run.run_id[:8]}"


def test_a_process_that_was_left(project, look):
    """Its parent has ended, so that the init process has it."""
    left = (
        "[sys.executable, '-m', 'tasks', 'serve'], stdin=open(0), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    )
    starts = f"import subprocess, sys; print(subprocess.Popen({left}).pid)"
    read, write = os.pipe()
    done = subprocess.run([sys.executable, "-c", starts], stdin=read, stdout=subprocess.PIPE, text=True, check=True)
    pid = int(done.stdout)
    try:
        if Path(f"/proc/{pid}/stat").read_text().split()[3] != "1":
            pytest.skip("another process than init takes what is left here")
        text, mend = look("leftovers", "warning")
        assert f"{pid} (-m tasks serve)" in text
        assert mend == f"kill {pid}"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.close(write)
        os.close(read)


def test_a_check_that_cannot_look_says_so(project, look):
    (project / "pyproject.toml").write_bytes(b"\xff\xfe")
    assert look("python")[0].startswith("cannot be looked at (")


def test_a_broken_status_stops_no_check(project, home):
    run = write_run(1)
    Path(run.folder, "status.json").write_text("{")
    assert not [one for one in doctor.examine(["leftovers"]).findings if one.level == "error"]
    with pytest.raises(Exception, match="readable"):
        records.load(RunStatus, Path(run.folder, "status.json"))


def test_sizes_are_readable():
    assert [size(2**20), size(3 * 2**30)] == ["1 MiB", "3.0 GiB"]
    assert Here(Path("/")).with_devices is False


def test_no_framework_is_imported(project, home):
    heavy = {"tensorflow", "jax", "keras", "mlflow", "prefect", "dvc"}
    code = f"import sys; from tasks.operations import doctor; doctor.examine(); print([*({heavy} & {{*sys.modules}})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
def test_the_command_ends_with_the_worst(project, home, run):
    command = [sys.executable, "-c", "from flows.cli.main import main; main()", "doctor"]
    shutil.rmtree(project / ".git")
    done = run(command, env={"COLUMNS": "80"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "-> git init && git add --all" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    shutil.rmtree(project / "data")
    (project / "data").write_text("")
    done = run([*command, "--json", "access"])
    assert done.returncode == 1
    assert (done.stdout.count("\n"), done.stderr) == (1, "")
    done = run([*command, "disc"])
    assert (done.returncode, done.stderr.partition("?")[0]) == (2, "error: unknown check 'disc': did you mean 'disk'")


@pytest.fixture
def kept(project):
    """``kept(phase="ready")`` writes what a `stratagem up` of this process left in mlruns/up/."""
    folder = project / "mlruns" / "up"
    folder.mkdir(mode=0o700)
    began = psutil.Process().create_time()

    def kept(**changes):
        service = records.ServiceState(name="mlflow", pid=os.getpid(), created=began, since="2026-11-25T00:00:00+00:00")
        state = {"pid": os.getpid(), "created": began, "host": socket.gethostname(), "since": service.since}
        versions = {"prefect": importlib.metadata.version("prefect")}
        given = {"phase": "ready", "services": (service.model_copy(update=changes.pop("service", {})),)} | changes
        records.save(records.Operation(**state, **({"versions": versions} | given)), folder / "state.json")
        return FileLock(folder / "lock")

    return kept


def test_up_that_was_killed(kept, look):
    kept(service={"created": 1.0})
    assert look("up", "warning") == (
        "it was killed (it began 2026-11-25T00:00:00+00:00): schedules do not fire, nothing continues what was running",
        "stratagem up --detach",
    )
    kept()
    assert f"of what it kept, processes {os.getpid()} are ending" in look("up", "warning")[0]


def test_up_that_has_ended_or_runs_is_well(project, home, kept):
    for phase, held, text in (("ending", False, "it does not run"), ("ready", True, "and all answers")):
        with kept(phase=phase) if held else contextlib.nullcontext(kept(phase=phase)):
            (found,) = doctor.examine(["up"]).findings
        assert (found.level, found.text.endswith(text)) == ("ok", True), found


def test_up_of_which_a_server_does_not_answer(kept, look):
    (port,) = free_ports(1)
    with kept(service={"address": f"http://127.0.0.1:{port}"}):
        text, mend = look("up", "warning")
    assert "does not have all that it keeps: mlflow (no answer)" in text
    assert "stratagem down && stratagem up --detach" in mend


def test_up_of_other_versions(kept, look, project):
    with kept(versions={"prefect": "0.1", "no-such-package": "1.0"}):
        text, mend = look("up", "warning")
    assert "prefect 0.1, now 3" in text
    assert "no-such-package 1.0, now not installed" in text
    state = project / "mlruns" / "up" / "state.json"
    state.write_text(state.read_text().replace('"phase"', '"stage"'))
    text, mend = look("up", "warning")
    assert text.startswith("its state is of another version, or damaged: ")
    assert mend.startswith(f"rm {state}")
    with FileLock(project / "mlruns" / "up" / "lock"):
        assert look("up")[1] == "stratagem down && stratagem up --detach"


def test_up_whose_folder_is_not_private_or_whose_database_is_damaged(kept, look, project):
    kept(phase="ending")
    folder = project / "mlruns" / "up"
    (folder / "prefect").mkdir()
    (folder / "prefect" / "prefect.db").write_text("no database")
    (folder / "prefect" / "prefect.db").chmod(0o600)
    text, mend = look("up")
    assert "is not a database of prefect" in text
    assert mend.endswith("`stratagem up` makes a new one")
    folder.chmod(0o755)
    assert look("up") == (f"others may enter {folder}, which has passwords", f"chmod 700 {folder}")
    folder.rename(project / "elsewhere")
    folder.symlink_to(project / "elsewhere")
    assert "is a link, a file or another user's" in look("up")[0]
