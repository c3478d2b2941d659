import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import tomllib
from contextlib import closing
from pathlib import Path

import mlflow
import psutil
import pytest
import yaml

from tasks.operations import pipeline

CHECKOUT = Path(__file__).resolve().parent.parent.parent
COMMANDS = [
    "run", "compare", "download", "prepare", "train", "evaluate", "register", "rollback", "reconcile", "recipes",
    "jobs", "predict", "report", "runs", "serve-model", "strategies", "submit", "sweep", "trace", "ui",
]  # fmt: skip
# DESIGN.md, "The command": what `run --json` gives at least.
KEYS = {
    "run_id", "flow_run_id", "git_commit", "data_version", "dataset", "strategy", "loop", "num_replicas", "epochs",
    "steps", "examples_per_second", "metrics", "checkpoint", "weights_digest", "model_uri", "model_version", "aliases",
    "seconds",
}  # fmt: skip
CHATTER = re.compile(
    r"\x1b|tensorflow|cuda|oneDNN|cpu_feature_guard|Traceback|[A-Za-z]*Warning|alembic|INFO|WARN", re.I
)
EPOCH = "  1/400"
# The run that must still be in training when something happens to it.
LONG = ["stratagem", "run", "--set", "train.epochs=400", "--set", "tracking.system_metrics=false"]


def test_who_reads_the_output_may_leave(project):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(["stratagem", "strategies", "--markdown"], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_help_lists_every_command_and_imports_no_framework(run, record_imports, project):
    imports = record_imports(project)
    result = run(["stratagem", "--help"], env=imports.environment)
    assert result.returncode == 0
    assert [name for name in COMMANDS if not re.search(rf"^│ {name} ", result.stdout, re.MULTILINE)] == []
    assert imports.record.read_text() == ""
    heavy = "tensorflow keras jax mlflow prefect numpy pydantic"
    code = f"import stratagem, flows.cli.main, sys; print([name for name in '{heavy}'.split() if name in sys.modules])"
    assert run(["python", "-c", code]).stdout == "[]\n"


def test_what_a_run_imports_before_prefect_is_light(run, project):
    before = (
        "flows.operate.prefect_server, flows.cli.tables, tasks.operations.pipeline, tasks.process.client, tasks.runs"
    )
    heavy = "tensorflow keras jax mlflow prefect numpy dvc"
    code = f"import {before}, sys; print([name for name in '{heavy}'.split() if name in sys.modules])"
    assert run(["python", "-c", code]).stdout == "[]\n"


def test_the_version(run):
    result = run(["stratagem", "--version"])
    version = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
    assert (result.returncode, result.stdout, result.stderr) == (0, f"stratagem {version}\n", "")


def test_recipes_are_told_whole_and_fit_a_terminal(run, project):
    what = "Noise, of which nothing is to be learned, with a first line that is as long as a line may be,"
    (project / "recipes" / "mine.yaml").write_text(
        f"# {what}\n# and a [second] line.\n#   stratagem run mine\n# More.\n"
    )
    result = run(["stratagem", "recipes"], env={"COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if len(line) > 80] == []
    told = " ".join(result.stdout.split())
    assert f"mine {what} and a [second] line. " in told
    assert "More." not in told


@pytest.fixture
def store(in_finished) -> mlflow.MlflowClient:
    uri = f"sqlite:///{in_finished.project}/mlruns/mlflow.db"
    return mlflow.MlflowClient(uri, registry_uri=uri)


@pytest.mark.slow
def test_json_is_one_line_with_every_key_and_nothing_else(finished):
    assert finished.out.count("\n") == 1
    summary = finished.summary
    assert KEYS - summary.keys() == set()
    assert [key for key in KEYS if summary[key] in (None, "", [], {})] == []
    assert summary["epochs"] == 2
    assert summary["steps"] == 82, "1,293 examples are 41 batches of 32"
    assert {"data", "train", "evaluate", "register", "report", "total"} == summary["seconds"].keys()
    assert json.loads((finished.project / "mlruns/runs" / summary["run_id"] / "summary.json").read_text()) == summary


@pytest.mark.slow
def test_tensorflow_is_imported_once_and_not_by_the_flow(finished):
    (stage_process,) = finished.imports.of("tensorflow")
    assert stage_process != finished.flow_process
    assert finished.imports.of("mlflow") == [stage_process]
    # The flow's, and that of its own API server.
    assert finished.flow_process in finished.imports.of("prefect")
    assert len(finished.imports.of("prefect")) == 2
    assert finished.flow_process not in finished.imports.of("numpy"), "0.2 s"


@pytest.mark.slow
def test_what_a_person_sees_fits_a_terminal(finished):
    assert [line for line in finished.err.splitlines() if len(line) > 80] == []
    assert [line for line in finished.err.splitlines() if CHATTER.search(line)] == []
    assert re.search(r"^ +2/2 ", finished.err, re.MULTILINE), "one line an epoch"


@pytest.mark.slow
def test_the_mlflow_run_has_it_all(store, in_finished):
    summary = in_finished.summary
    run = store.get_run(summary["run_id"])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.epochs"] == "2"
    assert run.data.params["dataset.name"] == "digits"
    assert {name: run.data.metrics[name] for name in summary["metrics"]} == summary["metrics"]
    assert len(store.get_metric_history(summary["run_id"], "validation/accuracy")) == 2
    kept = {Path(entry.path).name for entry in store.list_artifacts(summary["run_id"], "evaluation")}
    assert {
        "report.html",
        "augmented_examples.png",
        "confusion_matrix.png",
        "learning_curve.png",
        "reliability.png",
        "evaluation.json",
    } <= kept
    low, high = (run.data.metrics[f"interval/test/accuracy/{end}"] for end in ("low", "high"))
    assert low <= summary["metrics"]["test/accuracy"] <= high
    assert 0 < run.data.metrics["calibration/expected_calibration_error"] < 1
    assert run.data.tags["flow_run_id"] == summary["flow_run_id"]


@pytest.mark.slow
def test_data_commit_run_checkpoint_and_model_lead_to_each_other(store, in_finished, run):
    summary, project = in_finished.summary, in_finished.project
    # Forwards: from the data and the commit to the model that carries the alias.
    lock = yaml.safe_load((project / "data/digits/dvc.lock").read_text())
    data_version = lock["stages"]["prepare"]["outs"][0]["md5"].removesuffix(".dir")
    commit = run(["git", "rev-parse", "HEAD"]).stdout.strip()
    (experiment,) = store.search_experiments(filter_string="name = 'digits'")
    (found,) = store.search_runs(
        [experiment.experiment_id],
        f"tags.data_version = '{data_version}' and tags.`mlflow.source.git.commit` = '{commit}'",
    )
    assert found.info.run_id == summary["run_id"]
    datasets = {entry.dataset.name: entry.dataset.digest for entry in found.inputs.dataset_inputs}
    assert datasets.keys() == {"digits/train", "digits/validation", "digits/test"}
    assert datasets["digits/test"] == data_version
    assert {digest[:27] for digest in datasets.values()} == {data_version[:27]}
    assert (project / found.data.tags["checkpoint"]).is_dir()
    assert found.data.tags["checkpoint"] == summary["checkpoint"]
    name, number = summary["model_version"].split("/")
    assert found.data.tags["model_version"] == summary["model_version"]
    # And back: from the model to everything that made it.
    version = store.get_model_version_by_alias(name, "challenger")
    assert store.get_model_version_by_alias(name, "champion").version == version.version
    assert version.tags["gate"] == found.data.tags["gate"] == summary["judgement"]["reason"]
    assert str(version.version) == number
    assert version.run_id == summary["run_id"]
    assert version.tags["checkpoint"] == summary["checkpoint"]
    assert version.tags["data_version"] == data_version == summary["data_version"]
    assert version.tags["git_commit"] == commit == summary["git_commit"]
    assert version.tags["weights_digest"] == summary["weights_digest"]
    assert run(["git", "cat-file", "-t", version.tags["git_commit"]]).stdout == "commit\n"


@pytest.mark.slow
def test_if_changed_trains_nothing_again_and_says_why(in_finished, run, record_imports):
    imports = record_imports(in_finished.project)
    command = ["stratagem", "run", "--set", "train.epochs=2", "--if-changed"]
    result = run(command, env=imports.environment | {"COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    assert "Nothing to do: data, settings and code are those of this finished run" in result.stdout
    assert in_finished.summary["run_id"] in result.stdout
    assert [line for line in result.stdout.splitlines() if len(line) > 80 or "\x1b" in line] == []
    # What `evaluate` prints of the classes, and each picture's path whole, on a line of its own.
    assert_classes_and_pictures(result.stdout, in_finished)
    assert imports.of("tensorflow") == imports.of("prefect") == [], "nothing is started"
    assert len(list((in_finished.project / "mlruns/runs").iterdir())) == 1

    # Data that are not what DVC knows, or other settings, are a reason to go the whole way.
    assert pipeline.find_unchanged(None, ["train.epochs=2"]).run_id == in_finished.summary["run_id"]
    assert pipeline.find_unchanged(None, ["train.epochs=3"]) is None
    labels = Path("data/digits/prepared/test_labels.npy")
    whole = labels.read_bytes()
    labels.chmod(0o644)
    labels.write_bytes(whole[:-1] + b"\1")
    assert pipeline.find_unchanged(None, ["train.epochs=2"]) is None
    labels.write_bytes(whole)


def assert_classes_and_pictures(said, finished):
    rows = re.findall(r"^ ?(\d) +[01]\.\d{4} +[01]\.\d{4} +[01]\.\d{4} +(\d+) *$", said, re.MULTILINE)
    assert [name for name, _ in rows] == list("0123456789")
    assert sum(int(support) for _, support in rows) == 360
    pictures = [line for line in said.splitlines() if line.endswith((".png", ".html"))]
    folder = f"mlruns/runs/{finished.summary['run_id']}/report"
    names = "augmented_examples.png", "confusion_matrix.png", "learning_curve.png", "reliability.png", "report.html"
    assert pictures == [f"{folder}/{name}" for name in names]
    assert all((finished.project / path).is_file() for path in pictures)


@pytest.mark.slow
def test_evaluate_prints_the_classes_and_the_pictures(in_finished, run):
    done = run(["stratagem", "evaluate", "--run", in_finished.summary["run_id"], "--set", "train.epochs=2"])
    assert done.returncode == 0, done.stderr
    assert_classes_and_pictures(done.stdout, in_finished)


@pytest.mark.slow
def test_a_report_is_written_again_without_a_framework(in_finished, record_imports, run):
    run_id = in_finished.summary["run_id"]
    path = in_finished.project / "mlruns" / "runs" / run_id / "report" / "report.html"
    assert "convnet2-one_device-fit" in path.read_text(encoding="utf-8")
    path.unlink()
    imports = record_imports(in_finished.project)
    done = run(["stratagem", "report", "latest"], env=imports.environment)
    assert (done.returncode, done.stdout.strip()) == (0, str(path)), done.stderr
    assert "Partial report" not in path.read_text(encoding="utf-8")
    assert [name for name in ("tensorflow", "keras", "mlflow") if imports.of(name)] == []
    assert len(imports.of("numpy")) == 1, "by the process that writes it"
    refused = run(["stratagem", "report", "0" * 32])
    assert refused.returncode == 2
    assert refused.stderr == f"error: unknown run '{'0' * 32}': the newest runs: {run_id}\n"


# Each: arguments of `stratagem run`, and what its one message must name: key, value, what is allowed or what to do.
BAD = {
    "recipe": (["nosuch"], ["recipe 'nosuch'", "Allowed: "]),
    "strategy": (["--set", "strategy.kind=mirrord"], ["strategy.kind 'mirrord'", "did you mean 'mirrored'?"]),
    "model": (["--set", "model.name=convnt"], ["model.name 'convnt'", "did you mean 'convnet'?"]),
    "key": (["--set", "train.epoch=3"], ["key 'train.epoch'", "did you mean 'train.epochs'?"]),
    "section": (["--set", "trains.epochs=3"], ["section 'trains'", "did you mean 'train'?"]),
    "type": (["--set", "train.epochs=many"], ["train.epochs = 'many'", "integer"]),
    "no value": (["--set", "train.epochs"], ["--set train.epochs: write it as section.key=value"]),
    "zero": (["--set", "train.epochs=0"], ["train.epochs = 0", "greater than 0"]),
    "negative": (["--set", "train.per_replica_batch_size=-1"], ["train.per_replica_batch_size = -1", "greater than 0"]),
    "no validation": (["--set", "input.validation=null"], ["checkpoint.monitor", "input.validation is null"]),
    "loop": (
        ["--set", "strategy.kind=parameter_server", "--set", "train.loop=fit"], ["train.loop", "set train.loop=custom"]
    ),
    "mesh": (
        ["--set", "strategy.kind=model_parallel", "--set", "strategy.mesh_shape=[2,4]", "--set", "strategy.devices=6"],
        ["strategy.mesh_shape = [2, 4]", "8 devices", "devices = 6"],
    ),
}  # fmt: skip
# The same of what shows only when the run's processes have started.
BAD_LATER = {
    "dataset": (["--set", "dataset.name=digitz"], ["dataset 'digitz'", "did you mean 'digits'?"]),
    "validation": (["--set", "input.validation=5000"], ["input.validation = 5000", "from 1 to 1436"]),
    "batch on JAX": (
        ["--set", "strategy.kind=data_parallel", "--set", "strategy.devices=4", "--set", "train.global_batch_size=33"],
        ["train.global_batch_size = 33", "4 replicas", "Give 32 or 36"],
    ),
    "layout": (
        ["--set", "strategy.kind=model_parallel", "--set", "strategy.layout={nosuch: [null, model]}"],
        ["strategy.layout", "'nosuch'", "logits/kernel", "logits/output"],
    ),
}  # fmt: skip


def _files(project: Path) -> dict[str, bytes]:
    """Return what lies in data/ and mlruns/."""
    # What is derived or names the project, and would be made anew: no run leaves it.
    derived = {project / "mlruns" / name for name in (".id", "code.json")}
    paths = [path for folder in ("data", "mlruns") for path in (project / folder).rglob("*") if path.is_file()]
    paths = [path for path in paths if path not in derived]
    return {str(path.relative_to(project)): path.read_bytes() for path in paths}


def _refused(result, *words: str) -> None:
    """Exit code 2, and one message without a traceback that holds the words."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert [line[:7] for line in lines] == ["error: "], result.stderr
    assert [word for word in words if word not in lines[0]] == [], lines[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    # test_config.py has the messages of all; each command takes half a second of a processor.
    [pytest.param(*BAD[name], id=name, marks=() if name in ("recipe", "key") else pytest.mark.slow) for name in BAD],
)
def test_bad_input_is_refused_with_one_message_and_leaves_nothing(digits, project, run, arguments, words):
    before = _files(project)
    _refused(run(["stratagem", "run", *arguments]), *words)
    assert _files(project) == before


@pytest.fixture(scope="module")
def refusing_project(prepared_template, tmp_path_factory):
    """A project with prepared data in which nothing comes to be done."""
    folder = tmp_path_factory.mktemp("refusing") / "project"
    shutil.copytree(prepared_template, folder, symlinks=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(*row, id=name, marks=() if name in ("dataset", "layout") else pytest.mark.exhaustive)
        for name, row in BAD_LATER.items()
    ],
)
def test_bad_input_that_shows_later_is_refused_alike(refusing_project, run, arguments, words):
    before = _files(refusing_project)
    env = {"PYTHONPATH": str(refusing_project)}
    _refused(run(["stratagem", "run", *arguments], cwd=refusing_project, env=env), *words)
    assert _files(refusing_project) == before


# Each: the strategy, a variable of the environment and its value, what the message must name.
FOREIGN = [
    ("multi_worker", "TF_CONFIG", "{", ["TF_CONFIG = '{'", "not JSON"]),
    ("multi_worker", "TF_CONFIG", '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1}}',
     ["task.index = 1", "from 0 to 0"]),
    ("data_parallel", "KERAS_BACKEND", "tensorflow",
     ["KERAS_BACKEND = 'tensorflow'", "keras.distribution does nothing"]),
    ("tpu", "TPU_NAME", "nosuch", ["strategy.kind = 'tpu'", "nosuch"]),
]  # fmt: skip


@pytest.mark.in_ci(0, 2)
@pytest.mark.parametrize(("kind", "variable", "value", "words"), FOREIGN)
def test_an_environment_that_contradicts_is_refused(digits, project, run, kind, variable, value, words):
    _refused(run(["stratagem", "run", "--set", f"strategy.kind={kind}"], env={variable: value}), *words)


def test_a_port_that_is_taken_is_refused(digits, project, run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        place = {"cluster": {"worker": [address, "127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}
        refused = run(["stratagem", "run", "--set", "strategy.kind=multi_worker"], env={"TF_CONFIG": json.dumps(place)})
    _refused(refused, address, "End the process that holds it, or let the members have other ports")


def test_nobody_waits_for_a_chief_that_has_nothing_to_do(digits, project, run):
    place = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 1}}
    arguments = ["stratagem", "run", "--if-changed", "--set", "strategy.kind=multi_worker"]
    _refused(run(arguments, env={"TF_CONFIG": json.dumps(place)}), "--if-changed", "strategy.launcher=local")


@pytest.mark.slow
def test_a_damaged_array_is_refused_even_when_dvc_trusts_it(prepared_project, run):
    assert run(["dvc", "status"]).returncode == 0  # DVC notes size and time of the copied files.
    array = prepared_project / "data/digits/prepared/train_images.npy"
    stat = array.stat()
    sound = array.read_bytes()
    damaged = sound[:-1] + bytes([sound[-1] ^ 1])
    array.chmod(0o644)
    array.write_bytes(damaged)
    os.utime(array, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    result = run(["stratagem", "run", "--set", "train.epochs=1"])
    _refused(
        result, "data/digits/prepared/train_images.npy", "sha256", "stratagem prepare --set dataset.name=digits --force"
    )
    assert run(["stratagem", "prepare", "--set", "dataset.name=digits", "--force"]).returncode == 0
    assert array.read_bytes() == sound


@pytest.mark.slow
def test_a_store_of_a_newer_mlflow_is_refused_and_kept(prepared_project, run, finished):
    shutil.copyfile(finished.project / "mlruns/mlflow.db", prepared_project / "mlruns/mlflow.db")
    with closing(sqlite3.connect(prepared_project / "mlruns/mlflow.db")) as database:
        database.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
        database.commit()
    before = _files(prepared_project)
    _refused(run(["stratagem", "run"]), "mlruns/mlflow.db", "newer MLflow", "move the file away")
    assert _files(prepared_project) == before


def test_a_folder_that_cannot_be_written_is_refused(digits, project, run):
    # Root writes where the mode forbids it, but not on a file system that is mounted read-only.
    mounted = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" "$0" && cd "$0" && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", mounted, str(project)]
    if shutil.which("unshare") is None or run([*inside, "true"]).returncode != 0:
        pytest.skip("mounting a folder read-only is not permitted here")
    before = _files(project)
    result = run([*inside, "stratagem", "run"], env={"PYTHONDONTWRITEBYTECODE": "1"})
    _refused(result, str(project / "data"), "cannot be written", "Read-only file system")
    assert _files(project) == before


@pytest.mark.slow
def test_without_git_a_run_works_and_says_so(prepared_project, run):
    shutil.rmtree(prepared_project / ".git")
    result = run(["stratagem", "run", "--json", "--set", "train.epochs=1"])
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["git_commit"] is None
    assert summary["git_dirty"] is None
    assert summary["data_version"] is not None


def _statuses(project: Path) -> list[str]:
    """Return the state of every MLflow run."""
    with closing(sqlite3.connect(f"file:{project}/mlruns/mlflow.db?mode=ro", uri=True)) as database:
        return [status for (status,) in database.execute("SELECT status FROM runs")]


@pytest.mark.slow
def test_a_run_that_is_told_to_stop_ends_as_killed_and_leaves_no_process(prepared_project, start):
    """By a SIGTERM of its own process; tests/flows/test_signals.py has the others."""
    command = start(*LONG)
    command.wait_until(EPOCH)
    assert len(command.family) >= 2, "the stage process and the API"
    command.process.terminate()
    assert command.process.wait(300) == 143
    assert command.survivors() == []
    assert _statuses(prepared_project) == ["KILLED"]
    assert "interrupted" in command.err.read_text().splitlines()[-1]
    assert "Traceback" not in command.err.read_text()


@pytest.mark.slow
def test_a_killed_stage_process_is_told_in_one_message(prepared_project, start):
    command = start(*LONG)
    command.wait_until(EPOCH)
    (stage,) = [child for child in command.family if child.cmdline()[-2:] == ["tasks", "serve"]]
    stage.kill()
    assert command.process.wait(300) == 1
    command.family += [child for child in psutil.process_iter() if child.pid in {p.pid for p in command.family}]
    assert command.survivors() == []
    assert _statuses(prepared_project) == ["FAILED"]
    errors = [line for line in command.err.read_text().splitlines() if line.startswith("error: ")]
    told = "error: the process that ran train died (SIGKILL). The machine may have run out of memory. The same command"
    assert errors == [f"{told} goes on"]
    assert "Traceback" not in command.err.read_text()
