"""`dvc repro` alone, without flows, as a DVC user works."""

import json
import re
import shutil
from pathlib import Path

import mlflow
import pytest
import yaml

from tasks import config
from tasks.operations import dvc_data, dvc_stages
from tasks.runs import entries, outcome

pytestmark = pytest.mark.slow


def _edit(path, section: str, **values: object) -> None:
    document = yaml.safe_load(path.read_text())
    document[section] |= values
    path.write_text(yaml.safe_dump(document, sort_keys=False))


def _cached(project: Path) -> list[Path]:
    return sorted(project.glob(".dvc/cache/files/md5/*/*"))


def test_repro_runs_what_changed_and_nothing_else(project, run):
    def repro() -> list[str]:
        """Return the stages that ran."""
        result = run(["dvc", "repro"])
        assert result.returncode == 0, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        return re.findall(r"^Running stage '(.+)':$", result.stdout, re.MULTILINE)

    data = ["data/digits/dvc.yaml:download", "data/digits/dvc.yaml:prepare"]
    # With links into its cache, what is written to a prepared file would change the cache.
    (project / ".dvc" / "config.local").write_text("[cache]\n    type = hardlink\n")
    _edit(project / "params.yaml", "train", epochs=1)
    assert repro() == [*data, "train", "evaluate"]
    assert repro() == []
    first = json.loads((project / "metrics" / "training.json").read_text())
    assert first["epochs"] == 1
    assert (project / first["checkpoint"]).is_dir(), "checkpoints are not outputs, which DVC would delete"

    _edit(project / "params.yaml", "train", epochs=2)
    assert repro() == ["train", "evaluate"]
    second = json.loads((project / "metrics" / "training.json").read_text())
    assert second["epochs"] == 2
    assert (project / first["checkpoint"]).is_dir(), "the run before is still there"

    # The images are another size: they are decoded again, from what was downloaded. The user's own files stay.
    prepared = project / "data" / "digits" / "prepared"
    images = prepared / "train_images.npy"
    assert images.stat().st_nlink == 2, "DVC has linked it"
    before = {path: path.read_bytes() for path in _cached(project)}
    (prepared / "notes").mkdir()
    (prepared / "notes" / "labels.csv").write_text("three weeks of work")
    _edit(project / "data" / "digits" / "params.yaml", "dataset", image_size=[10, 10])
    assert repro() == ["data/digits/dvc.yaml:prepare", "train", "evaluate"]
    third = json.loads((project / "data" / "digits" / "prepared" / "manifest.json").read_text())
    assert third["features"]["image"]["shape"] == [10, 10, 1]
    assert (project / "data/digits/set_aside/notes/labels.csv").read_text() == "three weeks of work"
    assert before.items() <= {path: path.read_bytes() for path in _cached(project)}.items()
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
    report = config.project_root() / entries.find_run(evaluation["run_id"]).folder / "report"
    for picture, drawn in (("learning_curve.png", "learning_curve.png"), ("predictions.png", "confusion_matrix.png")):
        assert f'src="static/workspace_metrics_{picture}"' in page
        shown_picture = (project / "plots" / "static" / f"workspace_metrics_{picture}").read_bytes()
        assert shown_picture == (report / drawn).read_bytes()
    # What a run leaves is ignored by git, but for the locks, which say what was made of what, and the small metrics.
    left = run(["git", "status", "--porcelain"]).stdout.split()[1::2]
    data = ["data/digits/dvc.lock", "data/digits/params.yaml", "data/digits/set_aside/"]
    assert sorted(left) == [*data, "dvc.lock", "metrics/", "params.yaml", "plots/"]


def test_what_is_pulled_in_a_second_clone_is_what_was_made_in_the_first(project, digits, run):
    """Nothing else is missed: no dataset that nobody made, no output of a stage that has not run."""

    def do(*command: str | Path, cwd: Path = project) -> str:
        result = run([*command], cwd=cwd)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "WARNING" not in result.stderr
        return result.stdout

    do("dvc", "commit", "--force", "data/digits/dvc.yaml")
    do("dvc", "remote", "add", "--default", "shared", project.with_name("remote"))
    do("dvc", "push")
    do("git", "-c", "user.name=Test", "-c", "user.email=test@example.org", "commit", "--quiet", "-am", "a remote")
    second = project.with_name("second")
    do("git", "clone", "--quiet", project, second)
    do("dvc", "pull", cwd=second)
    for part in ("raw", "prepared"):
        first = project / "data" / "digits" / part
        made = {path.relative_to(project): path.read_bytes() for path in first.rglob("*") if path.is_file()}
        assert made
        for path, content in made.items():
            assert (second / path).read_bytes() == content
    assert "up to date" in do("dvc", "status", "data/digits/dvc.yaml", cwd=second)
    assert do("git", "status", "--porcelain", cwd=second) == ""


class Experiments:
    """A project whose first training is committed, for `dvc exp`."""

    def __init__(self, project: Path, run) -> None:
        self.project, self._run = project, run
        for key, value in (("user.name", "Test"), ("user.email", "test@example.org")):
            self.do("git", "config", key, value)
        _edit(project / "params.yaml", "train", epochs=1)
        self.do("dvc", "repro")
        self.do("git", "add", "dvc.lock", "metrics", "params.yaml")
        self.do("git", "commit", "--quiet", "-m", "a first training")

    def do(self, *command: str) -> str:
        result = self._run([*command])
        assert result.returncode == 0, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        return result.stdout

    def runs(self) -> set[str]:
        """The ids of the runs in mlruns/ of the project itself."""
        return {path.name for path in (self.project / "mlruns" / "runs").iterdir()}

    def run_of(self, experiment: str) -> str:
        """The id of the run that an experiment's commit names."""
        return json.loads(self.do("git", "show", f"{experiment}:metrics/training.json"))["run_id"]

    def named(self) -> dict[str, str]:
        """The commit of each experiment by its name."""
        listed = self.do("dvc", "exp", "list", "--name-only").split()
        found = {}
        for name in listed:
            (ref,) = self.do("git", "for-each-ref", f"refs/exps/*/*/{name}", "--format=%(objectname)").split()
            found[name] = ref
        return found


@pytest.fixture
def experiments(prepared_project, run):
    return Experiments(prepared_project, run)


@pytest.mark.exhaustive
def test_experiments_of_the_queue_leave_their_runs_in_the_project(experiments):
    """Two at once: each in a copy of the project, which DVC removes."""
    before = experiments.runs()
    experiments.do("dvc", "exp", "run", "--queue", "--name", "seed", "-S", "train.seed=1")
    mirrored = ("-S", "strategy.kind=mirrored", "-S", "+strategy.devices=2")
    experiments.do("dvc", "exp", "run", "--queue", "--name", "mirrored", *mirrored)
    experiments.do("dvc", "exp", "run", "--run-all", "--jobs", "2")
    made = {name: experiments.run_of(commit) for name, commit in experiments.named().items()}
    assert made.keys() == {"seed", "mirrored"}
    assert experiments.runs() - before == set(made.values())
    store = mlflow.MlflowClient(f"sqlite:///{experiments.project / 'mlruns' / 'mlflow.db'}")
    for name, run_id in made.items():
        run = entries.find_run(run_id)
        assert outcome.status(run).status == "FINISHED"
        training = json.loads((experiments.project / run.folder / "records" / "training.json").read_text())
        assert (experiments.project / training["checkpoint"]).is_dir()
        found = store.get_run(run_id)
        assert found.data.tags["dvc_experiment"] == name
        assert found.data.metrics["test/accuracy"] > 0
        place = Path(found.info.artifact_uri.removeprefix("file://"))
        assert place.is_relative_to(experiments.project / "mlruns" / "artifacts")
        assert (place / "evaluation").is_dir()
        changed = experiments.do("git", "diff", "--name-only", "HEAD", experiments.named()[name]).split()
        assert not [path for path in changed if path.startswith("mlruns")]
    assert store.get_run(made["mirrored"]).data.params["strategy.kind"] == "mirrored"
    assert (experiments.project / "mlruns" / ".gitkeep").is_file()
    assert experiments.do("git", "status", "--porcelain") == ""


def test_a_copy_has_its_own_runs_again_whatever_happens(tmp_path):
    project = tmp_path / "project"
    copy = project / ".dvc" / "tmp" / "exps" / "standalone" / "one"
    for folder in (copy, project):
        (folder / "mlruns").mkdir(parents=True)
        (folder / "mlruns" / ".gitkeep").touch()
        (folder / ".dvc" / "tmp").mkdir(parents=True, exist_ok=True)
        (folder / "params.yaml").touch()
    (project / "mlruns" / "mlflow.db").touch()

    def fail() -> None:
        with dvc_stages.runs_of_the_project(copy):
            assert (copy / "mlruns" / "mlflow.db").exists()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.name for path in (copy / "mlruns").iterdir()] == [".gitkeep"]
    assert not (copy / "mlruns").is_symlink()
    assert (project / "mlruns" / "mlflow.db").exists()
    with dvc_stages.runs_of_the_project(project):
        assert not (project / "mlruns").is_symlink(), "the project itself has its own"
    shutil.rmtree(copy)
    assert (project / "mlruns" / "mlflow.db").exists()


def test_data_whose_checks_have_changed_are_not_up_to_date(prepared_project):
    """DVC itself says they are, as long as data/digits/dvc.yaml does not name the checks."""
    assert dvc_data.load_up_to_date("digits") is not None
    params = prepared_project / "data" / "digits" / "params.yaml"
    params.write_text(f"{params.read_text()}  checks: {{constant_examples: stop}}\n")
    assert dvc_data.load_up_to_date("digits") is None
