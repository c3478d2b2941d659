"""What a flow run of a deployment may name; test_deployment.py asks a real server for such ones."""

import uuid

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext

from flows.operate import deployed, worker
from tasks import config
from tasks.system.errors import UserError

OWN = {"model.name": "mine:build", "train.metrics": ["mine:within_ten"]}


@pytest.fixture
def in_flow_run(project):
    """Let what follows be in a flow run, of a deployment or of a command."""

    def in_flow_run(of_deployment=True):
        run = FlowRun(flow_id=uuid.uuid4(), deployment_id=uuid.uuid4() if of_deployment else None)
        return FlowRunContext.model_construct(flow_run=run)

    return in_flow_run


def check(overrides, recipe=None):
    deployed.check_recipe(recipe)
    deployed.check_named(config.load(recipe, overrides), lambda: config.load(recipe))


def test_code_is_named_by_the_operators_files_alone(in_flow_run, project, monkeypatch):
    (project / "recipes" / "own.yaml").write_text("model: {name: 'mine:build', options: {}}\n")
    with in_flow_run(of_deployment=False):
        check(OWN)
    with in_flow_run():
        check({"train.epochs": 1})
        check({"train.epochs": 1}, "own")
        for overrides, recipe in (
            (OWN, None),
            ({"model.name": "mine:other"}, "own"),
            ({"train.loss": "mine:a"}, "own"),
        ):
            with pytest.raises(UserError, match="a flow run may not name code to import, because it would run here"):
                check(overrides, recipe)
        monkeypatch.setenv("STRATAGEM_OWN_CODE", "mine")
        check(OWN)


def test_files_come_from_and_go_to_where_the_operators_files_say(in_flow_run, project, tmp_path):
    bucket, start = "s3://ours/runs", "starts/own.keras"
    (project / "recipes" / "kept.yaml").write_text(
        f"checkpoint: {{remote: '{bucket}'}}\nmodel: {{name: convnet2, initial: {start}, options: {{}}}}\n"
        f"dataset: {{name: digits, downloads: {tmp_path}}}\n"
    )
    others = {
        "checkpoint.remote": "file:///elsewhere",
        "dataset.downloads": "/elsewhere",
        "model.initial": "/elsewhere/model.keras",
    }
    with in_flow_run(of_deployment=False):
        check(others)
    with in_flow_run():
        check({"checkpoint.remote": bucket}, "kept")
        check({"checkpoint.remote": None}, "kept")
        check({"model.initial": "models:/digits@champion"})
        check({"model.initial": "a" * 32})
        for key, value in others.items():
            with pytest.raises(UserError, match=f"^{key} = '{value}': a flow run may only use places that params.yaml"):
                check({key: value}, "kept")


def test_a_recipe_lies_in_its_folder(in_flow_run, project, tmp_path):
    (tmp_path / "elsewhere.yaml").write_text("train: {epochs: 1}\n")
    (project / "recipes" / "link.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    for recipe in (str(tmp_path / "elsewhere.yaml"), "recipes/../params.yaml", "recipes/link.yaml"):
        with in_flow_run(of_deployment=False):
            check({}, recipe)
        with in_flow_run(), pytest.raises(UserError, match="a flow run may only name files in"):
            check({}, recipe)
    with in_flow_run():
        check({}, "recipes/mnist.yaml")
        check({}, "mnist")


def test_a_flow_run_says_nothing_about_its_process():
    template = worker.job_template()
    assert not {"command", "env", "working_dir"} & {
        *template["job_configuration"],
        *template["variables"]["properties"],
    }
    assert template["variables"]["additionalProperties"] is False
