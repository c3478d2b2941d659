"""Kubernetes: hands kubernetes.yaml.j2 to `kubectl`. It is an Indexed Job with a pod for each process, a headless
service that gives the pods names, and a config map with the settings.

Or it is a JobSet of that one Job, if the cluster has its controller: it makes the service, and starts all pods again
together when one has failed (https://jobset.sigs.k8s.io/docs/concepts/).

The pods' exit codes decide: 75 and 143 are "told to stop, start it again", 2 is a mistake that another start would
repeat (https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy).
"""

import contextlib
import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml

from tasks import config, records
from tasks.operations.submission import Request, number, render
from tasks.strategies.engines import threads_of
from tasks.strategies.engines.kubernetes import ADDRESSES
from tasks.system.errors import StratagemError, UserError

FILE = "job.yaml"
OPTIONS = {
    "image": "the container image with this project's packages, as deploy/Dockerfile makes it; always needed",
    "claim": "the PersistentVolumeClaim with the project's folder, which all pods can write; always needed",
    "namespace": "where; that of kubectl's context without it",
    "cpu": "processor cores of each pod, such as 4",
    "memory": "of each pod, such as 8Gi",
    "gpus": "GPUs of each pod (nvidia.com/gpu); without it strategy.devices of multi_worker, and none on JAX",
    "service-account": "under which the pods run",
    "env-from": "the Secret whose values the pods have as variables, such as MLFLOW_TRACKING_URI",
    "grace": "seconds between the signal to stop and the end; without it 120",
    "max-restarts": "how often all may restart after a failure; without it 3 times",
    "jobset": "true hands over a JobSet, whose controller the cluster must have",
}
PORT = 2222
NAMESPACE = "jsonpath={..namespace}"
# A JobSet's only Job: its pods are called NAME-JOB-0-0, NAME-JOB-0-1.
JOB = "members"


def write(request: Request) -> str:
    """Return the manifests, as a YAML stream.

    Raises:
        UserError: an option has a wrong value, or one that is needed is missing.
    """
    options = dict(request.options)
    for name in ("image", "claim"):
        if name not in options:
            raise UserError(f"launcher kubernetes: --option {name}=... is missing: {OPTIONS[name]}")
    if (jobset := options.get("jobset", "false")) not in ("true", "false"):
        raise UserError(f"jobset = {jobset}: give true or false")
    # A pod's name is the job's and its index, and a label of DNS: 63 letters at most.
    plain = re.sub(r"[^a-z0-9]+", "-", request.name.lower()).strip("-")[:30]
    name = f"stratagem-{plain}-{request.folder.name}"
    pods = f"{name}-{JOB}-0-" if jobset == "true" else f"{name}-"
    addresses = [f"{pods}{index}.{name}:{PORT}" for index in range(request.num_processes)]
    environment = {ADDRESSES: ",".join(addresses)} if len(addresses) > 1 else {}
    if (cpu := options.get("cpu", "")).isdecimal():  # TensorFlow would start a thread for each core of the node.
        environment |= threads_of(int(cpu))
    gpus = options.get("gpus") or request.settings.strategy.required_gpus
    asked = {"cpu": options.get("cpu"), "memory": options.get("memory"), "nvidia.com/gpu": gpus}
    return render(
        "kubernetes.yaml.j2",
        name=name,
        label=request.folder.name,
        recipe=request.recipe,
        jobset=JOB if jobset == "true" else None,
        addresses=addresses,
        environment=environment,
        resources={key: str(value) for key, value in asked.items() if value is not None},
        port=PORT,
        max_restarts=number(options, "max-restarts", 3),
        grace=number(options, "grace", 120),
        options=options,
    )


def submit(file: Path) -> tuple[str, tuple[str, ...]]:
    """Hand the manifests to kubectl; return the job's name, and kubectl's options for its context and namespace.

    Raises:
        UserError: kubectl is not installed, or the cluster refuses the job.
        StratagemError: the cluster does not answer.
    """
    kinds = {one["kind"]: one["metadata"] for one in yaml.safe_load_all(file.read_text())}
    metadata = kinds.get("Job") or kinds["JobSet"]
    place = ["--context", _kubectl(["config", "current-context"]).strip()]
    namespace = metadata.get("namespace") or _kubectl(["config", "view", "--minify", "--output", NAMESPACE]).strip()
    place += ["--namespace", namespace or "default"]
    try:
        _kubectl(["apply", *place, "--filename", str(file)])
    except StratagemError:
        with contextlib.suppress(StratagemError):
            _kubectl(["delete", *place, "--filename", str(file), "--ignore-not-found", "--wait=false"])
        raise
    return metadata["name"], tuple(place)


def _kind(job: records.Job) -> str:
    """Return the kind of object that was handed over, `job` or `jobset`."""
    with contextlib.suppress(OSError):  # Somebody removed the file; most are jobs.
        if "\nkind: JobSet\n" in (config.project_root() / job.folder / FILE).read_text(encoding="utf-8"):
            return "jobset"
    return "job"


def state(job: records.Job) -> tuple[str, str]:
    """Return the Job's latest condition, or how many pods are ready; ("", "") for a job that is gone.

    Raises:
        StratagemError: the cluster does not answer.
    """
    told = _kubectl(["get", _kind(job), job.id, *job.place, "--ignore-not-found", "--output", "json"])
    if not told.strip():
        return "", ""
    status = json.loads(told).get("status", {})
    for condition in reversed(status.get("conditions", [])):
        if condition["status"] == "True":
            return condition["type"], condition.get("reason", "")
    replicated = status.get("replicatedJobsStatus")  # A JobSet counts Jobs, a Job counts pods.
    (counted,) = replicated or (status,)
    details = "" if replicated else f"{status.get('ready', 0)} of {job.num_processes} pods ready"
    return ("Active" if counted.get("active") else "Pending"), details


def cancel(job: records.Job) -> None:
    """Delete a Job or a JobSet with its service and config map; Kubernetes tells its pods to stop, and they save their
    step.

    Raises:
        StratagemError: the cluster does not answer, or refuses.
    """
    name, kind = job.id, _kind(job)
    others = [f"configmap/{name}"] if kind == "jobset" else [f"service/{name}", f"configmap/{name}"]
    _kubectl(["delete", f"{kind}/{name}", *others, *job.place, "--wait=false"])


def logs(job: records.Job) -> str | None:
    """Return what the chief's pods have printed, as the others print little; None if none has begun.

    Raises:
        StratagemError: the cluster does not answer.
    """
    name = f"{job.id}-{JOB}-0" if _kind(job) == "jobset" else job.id
    first = f"batch.kubernetes.io/job-name={name},batch.kubernetes.io/job-completion-index=0"
    try:
        return _kubectl(["logs", "--selector", first, "--tail=-1", "--prefix", "--ignore-errors", *job.place]) or None
    except UserError as error:
        if "waiting to start" in str(error):
            return None
        raise


def _kubectl(arguments: Sequence[str]) -> str:
    try:
        done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise UserError(
            "launcher kubernetes: `kubectl` is not on the PATH. Install it, or print the manifests with --dry-run and "
            "hand them over where it is"
        ) from None
    except subprocess.TimeoutExpired:
        raise StratagemError("launcher kubernetes: `kubectl` gave no answer within 120 s") from None
    if done.returncode == 0:
        return done.stdout
    said = " ".join(done.stderr.split())
    if any(words in said for words in ("refused", "Unable to connect", "no such host", "i/o timeout")):
        raise StratagemError(
            f"launcher kubernetes: the cluster does not answer ({said}). `kubectl cluster-info` says more"
        )
    raise UserError(f"launcher kubernetes: `kubectl {arguments[0]}` fails ({said})")
