"""`dvc repro` alone, without flows, as a DVC user works."""

import json
import re

import pytest
import yaml

pytestmark = pytest.mark.slow


def _edit(path, section: str, **values: object) -> None:
    document = yaml.safe_load(path.read_text())
    document[section] |= values
    path.write_text(yaml.safe_dump(document, sort_keys=False))


def test_repro_runs_what_changed_and_nothing_else(project, run):
    def repro() -> list[str]:
        """Return the stages that ran."""
        result = run(["dvc", "repro"])
        assert result.returncode == 0, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        return re.findall(r"^Running stage '(.+)':$", result.stdout, re.MULTILINE)

    data = ["data/digits/dvc.yaml:download", "data/digits/dvc.yaml:prepare"]
    _edit(project / "params.yaml", "train", epochs=1)
    assert repro() == [*data, "train", "evaluate"]
    assert repro() == []
    first = json.loads((project / "metrics" / "training.json").read_text())
    assert first["epochs"] == 1
    assert (project / first["checkpoint"]).is_dir(), "checkpoints are no outputs, which DVC would delete"

    _edit(project / "params.yaml", "train", epochs=2)
    assert repro() == ["train", "evaluate"]
    second = json.loads((project / "metrics" / "training.json").read_text())
    assert second["epochs"] == 2
    assert (project / first["checkpoint"]).is_dir(), "the run before is still there"

    # The images are another size: they are decoded again, from what was downloaded.
    _edit(project / "data" / "digits" / "params.yaml", "dataset", image_size=[10, 10])
    assert repro() == ["data/digits/dvc.yaml:prepare", "train", "evaluate"]
    third = json.loads((project / "data" / "digits" / "prepared" / "manifest.json").read_text())
    assert third["image_shape"] == [10, 10, 1]
    assert repro() == []

    shown = run(["dvc", "metrics", "show", "--json"])
    (metrics,) = [file["data"] for file in json.loads(shown.stdout)[""]["data"].values()]
    evaluation = json.loads((project / "metrics" / "evaluation.json").read_text())
    assert {f"test/{name}": value for name, value in metrics["test"].items()} == evaluation["metrics"]
    changed = json.loads(run(["dvc", "params", "diff", "--json", "--targets", "params.yaml"]).stdout)
    assert changed["params.yaml"]["train.epochs"]["new"] == 2
    plots = run(["dvc", "plots", "show", "--out", "plots"])
    assert plots.returncode == 0, plots.stderr
    page = (project / "plots" / "index.html").read_text()
    for title in ("train/loss", "validation/accuracy", "confusion"):
        assert title in page
    # What a run leaves is ignored by git, but for the locks, which say what was made of what.
    left = run(["git", "status", "--porcelain"]).stdout.split()[1::2]
    assert sorted(left) == ["data/digits/dvc.lock", "data/digits/params.yaml", "dvc.lock", "params.yaml", "plots/"]
