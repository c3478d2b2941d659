import os
import re
import shutil
from pathlib import Path

import pygit2
import pytest
import yaml

from tasks import config
from tasks.data import dataset_folder
from tasks.operations import dvc_data, new_project
from tasks.runs import lineage
from tasks.system.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def files_of(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and ".git/" not in f"{path}"}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A new project, which is the current folder."""
    folder = tmp_path / "my project"
    new_project.make(folder, git=False)
    monkeypatch.chdir(folder)
    return folder


def test_what_a_new_project_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = new_project.make(Path("my project"), only_look=True)
    assert list(tmp_path.iterdir()) == []
    made = new_project.make(Path("my project"))
    assert made == told
    folder = tmp_path / "my project"
    assert Path(made.folder) == folder
    assert files_of(folder) == set(made.files)
    ours = {str(path.relative_to(ROOT)) for path in ROOT.glob("recipes/**/*.yaml")}
    data = {f"data/digits/{name}" for name in (".gitignore", "dvc.yaml", "params.yaml", "reader.json")}
    rest = {".gitignore", ".dvcignore", ".dvc/config", ".dvc/.gitignore", "mlruns/.gitkeep"}
    assert set(made.files) == ours | data | rest | {"params.yaml", "dvc.yaml", "prefect.yaml"}
    assert list(tmp_path.iterdir()) == [folder], "nothing is left beside it"
    assert made.git
    assert pygit2.Repository(str(folder)).head_is_unborn
    assert not new_project.make(folder.parent / "other", git=False).git
    assert not (folder.parent / "other" / ".git").exists()
    (folder / "params.yaml").unlink()
    assert not new_project.make(folder / "below").git, "it is in a repository"


def test_it_says_the_same_as_a_checkout(made):
    for name in (".dvc/config", ".dvc/.gitignore", ".dvcignore"):
        assert (made / name).read_text() == (ROOT / name).read_text()
    lines = (ROOT / ".gitignore").read_text()
    assert [line for line in (made / ".gitignore").read_text().splitlines() if line not in lines] == []
    for name in ("params.yaml", "recipes/mnist.yaml"):
        assert yaml.safe_load((made / name).read_text()) == yaml.safe_load((ROOT / name).read_text())
    named = re.compile(r"\b(?:tasks|flows)/|python -m tasks|requirements\.lock")
    assert [name for name in files_of(made) if named.search((made / name).read_text())] == [], "they are not there"
    assert config.project_root() == made


def test_its_flows_are_those_of_prefect_yaml(made):
    here, there = (yaml.safe_load((folder / "prefect.yaml").read_text())["deployments"] for folder in (made, ROOT))
    modules = [one.pop("entrypoint").rpartition(".") for one in here]
    files = [one.pop("entrypoint") for one in there]
    assert [f"{module.replace('.', '/')}.py:{flow}" for module, _, flow in modules] == files
    assert here == there
    assert len(here) == 4


@pytest.mark.parametrize(
    "there", ["params.yaml", "recipes/mnist.yaml", "recipes", "data/digits/dvc.yaml", ".gitignore"]
)
def test_what_is_there_is_not_overwritten(tmp_path, there):
    folder = tmp_path / "mine"
    (folder / there).parent.mkdir(parents=True)
    (folder / there).write_text("mine")
    with pytest.raises(UserError, match=re.escape(f"{folder} contains {there}")):
        new_project.make(folder, git=True)
    assert files_of(tmp_path) == {f"mine/{there}"}
    assert not (folder / ".git").exists()


def test_a_folder_with_other_files_becomes_a_project(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "own.yaml").write_text("train: {epochs: 2}")
    made = new_project.make(tmp_path)
    assert made.git
    assert files_of(tmp_path) == {*made.files, "recipes/own.yaml"}
    with pytest.raises(UserError, match=r"is already a project: choose a folder outside of any project"):
        new_project.make(tmp_path)
    with pytest.raises(UserError, match=rf"is in the project {re.escape(str(tmp_path))}"):
        new_project.make(tmp_path / "recipes")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a file", "is a file: choose a folder"),
        ("no/such", r"the folder .*/no does not exist: create it"),
        ("a" * 300, "cannot be written .*File name too long"),
    ],
)
def test_a_place_that_cannot_be(tmp_path, name, said):
    (tmp_path / "a file").touch()
    with pytest.raises(UserError, match=said):
        new_project.make(tmp_path / name)


def test_its_code_is_that_of_the_package(made, project):
    theirs = lineage.collect(config.load(), None)
    assert config.has_own_code(project)
    assert theirs.package_version is None
    os.chdir(made)
    shutil.copy(project / "mlruns" / "code.json", "mlruns")  # All files are parsed otherwise.
    ours = lineage.collect(config.load(), None)
    assert ours.package_version == lineage.package_version()
    assert ours.code_digest == theirs.code_digest, "the same code, wherever it lies"


def test_modules_of_the_users_own_take_nobodys_place(made, run):
    """Python looks for a module in the current folder first, unless it is told not to."""
    for name in ("tasks", "flows", "random", "dvc"):
        Path(f"{name}.py").write_text("raise SystemExit('a module of the user was run')\n")
    Path("t.csv").write_text("a,y\n" + "1,left\n2,right\n" * 20)
    done = run(["stratagem", "data", "add", "t.csv", "--target", "y"], env={"PYTHONPATH": str(ROOT)})
    assert (done.returncode, "a module of the user" in done.stderr) == (0, False), done.stderr
    assert dvc_data.load_prepared("t").splits["train"].num_examples == 32


def test_stages_depend_on_no_file_of_the_package(made):
    """Its path would be another one on each machine."""
    folder = made / "data" / "digits"
    stages = yaml.safe_load((folder / "dvc.yaml").read_text())["stages"]
    for name, stage in stages.items():
        assert stage["cmd"] == f"python -m stratagem stage {name} ${{dataset.name}}"
        assert stage.get("deps", []) == (["data/${dataset.name}/raw"] if name == "prepare" else [])


def test_a_table_of_ones_own_depends_on_its_file_and_on_the_readers_version(made):
    described = config.describe({"kind": "table", "name": "t", "source": "tasks/t.csv", "target": "y"}, "here")
    (stage,) = yaml.safe_load(dataset_folder.local_pipeline(described, made))["stages"].values()
    assert stage["deps"] == ["tasks/t.csv"], "a file of the user's, whatever its folder is called"
    assert stage["params"][1] == {"data/${dataset.name}/reader.json": ["version"]}


def test_git_in_a_folder_that_is_a_repository_keeps_it(tmp_path):
    folder = tmp_path / "there"
    pygit2.init_repository(str(folder))
    config = (folder / ".git" / "config").read_text()
    assert not new_project.make(folder, git=True).git
    assert (folder / ".git" / "config").read_text() == config
    assert (folder / "params.yaml").is_file()
