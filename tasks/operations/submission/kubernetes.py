"""Kubernetes: passes kubernetes.yaml.j2 to `kubectl`: an Indexed Job with a pod for each process, a headless service
that gives the pods names, and a config map with the settings.

The pods' exit codes decide: after 75 and 143 a stopped pod starts again; 2 is a mistake that another start would
repeat (https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy).
"""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tasks import config, records
from tasks.operations.submission import ask, name_of, number, recipe_of, render
from tasks.strategies.engines import cluster_of, threads_of
from tasks.system.errors import StratagemError, UserError

FILE = "job.yaml"
LAUNCHER = "tf_config"
OPTIONS = {
    "image": "the container image with this project's packages, built from deploy/Dockerfile; required",
    "claim": "the PersistentVolumeClaim with the project's folder, to which all pods can write; required",
    "namespace": "the namespace; by default that of kubectl's context",
    "cpu": "processor cores of each pod, such as 4",
    "memory": "memory of each pod, such as 8Gi",
    "gpus": "GPUs of each pod (nvidia.com/gpu); by default strategy.devices of multi_worker, and none on JAX",
    "service-account": "the service account of the pods",
    "env-from": "the Secret whose values become variables of the pods, such as MLFLOW_TRACKING_URI",
    "grace": "seconds between SIGTERM and SIGKILL; by default 120",
    "max-restarts": "how often all pods may restart after a failure; by default 3 times",
}
PORT = 2222
NAMESPACE = "jsonpath={..namespace}"


def write(settings: config.Settings, given: Mapping[str, str], folder: Path) -> str:
    """Return the manifests of a job with these options and this folder, as a YAML stream.

    Raises:
        UserError: an option has a wrong value, or one that is needed is missing.
    """
    options = dict(given)
    for name in ("image", "claim"):
        if name not in options:
            raise UserError(f"launcher kubernetes: --option {name}=... is missing: {OPTIONS[name]}")
    # A pod's name, the job's with an index, is a DNS label: 63 characters at most.
    plain = re.sub(r"[^a-z0-9]+", "-", name_of(settings).lower()).strip("-")[:30]
    name = f"stratagem-{plain}-{folder.name}"
    addresses = [f"{name}-{index}.{name}:{PORT}" for index in range(settings.strategy.num_processes)]
    environment = {}
    if (section := settings.strategy.cluster) is not None:
        environment["TF_CONFIG"] = json.dumps({"cluster": cluster_of(section, addresses)})
    if (cpu := options.get("cpu", "")).isdecimal():  # TensorFlow would start a thread for each core of the node.
        environment |= threads_of(int(cpu))
    gpus = options.get("gpus") or settings.strategy.required_gpus
    asked = {"cpu": options.get("cpu"), "memory": options.get("memory"), "nvidia.com/gpu": gpus}
    return render(
        "kubernetes.yaml.j2",
        name=name,
        label=folder.name,
        recipe=recipe_of(settings),
        addresses=addresses,
        environment=environment,
        resources={key: str(value) for key, value in asked.items() if value is not None},
        port=PORT,
        max_restarts=number(options, "max-restarts", 3),
        grace=number(options, "grace", 120),
        options=options,
    )


def submit(file: Path) -> tuple[str, tuple[str, ...]]:
    """Apply the manifests; return the job's name, and kubectl's options for its context and namespace.

    Raises:
        UserError: kubectl is not installed, or the cluster refuses the job.
        StratagemError: the cluster does not answer.
    """
    metadata = {one["kind"]: one["metadata"] for one in yaml.safe_load_all(file.read_text())}["Job"]
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


def state(job: records.Job) -> tuple[str, str]:
    """Return the Job's latest condition, or how many pods are ready; ("", "") for a job that is gone.

    Raises:
        StratagemError: the cluster does not answer.
    """
    told = _kubectl(["get", "job", job.id, *job.place, "--ignore-not-found", "--output", "json"])
    if not told.strip():
        return "", ""
    status = json.loads(told).get("status", {})
    for condition in reversed(status.get("conditions", [])):
        if condition["status"] == "True":
            return condition["type"], condition.get("reason", "")
    details = f"{status.get('ready', 0)} of {job.num_processes} pods ready"
    return ("Active" if status.get("active") else "Pending"), details


def cancel(job: records.Job) -> None:
    """Delete a Job with its service and config map; Kubernetes stops its pods, which save their step.

    Raises:
        StratagemError: the cluster does not answer, or refuses.
    """
    _kubectl(["delete", *(f"{kind}/{job.id}" for kind in ("job", "service", "configmap")), *job.place, "--wait=false"])


def logs(job: records.Job) -> str | None:
    """Return the output of the chief's pods, because the others print little; None if none has begun.

    Raises:
        StratagemError: the cluster does not answer.
    """
    first = f"batch.kubernetes.io/job-name={job.id},batch.kubernetes.io/job-completion-index=0"
    try:
        return _kubectl(["logs", "--selector", first, "--tail=-1", "--prefix", "--ignore-errors", *job.place]) or None
    except UserError as error:
        if "waiting to start" in str(error):
            return None
        raise


def _kubectl(arguments: Sequence[str]) -> str:
    install = "Install it, or print the manifests with --dry-run and apply them where it is installed"
    silent = ("refused", "Unable to connect", "no such host", "i/o timeout")
    return ask("kubernetes", ["kubectl", *arguments], install, silent, "kubectl cluster-info")
