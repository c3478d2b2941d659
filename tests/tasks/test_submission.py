"""What is handed to a cluster that someone else keeps; tests/flows/test_slurm.py hands it over."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tasks import config, records
from tasks.operations import submission
from tasks.operations.submission import Request, kubernetes, slurm
from tasks.strategies import engines
from tasks.strategies.engines import kubernetes as pods
from tasks.strategies.engines import slurm as launcher
from tasks.system.errors import UserError

JOBSET = Path(__file__).with_name("jobset.yaml")


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
    return Request("digits-multi_worker", settings, options, folder)


def test_a_script_is_valid_and_asks_for_what_was_given(tmp_path):
    folder = tmp_path / "100% mine" / "mlruns" / "jobs" / "0a1b2c3d"
    text = slurm.write(request_of(4, folder, nodes="2", time="01:00:00", qos="long queue"))
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True)
    assert checked.stderr == ""
    asked = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert f"chdir='{tmp_path}/100% mine'" in asked
    assert f"output='{tmp_path}/100%% mine/mlruns/jobs/0a1b2c3d/output.log'" in asked
    assert {"nodes=2", "ntasks=4", "time=01:00:00", "qos='long queue'", "signal=TERM@120", "requeue"} < set(asked)
    assert f" run '{folder}/settings.yaml'\n" in text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("01:00:00", 3600),
        ("1-0", 86_400),
        ("2-03:04", 183_840),
        ("0-0:0:5", 5),
        ("UNLIMITED", float("inf")),
    ],
)
def test_times_are_read_as_sbatch_reads_them(text, seconds):
    assert slurm.seconds(text) == seconds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"time": "an hour"}, "time = an hour: it is no time"),
        ({"time": "3"}, r"time = 3: the signal to stop comes 120 to 180 s before the end .* nothing might be trained"),
        ({"nodes": "3"}, r"nodes = 3: the number of processes is 2, .*strategy.workers=3"),
        ({"nodes": "0"}, "nodes = 0: give a number from 1 on"),
        ({"signal": "USR1@120"}, r"signal = USR1@120: a run saves its step on TERM, INT, HUP"),
        ({"signal": "TERM"}, r"signal = TERM: .* such as TERM@120"),
        ({"max-restarts": "many"}, "max-restarts = many: give a number"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(UserError, match=said) as error:
        slurm.write(request_of(2, **options))
    assert error.value.exit_code == 2


# As `sinfo` tells of them: name, nodes, cores of each, longest time, nodes of a job.
PARTITIONS = (
    "main*|2|4|1:00:00|1-2\nmain*|6|8|1:00:00|1-2\nopen|8|4|infinite|1-infinite\nlarge|3|8+|7-00:00:00|1-infinite\n"
)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"nodes": "3", "ntasks": "3"}, "nodes = 3: partition main gives a job 2 at most"),
        (
            {"nodes": "2", "ntasks": "2", "time": "01:00:01"},
            "time = 01:00:01: partition main gives a job 1:00:00 at most",
        ),
        ({"nodes": "2", "ntasks": "2", "time": "unlimited"}, "time = unlimited: partition main"),
        ({"nodes": "1", "ntasks": "3", "cpus-per-task": "4"}, "3 processes with 4 cores each need 12, .* have 8"),
        ({"nodes": "9", "ntasks": "9", "partition": "open"}, "nodes = 9: partition open gives a job 8"),
        ({"nodes": "2", "ntasks": "2", "time": "60"}, None),
        ({"nodes": "2", "ntasks": "4", "cpus-per-task": "4"}, None),
        ({"nodes": "3", "ntasks": "3", "partition": "main,open", "time": "9-0"}, None),
        ({"nodes": "1", "ntasks": "9", "partition": "large"}, None),
    ],
)
def test_what_would_wait_for_ever_is_refused(monkeypatch, tmp_path, asked, said):
    named = asked.get("partition", "main,open,large").split(",")
    lines = [line for line in PARTITIONS.splitlines() if line.split("|")[0].rstrip("*") in named]
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if said is None:
        slurm.check_partition(asked)
    else:
        with pytest.raises(UserError, match=said):
            slurm.check_partition(asked)


def test_a_job_without_a_checkpoint_is_not_queued_for_ever(tmp_path):
    """The script is bash' own; what it calls of Slurm says that the time is up."""
    folder = tmp_path / "mlruns" / "jobs" / "0a1b2c3d"
    (tmp_path / "mlruns" / "runs").mkdir(parents=True)
    folder.mkdir(parents=True)
    for name, text in (
        ("srun", '[ ! -e save ] || { mkdir -p "$(cat save)" && touch "$(cat save)/state.json"; }; exit 75'),
        ("scontrol", 'echo "$@" >> told'),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    script = slurm.write(request_of(2, folder))

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
    assert [("not queued again: give more --time" in starts()) for _ in range(3)] == [False, False, True]
    assert (tmp_path / "told").read_text() == "requeue 7\n" * 5


def test_what_is_only_shown_leaves_nothing_behind(root):
    settings = config.load()
    text, job = submission.submit("slurm", settings, {}, only_write=True)
    assert text.startswith("#!/bin/bash\n")
    assert job is None
    assert not (root / "mlruns").exists()
    for engine, options, said in (("sluurm", {}, "did you mean 'slurm'"), ("slurm", {"noodes": "2"}, "mean 'nodes'")):
        with pytest.raises(UserError, match=said):
            submission.submit(engine, settings, options)


def test_without_slurm_nothing_is_left_and_the_package_is_named(root, monkeypatch):
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(UserError, match=r"`sinfo` is not on the PATH. Install Slurm's commands"):
        submission.submit("slurm", config.load(), {})
    assert list((root / "mlruns/jobs").iterdir()) == []


def test_a_job_is_found_by_its_number_and_the_newest_by_latest(root):
    with pytest.raises(UserError, match="None was submitted from this project"):
        submission.find_job("12")
    for number in (12, 7):
        folder = root / "mlruns/jobs" / str(number)
        folder.mkdir(parents=True)
        moment = f"2026-11-25T00:00:{number:02}+00:00"
        job = records.Job(
            engine="slurm",
            id=str(number),
            name="digits-one_device",
            folder=f"mlruns/jobs/{number}",
            num_processes=1,
            submitted_at=moment,
        )
        records.save(job, folder / "job.json")
    assert submission.find_job("7").id == "7"
    assert submission.find_job("latest").id == "12"
    with pytest.raises(UserError, match="unknown job '8': Allowed: 12, 7"):
        submission.find_job("8")


def test_one_job_that_nobody_knows_of_hides_no_other(root, monkeypatch, capsys):
    for name in ("one", "two"):
        (root / "mlruns/jobs" / name).mkdir(parents=True)
    (root / "mlruns/jobs/one/job.json").write_text("{")
    job = records.Job(
        engine="kubernetes",
        id="there",
        name="digits-one_device",
        folder="mlruns/jobs/two",
        num_processes=1,
        submitted_at="2026-11-25T00:00:00+00:00",
    )
    records.save(job, root / "mlruns/jobs/two/job.json")
    assert submission.jobs() == [job]
    assert "one/job.json is damaged" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(root))
    found = submission.state(job)
    assert found.state == "unknown"
    assert "`kubectl` is not on the PATH" in found.detail


# Kubernetes


@pytest.fixture
def manifests():
    """Return the manifests of a job, by kind."""

    def manifests(number, **options):
        folder = Path("/project/mlruns/jobs/0a1b2c3d")
        text = kubernetes.write(request_of(number, folder, image="example.org/stratagem:1", claim="project", **options))
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


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_a_jobset_starts_all_again_together(manifests, version, root, monkeypatch):
    """Its schema is not Kubernetes' own, see below: the Job in it is."""
    made = manifests(3, jobset="true", namespace="team", **{"max-restarts": "5"})
    assert list(made) == ["ConfigMap", "JobSet"]
    name, spec = made["JobSet"]["metadata"]["name"], made["JobSet"]["spec"]
    (group,) = spec["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"{name}-{group['name']}-0"}}
    job |= {"spec": group["template"]["spec"]}
    kubernetes_validate.validate(job, version, strict=True)
    assert spec["failurePolicy"]["maxRestarts"] == 5
    assert job["spec"]["backoffLimit"] == 0, "the first pod that fails ends the Job, which the JobSet starts again"
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet", "but for one that refused its input"
    (container,) = job["spec"]["template"]["spec"]["containers"]
    for one in container["env"]:
        monkeypatch.setenv(one["name"], one["value"])
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
    (member,) = pods.members(config.load(None, ["strategy.kind=multi_worker", "strategy.workers=3"]).strategy)
    cluster = json.loads(member.environment["TF_CONFIG"])["cluster"]["worker"]
    assert cluster == [f"{name}-{group['name']}-0-{index}.{spec['network']['subdomain']}:2222" for index in range(3)]
    assert max(len(one.partition(".")[0]) for one in cluster) <= 63
    with pytest.raises(UserError, match="jobset = yes: give true or false"):
        manifests(3, jobset="yes")


def strict(schema):
    """Return a schema by which an object has no other keys than it names, as ``kubectl`` asks the server for."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return {key: strict(value) for key, value in schema.items()} | closed


@pytest.mark.parametrize("options", [{}, {"namespace": "team", "max-restarts": "5", "grace": "60", "gpus": "1"}])
def test_a_jobset_is_that_of_jobsets_own_schema(manifests, options):
    validator = jsonschema.Draft202012Validator(strict(yaml.safe_load(JOBSET.read_text())))
    made = manifests(3, jobset="true", **options)["JobSet"]
    validator.validate(made)
    for key, value, said in (
        ("network", {"publishNotReadyAddress": True}, "publishNotReadyAddress"),
        ("failurePolicy", {"maxRestarts": "5"}, "is not of type 'integer'"),
        ("failurePolicy", {"rules": [{"name": "refused", "action": "FailJob"}]}, "'FailJob' is not one of"),
        ("replicatedJobs", [{"replicas": 1, "template": {}}], "'name' is a required property"),
        ("completions", 3, "completions"),
    ):
        with pytest.raises(jsonschema.ValidationError, match=said):
            validator.validate(made | {"spec": made["spec"] | {key: value}})


KUBECTL = """#!/bin/bash
echo "$@" >> {folder}/told
case "$*" in
  "config current-context") echo here ;;
  "get jobset"*) echo '{{"status": {{"replicatedJobsStatus": [{{"name": "members", "active": 1}}]}}}}' ;;
  logs*) echo "[pod/x] a line" ;;
esac
"""


def test_a_jobset_is_asked_for_and_ended_by_its_own_name(root, monkeypatch):
    """kubectl is where this project ends: here it writes down what it is told."""
    (root / "kubectl").write_text(KUBECTL.format(folder=root))
    (root / "kubectl").chmod(0o700)
    monkeypatch.setenv("PATH", f"{root}:{os.environ['PATH']}")
    options = {"image": "i", "claim": "c", "jobset": "true"}
    settings = config.load(None, ["strategy.kind=multi_worker"])
    _, job = submission.submit("kubernetes", settings, options)
    assert submission.state(job).state == "Active"
    assert submission.logs(job) == "[pod/x] a line\n"
    kubernetes.cancel(job)
    told = (root / "told").read_text().splitlines()
    assert f"get jobset {job.id} --context here --namespace default" in "\n".join(told)
    assert any(f"job-name={job.id}-members-0," in line for line in told)
    assert told[-1].startswith(f"delete jobset/{job.id} configmap/{job.id} --context here")


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
    assert engines.find_launcher(settings.strategy) is pods
    (member,) = pods.members(settings.strategy)
    told = json.loads(member.environment["TF_CONFIG"])
    assert told["task"] == {"type": "worker", "index": 1}
    assert told["cluster"]["worker"] == [f"{name}-{index}.{name}:2222" for index in range(3)]
    spec = made["Job"]["spec"]
    assert spec["template"]["spec"]["subdomain"] == made["Service"]["metadata"]["name"] == name
    assert spec["template"]["metadata"]["labels"] == made["Service"]["spec"]["selector"]


def test_the_jobs_of_a_parameter_server_are_told_by_rank(root, monkeypatch):
    settings = config.load(None, ["strategy.kind=parameter_server", "train.loop=custom", "strategy.workers=2"])
    monkeypatch.setenv("STRATAGEM_POD_ADDRESSES", "a:40001,b:40002,c:40003,d:40004")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    (member,) = pods.members(settings.strategy)
    assert json.loads(member.environment["TF_CONFIG"]) == {
        "cluster": {"chief": ["a:40001"], "worker": ["b:40002", "c:40003"], "ps": ["d:40004"]},
        "task": {"type": "ps", "index": 0},
    }
    monkeypatch.setenv("STRATAGEM_POD_ADDRESSES", "a:40001,b:40002,c:40003")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    with pytest.raises(UserError, match="with the chief these are 4 processes, and the Indexed Job has 3"):
        pods.members(settings.strategy)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    with pytest.raises(UserError, match="not a pod of an Indexed Job"):
        pods.members(settings.strategy)


def test_what_kubernetes_needs_is_asked_for(root):
    with pytest.raises(UserError, match=r"--option image=... is missing: the container image"):
        kubernetes.write(request_of(2))
    with pytest.raises(UserError, match=r"--option claim=... is missing"):
        kubernetes.write(request_of(2, image="one"))


# The tasks of a step


def multi_worker():
    return config.load(None, ["strategy.kind=multi_worker", "strategy.launcher=slurm"]).strategy


def test_a_process_that_is_no_task_is_told_how_to_become_one(root):
    with pytest.raises(UserError, match=r"SLURM_PROCID = '', so this process is not a task .* `stratagem submit"):
        launcher.members(multi_worker())


@pytest.mark.parametrize("written", ["other", None])
def test_a_folder_that_the_nodes_do_not_share_is_refused(root, monkeypatch, written):
    for name, value in (("SLURM_PROCID", "1"), ("SLURM_STEP_NUM_TASKS", "2"), (launcher.TOKEN, f"{root}/token:mine")):
        monkeypatch.setenv(name, value)
    if written is not None:
        (root / "token").write_text(written)
    with pytest.raises(UserError, match=r"token on .* is not what `stratagem submit` wrote there"):
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


def test_tasks_in_another_order_are_refused(step):
    step(1, 1)  # --distribution=cyclic
    with pytest.raises(UserError, match=r"task 1 is on node 1 of the step.* Give srun --distribution=block"):
        launcher.members(multi_worker())


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
        script = slurm.write(Request("x", settings, options, folder))
        found = re.search("^#SBATCH --gpus-per-task=(.*)$", script, re.MULTILINE)
        options = {"gpus": options["gpus-per-task"]} if options else {}
        *_, job = yaml.safe_load_all(kubernetes.write(Request("x", settings, of_pods | options, folder)))
        (container,) = job["spec"]["template"]["spec"]["containers"]
        return found and found[1], container["resources"]["limits"].get("nvidia.com/gpu")

    assert asked() == (gpus, gpus)
    assert asked(**{"gpus-per-task": "4"}) == ("4", "4")
