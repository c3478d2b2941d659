"""deploy/: what can be known of it without a service manager and a container runtime."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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
        image = service.get("image", "")
        assert "build" in service or re.search(r":[\w.-]*\d", image), f"{name}: another image each day"


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
