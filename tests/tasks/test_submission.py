"""What is handed to a cluster that someone else keeps; tests/flows/test_slurm.py hands it over."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tasks import config, records
from tasks.operations import submission
from tasks.operations.submission import kubernetes, slurm
from tasks.strategies import engines
from tasks.strategies.engines import slurm as launcher
from tasks.strategies.engines import tf_config
from tasks.system.errors import UserError


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty project, current."""
    (tmp_path / ".dvc").mkdir()
    shutil.copy("params.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def request_of(number, folder=Path("/project/mlruns/jobs/0a1b2c3d"), **options):
    sets = ["strategy.kind=multi_worker", f"strategy.workers={number}"]
    settings = config.load(None, sets)
    return settings, options, folder


def test_a_script_is_valid_and_asks_for_what_was_given(tmp_path):
    folder = tmp_path / "100% mine" / "mlruns" / "jobs" / "0a1b2c3d"
    text = slurm.write(*request_of(4, folder, nodes="2", time="01:00:00", qos="long queue"))
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True)
    assert checked.stderr == ""
    asked = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert f"chdir='{tmp_path}/100% mine'" in asked
    assert f"output='{tmp_path}/100%% mine/mlruns/jobs/0a1b2c3d/output.log'" in asked
    assert {"nodes=2", "ntasks=4", "time=01:00:00", "qos='long queue'", "signal=TERM@120", "requeue"} < set(asked)
    assert f" run '{folder}/settings.yaml'\n" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodes": "3"}, r"nodes = 3: the number of processes is 2, .*strategy.workers=3"),
        ({"nodes": "0"}, "nodes = 0: use a whole number of at least 1"),
        ({"signal": "USR1@120"}, r"signal = USR1@120: a run saves its step on TERM, INT, HUP"),
        ({"signal": "TERM"}, r"signal = TERM: .* such as TERM@120"),
        ({"max-restarts": "many"}, "max-restarts = many: use a whole number"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(UserError, match=said) as error:
        slurm.write(*request_of(2, **options))
    assert error.value.exit_code == 2


@pytest.mark.parametrize("engine", ["slurm", "kubernetes"])
@pytest.mark.parametrize("value", ["a\n#SBATCH --uid=0", "a\r#SBATCH --uid=0", "a\u2028b", "a\0b"])
def test_an_option_of_several_lines_is_refused(root, engine, value):
    settings = config.load(None, ["strategy.kind=multi_worker"])
    for name in submission.find_engine(engine).OPTIONS:
        with pytest.raises(UserError, match=rf"^{name} = 'a.*': remove line breaks and other control characters$"):
            submission.submit(engine, settings, {name: value})
    assert not (root / "mlruns").exists()


def test_a_job_without_a_checkpoint_is_not_queued_for_ever(tmp_path):
    """The script is bash' own; what it calls of Slurm says that the time is up."""
    folder = tmp_path / "mlruns" / "jobs" / "0a1b2c3d"
    (tmp_path / "mlruns" / "runs").mkdir(parents=True)
    folder.mkdir(parents=True)
    for name, text in (
        # It waits: files that are written within the same few milliseconds have the same time.
        (
            "srun",
            '[ ! -e save ] || { mkdir -p "$(cat save)" && sleep 0.1 && touch "$(cat save)/state.json"; }; exit 75',
        ),
        ("scontrol", 'echo "$@" >> told'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    script = slurm.write(*request_of(2, folder))

    def starts():
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        done = subprocess.run(
            ["bash"], input=script, text=True, capture_output=True, cwd=tmp_path, env=environment, check=False
        )
        assert done.returncode == 75
        return done.stdout

    assert "queued again" in starts()
    assert "queued again (start 2)" in starts()
    (tmp_path / "save").write_text("mlruns/runs/0a/checkpoints/3")
    assert "queued again (start 2)" in starts()
    (tmp_path / "save").unlink()
    assert [("not queued again: use more --time" in starts()) for _ in range(3)] == [False, False, True]
    assert (tmp_path / "told").read_text() == "requeue 7\n" * 5


def test_what_is_only_shown_leaves_nothing_behind(root):
    settings = config.load()
    text, job = submission.submit("slurm", settings, {}, only_write=True)
    assert text.startswith("#!/bin/bash\n")
    assert job is None
    assert not (root / "mlruns").exists()
    for engine, options, said in (
        ("sluurm", {}, "did you mean 'slurm'"),
        ("kubernetes", {"imag": "me/it"}, "mean 'image'"),
        ("slurm", {"output": "log"}, "--option output: `stratagem submit` sets --chdir, .* itself"),
        ("slurm", {"Reservation": "x"}, "option of --launcher slurm 'Reservation'"),
    ):
        with pytest.raises(UserError, match=said):
            submission.submit(engine, settings, options)


def test_slurm_gets_the_options_that_stratagem_does_not_know(root):
    text, _ = submission.submit("slurm", config.load(), {"reservation": "a b", "exclusive": ""}, only_write=True)
    assert "#SBATCH --reservation='a b'\n#SBATCH --exclusive\n" in text


def test_without_slurm_nothing_is_left_and_the_package_is_named(root, monkeypatch):
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(UserError, match=r"`sbatch` is not on the PATH. Install Slurm's commands"):
        submission.submit("slurm", config.load(), {})
    assert list((root / "mlruns/jobs").iterdir()) == []


def job_of(engine, number, submitted_at):
    of = {"id": number, "folder": f"mlruns/jobs/{number}", "submitted_at": submitted_at}
    return records.Job(engine=engine, name="digits-one_device", num_processes=1, **of)


def test_a_job_is_found_by_its_number_and_the_newest_by_latest(root):
    with pytest.raises(UserError, match=r"^no job was submitted from this project yet"):
        submission.find_job("12")
    for number in (12, 7):
        folder = root / "mlruns/jobs" / str(number)
        folder.mkdir(parents=True)
        records.save(job_of("slurm", str(number), f"2026-11-25T00:00:{number:02}+00:00"), folder / "job.json")
    assert submission.find_job("7").id == "7"
    assert submission.find_job("latest").id == "12"
    with pytest.raises(UserError, match=r"unknown job '8'\. Allowed: 12, 7"):
        submission.find_job("8")


def test_a_job_whose_engine_does_not_answer_is_unknown(root, monkeypatch):
    for name in ("one", "two"):
        (root / "mlruns/jobs" / name).mkdir(parents=True)
    job = job_of("kubernetes", "two", "2026-11-25T00:00:00+00:00")
    records.save(job, root / "mlruns/jobs/two/job.json")
    assert submission.jobs() == [job]
    monkeypatch.setenv("PATH", str(root))
    found = submission.state(job)
    assert found.state == "unknown"
    assert "`kubectl` is not on the PATH" in found.detail


# Kubernetes


@pytest.fixture
def manifests():
    """Return the manifests of a job, by kind."""

    def manifests(number, **options):
        text = kubernetes.write(*request_of(number, image="example.org/stratagem:1", claim="project", **options))
        return {one["kind"]: one for one in yaml.safe_load_all(text)}

    return manifests


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_manifests_are_those_of_kubernetes_own_schemas(manifests, version):
    more = {"service-account": "trainer", "env-from": "secrets"}
    made = manifests(8, namespace="team", cpu="4", memory="8Gi", gpus="1", **more)
    assert list(made) == ["ConfigMap", "Service", "Job"]
    for one in made.values():
        kubernetes_validate.validate(one, version, strict=True)
    # It counts pods, and where one fails all do.
    assert made["Job"]["spec"]["backoffLimit"] == 3 * 8
    (container,) = made["Job"]["spec"]["template"]["spec"]["containers"]
    assert {"name": "TF_NUM_INTRAOP_THREADS", "value": "4"} in container["env"]
    wrong = made["Job"] | {"spec": made["Job"]["spec"] | {"podFailurePolice": {}}}
    with pytest.raises(kubernetes_validate.ValidationError, match="podFailurePolice"):
        kubernetes_validate.validate(wrong, version, strict=True)


KUBECTL = """#!/bin/bash
echo "$@" >> {folder}/told
case "$*" in
  "config current-context") echo here ;;
  "get job"*) echo '{{"status": {{"active": 1, "ready": 1}}}}' ;;
  logs*) echo "[pod/x] a line" ;;
esac
"""


def test_a_job_is_asked_for_and_ended_by_its_name(root, monkeypatch):
    """kubectl is where this project ends: here it writes down what it is told."""
    (root / "kubectl").write_text(KUBECTL.format(folder=root))
    (root / "kubectl").chmod(0o700)
    monkeypatch.setenv("PATH", f"{root}:{os.environ['PATH']}")
    options = {"image": "i", "claim": "c"}
    settings = config.load(None, ["strategy.kind=multi_worker"])
    _, job = submission.submit("kubernetes", settings, options)
    assert submission.state(job).state == "Active"
    assert submission.logs(job) == "[pod/x] a line\n"
    kubernetes.cancel(job)
    told = (root / "told").read_text().splitlines()
    assert f"get job {job.id} --context here --namespace default" in "\n".join(told)
    assert any(f"job-name={job.id}," in line for line in told)
    assert told[-1].startswith(f"delete job/{job.id} service/{job.id} configmap/{job.id} --context here")


def test_a_pod_finds_the_others_and_the_settings(manifests, root, monkeypatch):
    made = manifests(3)
    name = made["Job"]["metadata"]["name"]
    (container,) = made["Job"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["stratagem", "run", "/etc/stratagem/settings.yaml"]
    (root / "settings.yaml").write_text(made["ConfigMap"]["data"]["settings.yaml"])
    settings = config.load("settings.yaml", [])
    assert settings == config.load(None, ["strategy.kind=multi_worker", "strategy.workers=3"])
    for one in container["env"]:
        monkeypatch.setenv(one["name"], one["value"])
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert engines.find_launcher(settings.strategy) is tf_config
    (member,) = engines.members(settings.strategy)
    told = json.loads(member.environment["TF_CONFIG"])
    assert told["task"] == {"type": "worker", "index": 1}
    assert told["cluster"]["worker"] == [f"{name}-{index}.{name}:2222" for index in range(3)]
    spec = made["Job"]["spec"]
    assert spec["template"]["spec"]["subdomain"] == made["Service"]["metadata"]["name"] == name
    assert spec["template"]["metadata"]["labels"] == made["Service"]["spec"]["selector"]


def test_the_jobs_of_a_parameter_server_are_told_by_rank(root, monkeypatch):
    settings = config.load(None, ["strategy.kind=parameter_server", "train.loop=custom", "strategy.workers=2"])
    cluster = {"chief": ["a:40001"], "worker": ["b:40002", "c:40003"], "ps": ["d:40004"]}
    assert engines.cluster_of(settings.strategy, ["a:40001", "b:40002", "c:40003", "d:40004"]) == cluster
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster}))
    for index, task in enumerate((("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0))):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        (member,) = engines.members(settings.strategy)
        assert json.loads(member.environment["TF_CONFIG"])["task"] == dict(zip(("type", "index"), task, strict=True))
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "4")
    with pytest.raises(UserError, match="`task` is missing, and JOB_COMPLETION_INDEX = '4' is not"):
        engines.members(settings.strategy)


def test_what_kubernetes_needs_is_asked_for(root):
    with pytest.raises(UserError, match=r"--option image=... is missing: the container image"):
        kubernetes.write(*request_of(2))
    with pytest.raises(UserError, match=r"--option claim=... is missing"):
        kubernetes.write(*request_of(2, image="one"))


# The tasks of a step


def multi_worker():
    return config.load(None, ["strategy.kind=multi_worker", "strategy.launcher=slurm"]).strategy


def test_a_process_that_is_no_task_is_told_how_to_become_one(root):
    with pytest.raises(UserError, match=r"SLURM_PROCID = '', so this process is not a task .* `stratagem submit"):
        launcher.members(multi_worker())


def test_a_step_of_several_tasks_is_slurms_without_being_told(root, monkeypatch):
    section = config.load(None, ["strategy.kind=multi_worker"]).strategy
    assert engines.find_launcher(section).STARTS_ALL
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # A batch script's own.
    assert engines.find_launcher(section).STARTS_ALL
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert engines.find_launcher(section) is launcher
    monkeypatch.setenv("TF_CONFIG", "{}")
    assert engines.find_launcher(section) is not launcher


@pytest.fixture
def step(root, monkeypatch):
    """Be a task of a step of seven on four nodes, whose addresses Slurm tells."""
    told = "".join(f"NodeName=n{node} Arch=x86_64 NodeAddr=10.0.0.{node} NodeHostName=n{node}\\n" for node in range(4))
    (root / "scontrol").write_text(f"#!/bin/sh\nprintf '{told}'\n")
    (root / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(root), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "1207")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[0-3]")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "7")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x3),1")

    def be(task, node):
        monkeypatch.setenv("SLURM_PROCID", str(task))
        monkeypatch.setenv("SLURM_NODEID", str(node))

    return be


def test_tasks_are_on_their_nodes_in_order_each_with_a_port_of_its_own(step):
    step(4, 2)
    (member,) = launcher.members(multi_worker())
    told = json.loads(member.environment["TF_CONFIG"])
    assert told["task"]["index"] == 4
    first = 20_000 + 120_700 % 12_000
    assert told["cluster"]["worker"] == [f"10.0.0.{task // 2}:{first + task}" for task in range(7)]
    assert "TF_NUM_INTRAOP_THREADS" not in member.environment


# Each: the settings of the strategy, and the GPUs that each process is to have where no option says it.
GPUS = [
    (["strategy.kind=multi_worker"], None),
    (["strategy.kind=multi_worker", "strategy.devices=2"], "2"),
    (["strategy.kind=data_parallel", "strategy.workers=2", "strategy.devices=2"], None),  # Perhaps forced CPU devices.
    (["strategy.kind=model_parallel", "strategy.workers=2", "strategy.mesh_shape=[2,2]"], None),
]


@pytest.mark.parametrize(("sets", "gpus"), GPUS)
def test_a_process_has_the_gpus_of_the_settings_unless_its_devices_may_be_forced_on_a_cpu(sets, gpus):
    settings, folder = config.load(None, sets), Path("/project/mlruns/jobs/0a1b2c3d")
    of_pods = {"image": "example.org/stratagem:1", "claim": "project"}

    def asked(**options):
        script = slurm.write(settings, options, folder)
        found = re.search("^#SBATCH --gpus-per-task=(.*)$", script, re.MULTILINE)
        options = {"gpus": options["gpus-per-task"]} if options else {}
        *_, job = yaml.safe_load_all(kubernetes.write(settings, of_pods | options, folder))
        (container,) = job["spec"]["template"]["spec"]["containers"]
        return found and found[1], container["resources"]["limits"].get("nvidia.com/gpu")

    assert asked() == (gpus, gpus)
    assert asked(**{"gpus-per-task": "4"}) == ("4", "4")
