"""deploy/: what can be known of it without a service manager and a container runtime."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_systemd_takes_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    # What it starts must be there: the project's folder is the reader's.
    text = (DEPLOY / "stratagem.service").read_text().replace("%h/stratagem/.venv/bin/stratagem", sys.executable)
    (tmp_path / "stratagem.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", tmp_path / "stratagem.service"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_is_published_beyond_this_machine_and_no_password_is_written_down(compose):
    for name, service in compose["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        assert service["restart"] == "unless-stopped"
        for variable, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|AUTH_STRING", variable) and variable != "MLFLOW_AUTH_CONFIG_PATH":
                assert re.search(r"\$\{\w+(:\?[^}]*)?\}$", value), f"{name}: {variable}"
        said = str([service.get(key) for key in ("command", "entrypoint", "healthcheck")])
        assert not re.search("PASSWORD|SECRET", said), f"{name}: every user of the machine reads a command line"
        image = service.get("image", "")
        assert "build" in service or re.search(r":[\w.-]*\d", image), f"{name}: another image each day"


def test_no_password_goes_into_an_image():
    left_out = set((DEPLOY / "Dockerfile.dockerignore").read_text().splitlines())
    assert {".git", ".dvc/config.local", "deploy/.env", "**/.env", "mlruns"} <= left_out


def test_what_a_service_names_is_there(compose):
    for name, service in compose["services"].items():
        assert service.get("depends_on", {}).keys() <= compose["services"].keys(), name
        for needed, how in service.get("depends_on", {}).items():
            if how["condition"] == "service_healthy":
                assert "healthcheck" in compose["services"][needed], f"{name} waits for ever for {needed}"
        assert set(service["networks"]) <= compose["networks"].keys()
        assert {config["source"] for config in service.get("configs", ())} <= compose["configs"].keys()
        assert {volume.partition(":")[0] for volume in service.get("volumes", ())} <= compose["volumes"].keys()
        if "build" in service:
            assert f"AS {service['build']['target']}\n" in (DEPLOY / "Dockerfile").read_text()
    asked = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text()))
    assert asked == set(re.findall(r"^(\w+)=", (DEPLOY / "environment.example").read_text(), re.MULTILINE))


def test_the_images_have_the_versions_of_the_lock(compose):
    lock = (DEPLOY.parent / "requirements.lock").read_text()
    (prefect,) = re.findall(r"^prefect==(\S+)", lock, re.MULTILINE)
    (mlflow,) = re.findall(r"^mlflow==(\S+)", lock, re.MULTILINE)
    assert compose["services"]["prefect"]["image"] == f"prefecthq/prefect:{prefect}-python3.11"
    assert f"mlflow[auth]=={mlflow}" in (DEPLOY / "Dockerfile").read_text()


def test_the_image_for_gpus_has_what_the_lock_has_and_cudas_libraries():
    """Its commands on the lock, as far as they install nothing; a container runtime is not at hand."""
    image = (DEPLOY / "Dockerfile").read_text().partition("AS cuda\n")[2]
    (locked,) = re.findall(r"^RUN (grep .*) > /tmp/constraints.txt", image, re.MULTILINE)
    shell = ["bash", "-euo", "pipefail", "-c"]
    made, *wanted = (
        subprocess.run([*shell, line], cwd=DEPLOY.parent, capture_output=True, text=True, check=True)
        for line in (locked, *re.findall(r'"\$\((.*)\)"', image))
    )
    constraints = made.stdout.splitlines()
    assert all(Requirement(line).specifier for line in constraints)
    assert [one.stdout.strip().partition("==")[0] for one in wanted] == ["tensorflow[and-cuda]", "jax[cuda12]"]
    for one in wanted:
        name, _, locked = one.stdout.strip().partition("==")
        assert f"{name.partition('[')[0]}=={locked}" in constraints


def test_a_pod_of_prefects_is_what_kubernetes_takes():
    """The pool's template, filled in as Prefect does; its worker, which is not part of the lock, was tried by hand."""
    template = json.loads((DEPLOY / "kubernetes-pool.json").read_text())
    given = {
        "image": "example.org/stratagem:1",
        "claim": "project",
        "name": "run",
        "command": "prefect flow-run execute",
    }
    given |= {"env": [{"name": "A", "value": "b"}], "labels": {"a": "b"}}
    variables = template["variables"]["properties"]
    assert set(template["variables"]["required"]) <= given.keys()
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == variables.keys()
    values = {name: about.get("default") for name, about in variables.items()} | given

    def filled(node):
        if isinstance(node, dict):
            return {key: filled(value) for key, value in node.items()}
        if isinstance(node, list):
            return [filled(value) for value in node]
        whole = re.fullmatch(r"\{\{ (\w+) \}\}", node) if isinstance(node, str) else None
        if whole:
            return values[whole[1]]
        return re.sub(r"\{\{ (\w+) \}\}", lambda found: values[found[1]], node) if isinstance(node, str) else node

    manifest = filled(template["job_configuration"]["job_manifest"])
    pod = manifest["spec"]["template"]["spec"]
    pod["containers"][0]["args"] = given["command"].split()
    # prefect-kubernetes asks for both at this place, and the cluster leaves out what it does not know.
    assert (pod.pop("parallelism"), pod.pop("completions")) == (1, 1)
    for version in ("1.31", "1.37"):
        kubernetes_validate.validate(manifest, version, strict=True)
    (deployment,) = yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())["deployments"]
    assert template["variables"]["required"] == list(deployment["work_pool"]["job_variables"])
    file, _, flow = deployment["entrypoint"].partition(":")
    assert f"def {flow}(" in (DEPLOY.parent / file).read_text()
