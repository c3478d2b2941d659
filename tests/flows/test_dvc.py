"""`dvc repro` for real: what runs, and what is left alone."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow


def test_dvc_repro_runs_what_changed_and_nothing_else(project: Path, run: Callable[..., object]) -> None:
    def change(path: str, section: str, key: str, value: object) -> None:
        values = yaml.safe_load((project / path).read_text())
        values[section][key] = value
        (project / path).write_text(yaml.safe_dump(values))

    def repro() -> list[str]:
        done = run(["dvc", "repro"])
        assert done.returncode == 0, done.stderr
        return [line.split("'")[1].split(":")[-1] for line in done.stdout.splitlines() if line.startswith("Running")]

    change("params.yaml", "train", "epochs", 2)
    assert repro() == ["download", "prepare", "train", "evaluate"]
    training = json.loads((project / "metrics" / "training.json").read_text())
    assert training["epochs"] == 2
    assert (project / training["checkpoint"]).is_dir()
    assert repro() == []

    shown = run(["dvc", "metrics", "show", "--json"])
    accuracy = next(iter(json.loads(shown.stdout).values()))["data"]["metrics/test.json"]["data"]["test"]["accuracy"]
    assert 0.1 < accuracy <= 1
    plots = run(["dvc", "plots", "show", "--out", "plots"])
    assert plots.returncode == 0, plots.stderr
    page = (project / "plots" / "index.html").read_text()
    assert all(name in page for name in ("confusion matrix", "validation/accuracy", "train/loss"))

    change("params.yaml", "train", "epochs", 1)
    assert repro() == ["train", "evaluate"]
    change("data/digits/params.yaml", "dataset", "image_size", [16, 16])
    assert repro() == ["prepare", "train", "evaluate"]
