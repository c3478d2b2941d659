import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tomllib
from pathlib import Path

import mlflow
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from flows.cli import main
from tasks.operations import pipeline
from tests.tasks.written_runs import write_run

CHECKOUT = Path(__file__).resolve().parent.parent.parent
# What `stratagem --help` lists, by purpose.
COMMANDS = {
    "Train": ["run", "compare", "sweep", "train", "evaluate", "recipes", "strategies"],
    "Data": ["data"],
    "Results": ["runs", "report", "trace"],
    "Models": ["predict", "models"],
    "Operate": ["ui", "up", "down", "status", "doctor", "init", "reconcile"],
    "Cluster": ["submit", "jobs", "plan"],
}
# The ten that matter most, and those beside them, show an example.
WITH_EXAMPLES = ["run", "compare", "sweep", "data", "runs", "report", "predict", "ui", "up", "submit"]
WITH_EXAMPLES += ["status", "doctor", "data add", "models predict"]
# Short and older names, which also work.
OLDER = ["download", "prepare", "register", "rollback", "export", "serve-model", "reproduce", "sync", "logs"]
# What `run --json` gives at least.
KEYS = {
    "run_id", "flow_run_id", "git_commit", "data_version", "dataset", "strategy", "loop", "num_replicas", "epochs",
    "steps", "examples_per_second", "metrics", "checkpoint", "weights_digest", "model_uri", "model_version", "aliases",
    "seconds",
}  # fmt: skip
CHATTER = re.compile(
    r"\x1b|tensorflow|cuda|oneDNN|cpu_feature_guard|Traceback|[A-Za-z]*Warning|alembic|INFO|WARN", re.I
)


@pytest.mark.parametrize("words", [["--json"], []])
def test_who_reads_the_output_may_leave(project, words):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(["stratagem", "strategies", *words], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_help_lists_the_commands_by_purpose_and_imports_no_framework(run, record_imports, project):
    imports = record_imports(project)
    result = run(["stratagem", "--help"], env=imports.environment | {"COLUMNS": "80"})
    assert result.returncode == 0
    panels = dict(re.findall(r"^(\w+):\n((?:  .*\n)+)", result.stdout, re.MULTILINE))
    panels.pop("Options")
    listed = {title: [line.split()[0] for line in rows.splitlines()] for title, rows in panels.items()}
    assert listed == COMMANDS, "each in one line, and no older name"
    assert sum(map(len, listed.values())) <= 24
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert imports.record.read_text() == ""
    heavy = "tensorflow keras jax mlflow prefect numpy pydantic"
    code = f"import stratagem, flows.cli.main, sys; print([name for name in '{heavy}'.split() if name in sys.modules])"
    assert run(["python", "-c", code]).stdout == "[]\n"


def test_the_commands_that_matter_most_show_an_example():
    for name in WITH_EXAMPLES:
        said = CliRunner().invoke(main.app, [*name.split(), "--help"], prog_name="stratagem").output
        assert re.search(rf"Examples:\n +stratagem {name.removeprefix('models ')}\b", said), name


def test_older_names_still_work():
    commands = get_command(main.app).commands
    assert sorted(name for name, one in commands.items() if one.hidden) == sorted(OLDER)
    with get_command(main.app).commands["run"].make_context("run", ["--explain"]) as context:
        assert context.params["dry_run"]


def test_a_quiet_command_prints_only_its_result_and_errors(run, project, digits):
    planned = run(["stratagem", "run", "mnist", "mnist-fast", "-q", "-n", "-S", "train.epochs=2"])
    assert (planned.returncode, planned.stderr) == (0, "")
    for line in (r"dataset\.name +mnist +recipe mnist-fast", r"train\.epochs +2 +--set"):
        assert re.search(rf"^{line} *$", planned.stdout, re.MULTILINE), planned.stdout
    refused = run(["stratagem", "run", "-q", "-S", "train.epoch=2"])
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: unknown key 'train.epoch'")


def test_what_a_run_imports_before_prefect_is_light(run, project):
    before = (
        "flows.operate.prefect_server, flows.cli.tables, tasks.operations.pipeline, tasks.process.client, tasks.runs"
        ", flows.cli.training, tasks.reports.comparison, tasks.reports.sweep"
    )
    heavy = "tensorflow keras jax mlflow prefect numpy dvc matplotlib scipy"
    code = f"import {before}, sys; print([name for name in '{heavy}'.split() if name in sys.modules])"
    assert run(["python", "-c", code]).stdout == "[]\n"


@pytest.mark.parametrize("command", ["runs", "status"])
def test_what_is_asked_most_often_imports_little(run, project, command):
    heavy = "tensorflow keras mlflow prefect numpy requests tasks.operations.pipeline"
    code = (
        f"import atexit, sys; sys.argv = ['stratagem', '{command}']; from flows.cli.main import main\n"
        f"atexit.register(lambda: print([name for name in '{heavy}'.split() if name in sys.modules])); main()"
    )
    found = run(["python", "-c", code])
    assert (found.returncode, found.stdout.splitlines()[-1]) == ({"runs": 0, "status": 1}[command], "[]"), found.stderr


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
    assert "INFO    | Flow run" not in finished.err, "without -v"
    summary = finished.summary
    assert KEYS - summary.keys() == set()
    assert [key for key in KEYS if summary[key] in (None, "", [], {})] == []
    assert summary["epochs"] == 2
    assert summary["steps"] == 82, "1,293 examples are 41 batches of 32"
    stages = {"start-up", "data", "train", "evaluate", "register", "report", "others", "total"}
    assert stages == summary["seconds"].keys()
    assert summary["seconds"]["start-up"] > 0.2, "the imports of the command"
    seconds = summary["seconds"].values()
    assert sum(seconds) == pytest.approx(2 * summary["seconds"]["total"], abs=0.01), "the parts add up to the total"
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
    low, high = (run.data.metrics[f"test_interval/accuracy/{end}"] for end in ("low", "high"))
    assert low <= summary["metrics"]["test/accuracy"] <= high
    assert 0 < run.data.metrics["test_calibration/expected_calibration_error"] < 1
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


def test_runs_are_listed_without_a_framework(project, run, record_imports):
    imports, one = record_imports(project), write_run(1)
    listed = run(["stratagem", "runs"], env=imports.environment)
    assert one.run_id[:8] in listed.stdout
    assert imports.of("tensorflow") == imports.of("prefect") == imports.of("mlflow") == []


VERBOSE = """
from flows.cli.main import main
from tasks.process import client
from tasks.system.errors import UserError

def log(*_, **options):
    from prefect.logging import configuration, get_logger
    configuration.setup_logging()
    get_logger("ours").info("a line of its log")
    raise UserError("enough")

client.start_processes = log
main()
"""


@pytest.mark.parametrize("options", [[], ["-v"]])
def test_a_verbose_run_prints_the_log_of_prefect(project, run, options):
    ended = run(["python", "-c", VERBOSE, "run", *options])
    assert ended.stderr.splitlines()[-1] == "error: enough"
    assert ("INFO    | prefect.ours - a line of its log" in ended.stderr) == (options == ["-v"])


@pytest.mark.slow
def test_if_changed_trains_nothing_again_and_says_why(in_finished, run, record_imports):
    imports = record_imports(in_finished.project)
    command = ["stratagem", "run", "--set", "train.epochs=2", "--if-changed"]
    result = run(command, env=imports.environment | {"COLUMNS": "80"})
    assert result.returncode == 0, result.stderr
    assert "Nothing to do: this finished run has the same data, settings and code" in result.stdout
    assert in_finished.summary["run_id"] in result.stdout
    assert [line for line in result.stdout.splitlines() if len(line) > 80 or "\x1b" in line] == []
    assert len(result.stdout.splitlines()) <= 24, "it fits on one screen"
    assert_classes_and_report(result.stdout, in_finished, num_classes=5)
    assert "and 5 classes with a higher f1: the report shows all" in result.stdout
    assert imports.of("tensorflow") == imports.of("prefect") == imports.of("mlflow") == [], "nothing is started"
    assert len(list((in_finished.project / "mlruns/runs").iterdir())) == 1

    # Data that are not what DVC knows, or other settings, are a reason to go the whole way.
    def planned(epochs):
        return pipeline.plan_ahead(None, [f"train.epochs={epochs}"], pipeline.Resumption(), if_changed=True)

    assert planned(2).unchanged.run_id == in_finished.summary["run_id"]
    assert planned(3).unchanged is None
    labels = Path("data/digits/prepared/test_labels.npy")
    whole = labels.read_bytes()
    labels.chmod(0o644)
    labels.write_bytes(whole[:-1] + b"\1")
    assert planned(2) is None
    labels.write_bytes(whole)


def assert_classes_and_report(said, finished, num_classes):
    rows = re.findall(r"^ ?(\d) +[01]\.\d{4} +[01]\.\d{4} +([01]\.\d{4}) +(\d+) *$", said, re.MULTILINE)
    assert len({name for name, _, _ in rows}) == num_classes
    if num_classes < 10:
        assert [f1 for _, f1, _ in rows] == sorted(f1 for _, f1, _ in rows), "the weakest first"
    else:
        assert sum(int(support) for _, _, support in rows) == 360
    report = f"mlruns/runs/{finished.summary['run_id']}/report/report.html"
    assert said.splitlines()[-1] == f"{report} (4 pictures)"
    assert (finished.project / report).is_file()


@pytest.mark.slow
def test_evaluate_prints_the_classes_and_the_report(in_finished, run):
    done = run(["stratagem", "evaluate", in_finished.summary["run_id"], "--set", "train.epochs=2"])
    assert done.returncode == 0, done.stderr
    assert_classes_and_report(done.stdout, in_finished, num_classes=10)


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
    "key": (["--set", "train.epoch=3"], ["key 'train.epoch'", "did you mean 'train.epochs'?"]),
    "mesh": (
        ["--set", "strategy.kind=model_parallel", "--set", "strategy.mesh_shape=[2,4]", "--set", "strategy.devices=6"],
        ["strategy.mesh_shape = [2, 4]", "8 devices", "devices = 6"],
    ),
}  # fmt: skip
# The same of what shows only when the run's processes have started.
BAD_LATER = {
    "dataset": (["--set", "dataset.name=digitz"], ["dataset 'digitz'", "did you mean 'digits'?"]),
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


# test_config.py has the messages of all.
@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD.keys())
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
@pytest.mark.parametrize(("arguments", "words"), BAD_LATER.values(), ids=BAD_LATER.keys())
def test_bad_input_that_shows_later_is_refused_alike(refusing_project, run, arguments, words):
    before = _files(refusing_project)
    env = {"PYTHONPATH": str(refusing_project)}
    _refused(run(["stratagem", "run", *arguments], cwd=refusing_project, env=env), *words)
    assert _files(refusing_project) == before


# Each: the strategy, a variable of the environment and its value, what the message must name.
FOREIGN = [
    ("multi_worker", "TF_CONFIG", "{", ["TF_CONFIG = '{'", "Invalid JSON"]),
    ("data_parallel", "KERAS_BACKEND", "tensorflow",
     ["KERAS_BACKEND = 'tensorflow'", "keras.distribution does nothing"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "variable", "value", "words"), FOREIGN)
def test_an_environment_that_contradicts_is_refused(digits, project, run, kind, variable, value, words):
    _refused(run(["stratagem", "run", "--set", f"strategy.kind={kind}"], env={variable: value}), *words)


def test_a_port_that_is_taken_is_refused(digits, project, run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        place = {"cluster": {"worker": [address, "127.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}
        refused = run(["stratagem", "run", "--set", "strategy.kind=multi_worker"], env={"TF_CONFIG": json.dumps(place)})
    _refused(refused, address, "Stop the process that uses it, or give the members other ports")


def test_nobody_waits_for_a_chief_that_has_nothing_to_do(digits, project, run):
    place = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 1}}
    arguments = ["stratagem", "run", "--if-changed", "--set", "strategy.kind=multi_worker"]
    _refused(run(arguments, env={"TF_CONFIG": json.dumps(place)}), "--if-changed", "strategy.launcher=local")


def test_a_folder_that_cannot_be_written_is_refused(digits, project, run):
    # Root writes where the mode forbids it, but not on a file system that is mounted read-only.
    mounted = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" "$0" && cd "$0" && exec "$@"'
    inside = ["unshare", "--mount", "sh", "-c", mounted, str(project)]
    if shutil.which("unshare") is None or run([*inside, "true"]).returncode != 0:
        pytest.skip("mounting a folder read-only is not permitted here")
    before = _files(project)
    for command in ("run", "train", "report", "ui", "up"):
        result = run([*inside, "stratagem", command], env={"PYTHONDONTWRITEBYTECODE": "1"})
        _refused(result, str(project / "data"), "cannot be written", "Read-only file system")
    assert _files(project) == before
