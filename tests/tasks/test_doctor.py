"""Each check of the doctor on something that really is wrong."""

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tasks import records
from tasks.operations import doctor
from tasks.operations.doctor import prefect_home
from tasks.runs import locks, outcome
from tests.tasks.written_runs import write_run, write_summary


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A Prefect home and a temporary folder of the test's own, and nobody's server or proxy."""
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "KERAS_BACKEND", "TF_CONFIG", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect_home"))
    # Other tests kill commands, whose noted files would be found.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "prefect_home"


@pytest.fixture
def look(project, home):
    """``look("git")`` is what a check finds that is not ok, as (level, text, fix)."""

    def look(name, level="error"):
        found = [one for one in doctor.examine([name]).findings if one.level != "ok"]
        assert [one.level for one in found] == [level], found
        assert found[0].fix
        return found[0].text, found[0].fix

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
    assert {one.check for one in health.findings} == doctor.CHECKS.keys()


GIT_IGNORES = "git check-ignore -v data/digits/{} shows the line of .gitignore: remove it"


@pytest.mark.parametrize(
    ("check", "level", "place", "content", "text", "fix"),
    [
        ("settings", "error", "params.yaml", "train: {epocs: 1}", "epocs", "edit params.yaml"),
        ("settings", "error", "recipes/a.yaml", "train: {epochs: -1}", "recipes/a.yaml: train.epochs", "edit recipes/"),
        ("dvc", "error", ".gitignore", "data/", "git ignores data/digits/dvc.yaml", GIT_IGNORES.format("dvc.yaml")),
        ("dvc", "error", ".gitignore", "/data/*", "git ignores data/digits/dvc.yaml", GIT_IGNORES.format("dvc.yaml")),
        ("dvc", "error", ".gitignore", "*.lock", "git ignores data/digits/dvc.lock", GIT_IGNORES.format("dvc.lock")),
        ("dvc", "error", ".dvc/config", "[core", ".dvc/config cannot be read", "git checkout .dvc/config"),
        ("dvc", "error", ".dvc/tmp/rwlock", '{"half', "rwlock is damaged", "rm "),
        ("dvc", "error", ".dvc/site/repo/1/hashes/cache.db", "garbage", "cache.db is damaged, so DVC refuses", "rm "),
        ("dvc", "error", "data/digits/prepared/manifest.json", "{", "prepared/manifest.json is damaged, or",
         "stratagem data prepare --set dataset.name=digits --force"),
        ("dvc", "error", "data/digits/raw/manifest.json", "{", "raw/manifest.json is damaged", "rm "),
        ("dvc", "error", "data/digits/raw/digits/1.0.0/dataset_info.json", "{", "dataset_info.json is damaged", "rm "),
        ("leftovers", "warning", f"mlruns/runs/{'a' * 32}/records/run.json", '{"for', "records/run.json",
         "restore its records from a backup, or rm -r mlruns/runs/aaa"),
        ("dvc", "error", "data/digits/dvc.lock", "schema: [2.0", "data/digits: ", "git checkout data/digits, or "),
        ("dvc", "error", "data/digits/params.yaml", "dataset: {name: other}", "dataset.name = 'other'", "git checkout"),
        ("dvc", "warning", ".dvc/config.local", "['remote \"disk\"']\n    url = /no/such/folder",
         "remote disk: the folder /no/such/folder does not exist", "dvc remote modify disk url FOLDER"),
        ("access", "error", "mlruns", "", "/mlruns is a file but must be a folder", "mv "),
        ("access", "error", "mlruns", Path("/gone"), "/mlruns is a link to /gone, which does not exist", "rm "),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong(project, look, check, level, place, content, text, fix):
    path = project / place
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(content) if isinstance(content, Path) else path.write_text(f"{content}\n")
    found = look(check, level)
    assert text in found[0]
    assert found[1].startswith(fix)


@pytest.mark.parametrize("place", ["params.yaml", "recipes/pipe.yaml", "data/digits/params.yaml"])
def test_a_pipe_in_place_of_a_file_is_named_and_nothing_waits_for_it(project, look, place):
    (project / place).unlink(missing_ok=True)
    os.mkfifo(project / place)
    text, _ = look("dvc" if place.startswith("data/") else "settings")
    assert place in text
    assert "a pipe or a device, not a file" in text


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
    assert text.startswith("versions that differ from requirements.lock: rich ")


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
    assert [(one.level, "that are installed match" in one.text) for one in found] == [("ok", True)]
    (brought / "requirements.lock").write_text(lock.replace("\nrich==", "\nrich==0.", 1))
    text, fix = look("packages", "warning")
    assert text.startswith("versions that differ from requirements.lock: rich ")
    assert fix == f"pip install --no-deps --require-hashes -r {brought}/requirements.lock"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_devices_of_tensorflow(project, home, gpus):
    health = doctor.examine(["devices"], with_devices=True)
    assert any("TensorFlow sees /physical_device:CPU:0" in one.text for one in health.findings)
    gpus(1, None)
    found = [one for one in doctor.examine(["devices"], with_devices=True).findings if one.level == "error"]
    assert any("the driver reports 1 GPU, but TensorFlow sees 0: it trains on the CPU" in one.text for one in found)
    (project / "tensorflow.py").write_text("raise ImportError('libcudart.so.12 is not there')\n")
    found = [one for one in doctor.examine(["devices"], with_devices=True).findings if one.level == "error"]
    assert ["libcudart.so.12 is not there" in one.text for one in found] == [True]


def test_disk(look, project, mount_small):
    (project / "mlruns").mkdir(exist_ok=True)
    mount_small(project / "mlruns", "size=64k")
    assert "65.5 kB free" in look("disk")[0]


def test_access_where_the_home_cannot_be_written(project, home, monkeypatch, tmp_path):
    """As in a container: Prefect's files go into the project then."""
    monkeypatch.delenv("PREFECT_HOME")
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert prefect_home(project) == project / "mlruns" / "prefect"
    assert [one.level for one in doctor.examine(["access"]).findings] == ["ok"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prefect_home(project) == tmp_path / ".prefect"


def test_access_of_another_user(project, home):
    """In a process that is not root's, for whom everything can be written."""
    (project / "mlruns").mkdir(exist_ok=True)
    (project / "mlruns").chmod(0o500)
    code = (
        "import os, pathlib\n"
        "from tasks.operations.doctor import access\n"
        "root = pathlib.Path.cwd()\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "print(*access(root), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Remark(level='error'" in done.stdout, done.stderr
    assert " cannot be written'" in done.stdout


@pytest.mark.parametrize("team", ["", "databricks"])
def test_mlflow_that_is_damaged(project, look, empty_store, monkeypatch, team):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", team)
    store = project / "mlruns" / "mlflow.db"
    content = bytearray(empty_store.read_bytes())
    content[4096 * 3 : 4096 * 40] = b"\xff" * (4096 * 37)
    store.write_bytes(content)
    store.chmod(0o600)
    text, fix = look("mlflow")
    assert "is damaged" in text or "is not a database" in text
    assert fix.startswith("mv ")


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
    assert "another process is writing to" in found.text


@pytest.mark.parametrize(("check", "variable"), [("mlflow", "MLFLOW_TRACKING_URI"), ("prefect", "PREFECT_API_URL")])
def test_a_server_that_is_down(look, monkeypatch, check, variable):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv(variable, f"http://me:s3cretpassword@127.0.0.1:{port}")
    text, fix = look(check)
    assert text.startswith(f"{variable} = http://127.0.0.1:{port}: no ")
    assert "s3cret" not in text + fix
    assert text.endswith(" server answers ([Errno 111] Connection refused)")


def test_a_shell_of_an_up_that_has_ended(project, look, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    assert look("prefect")[1].startswith("prefect server start, or unset PREFECT_API_URL:")
    monkeypatch.setenv("PREFECT_HOME", str(project / "mlruns" / "up" / "prefect"))
    assert look("prefect")[1].startswith("stratagem up, or unset PREFECT_API_URL PREFECT_API_AUTH_STRING PREFECT_HOME ")


@pytest.mark.parametrize(
    ("check", "level", "command", "environment", "text", "fix"),
    [
        ("git", "warning", "rm -r .git", {}, "not under version control", ""),
        ("git", "warning", "rm -r .git; git init --quiet", {}, "the repository has no commit yet", ""),
        ("devices", "error", "true", {"KERAS_BACKEND": "jax"}, "KERAS_BACKEND", "strategy.kind"),
        ("mlflow", "error", "true", {"MLFLOW_TRACKING_URI": "127.0.0.1:5000"}, "Write http:// before its host", ""),
    ],
)
def test_a_repository_or_an_environment_that_is_wrong(
    project, look, monkeypatch, check, level, command, environment, text, fix
):
    subprocess.run(["bash", "-c", command], check=True)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = look(check, level)
    assert text in found[0]
    assert fix in found[1]


def test_leftovers(project, look):
    run = write_run(1, status=None)
    outcome.set_status(run, "RUNNING")
    text, fix = look("leftovers", "warning")
    assert text == f"runs whose process died: {run.run_id[:8]}"
    assert fix == "stratagem reconcile"


def test_a_run_at_work_is_none(project, home):
    run = write_run(1, status=None)
    outcome.set_status(run, "RUNNING")
    with locks.lock(run.key, "a run"):
        (found,) = doctor.examine(["leftovers"]).findings
    assert (found.level, found.text) == ("ok", "none; 1 run is active")


def test_what_mlflow_was_not_told(project, look):
    run = write_run(1)
    Path(run.folder, "uncopied").touch()
    assert look("leftovers", "warning")[0] == f"runs that are only partly copied to the MLflow server: {run.run_id[:8]}"


def test_no_framework_is_imported(project, home):
    heavy = {"tensorflow", "jax", "keras", "mlflow", "prefect", "dvc"}
    code = f"import sys; from tasks.operations import doctor; doctor.examine(); print([*({heavy} & {{*sys.modules}})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def version_of(name, number, *aliases, **tags):
    tags = {key.replace("_", "/", 1): text for key, text in tags.items()}
    return records.ModelVersion(name=name, version=str(number), aliases=aliases, run_id="a" * 32, tags=tags)


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ([version_of("m", 1), version_of("m", 2, "challenger")], "m has no @champion (2 versions)"),
        ([version_of("m", 1, "champion", test_accuracy="1.0000")], "m/1 @champion has test/accuracy 1: do its inputs"),
        ([version_of("m", 1, "champion", test_accuracy="0.9900", test_loss="1.0000"), version_of("m", 2)], None),
    ],
)
def test_models_without_a_champion_or_with_one_too_good_to_be_true(project, look, monkeypatch, versions, said):
    write_summary(write_run(1))
    monkeypatch.setattr(doctor.stages, "list_versions", lambda: versions)
    if said is None:
        assert [one.level for one in doctor.examine(["models"]).findings] == ["ok"]
    else:
        found = [one for one in doctor.examine(["models"]).findings if one.level != "ok"]
        assert [said in one.text for one in found] == [True]


def test_a_champion_whose_only_version_was_deleted(project, look, monkeypatch):
    run = write_run(1)
    summary = write_summary(run)
    outcome.save(run, summary.model_copy(update={"model_version": "m/1", "aliases": ("challenger", "champion")}))
    monkeypatch.setattr(doctor.stages, "list_versions", list)
    text, fix = look("models", "warning")
    assert text == "m has no version any more, and so no @champion: it was deleted in MLflow"
    assert fix == f"stratagem models register {run.run_id}"


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
