"""What a reference means, and the chain that it is in: of records, a git repository and a store of MLflow's."""

import contextlib
import shutil
from pathlib import Path

import mlflow
import pytest

from tasks import records
from tasks.operations import trace
from tasks.process import stages
from tasks.runs import pruning
from tasks.system.errors import StratagemError, UserError
from tasks.tracking.registry import list_versions
from tests.tasks.test_lineage import git
from tests.tasks.written_runs import run_id_of, version_of, write_results, write_run

LOCK = """\
schema: '2.0'
stages:
  prepare:
    deps: [{{path: data/digits/raw, hash: md5, md5: {raw}.dir}}]
    outs: [{{path: data/digits/prepared, hash: md5, md5: {prepared}.dir}}]
"""
OLD, NEW = "aa" * 16, "bb" * 16
FLOW = "6b7345fd-cfbd-4de5-9b01-01cb4ccc5b3e"


def links_of(link, way=""):
    """Return all links of a chain, each with the way to it, such as ``^^v``."""
    return [
        (way, link),
        *(found for one in link.up for found in links_of(one, f"{way}^")),
        *(found for one in link.down for found in links_of(one, f"{way}v")),
    ]


def names(reference, kind, way=None):
    """Return what of a kind is in the chain of a reference."""
    found = links_of(trace.trace(reference).link)
    return [link.name for where, link in found if link.kind == kind and way in (None, where)]


@pytest.fixture
def chain(project, monkeypatch):
    """Two data versions in two commits, and a run on each; a third of the second, in a flow and a comparison."""
    commits = []
    for prepared, raw in ((OLD, "11" * 16), (NEW, "22" * 16)):
        Path("data/digits/dvc.lock").write_text(LOCK.format(prepared=prepared, raw=raw))
        git("commit", "--quiet", "--all", "-m", f"data {prepared[:2]}\033[31m\n\nmore")
        commits.append(git("rev-parse", "HEAD"))
    old = write_run(1, git_commit=commits[0], git_dirty=True, data_version=OLD)
    new = write_run(2, git_commit=commits[1], data_version=NEW)
    other = write_run(3, git_commit=commits[1], data_version=NEW, flow_run_id=FLOW, parent_run_id=run_id_of(9))
    for number, run in enumerate((old, new), start=1):
        write_results(run, version=str(number), accuracy=0.9)
    write_run(9, folder=f"mlruns/comparisons/{run_id_of(9)}")
    checkpoint = f"{new.folder}/checkpoints/82"
    versions = [
        version_of(old, 1, "champion"),
        version_of(new, 2, "challenger", "next", checkpoint=checkpoint, model_digest="d1"),
        version_of(None, 3),
    ]
    monkeypatch.setattr(stages, "list_versions", lambda: versions)
    return old, new, other, *commits


def test_a_version_leads_to_its_checkpoint_run_commit_data_and_source(chain):
    old, new, _, _, second = chain
    for reference in (
        "digits-convnet2@challenger",
        "models:/digits-convnet2@next",
        "digits-convnet2/2",
        "models:/digits-convnet2/2",
    ):
        found = trace.trace(reference)
        assert found.registry is None
        assert [(way, link.kind, link.name) for way, link in links_of(found.link)] == [
            ("", "model version", "digits-convnet2/2"),
            ("^", "checkpoint", f"{new.folder}/checkpoints/82"),
            ("^^", "run", new.run_id),
            ("^^^", "git commit", second),
            ("^^^", "code", "c0de"),
            ("^^^", "settings", new.lineage.settings_digest),
            ("^^^", "data version", NEW),
            ("^^^^", "raw data", "22" * 16),
            ("^^^^^", "source", "digits"),
        ]
    assert found.link.facts["aliases"] == "@challenger @next"
    assert names("digits-convnet2@champion", "run") == [old.run_id]
    found = {link.kind: link for _, link in links_of(trace.trace("digits-convnet2/1").link)}
    assert found["git commit"].facts == {"subject": "data aa[31m"}
    assert found["run"].facts["uncommitted changes"] == "not kept"
    assert names("digits-convnet2/1", "raw data") == ["11" * 16], "as its commit has it, not today's lock"
    (stranger,) = trace.trace("digits-convnet2/3").link.up
    assert (stranger.name, stranger.facts) == ("MLflow does not name it", {"state": "not in mlruns/"})


def test_a_run_leads_both_ways_by_each_of_its_names(chain):
    _, new, _, _, second = chain
    with contextlib.chdir("data"):
        for reference in (new.run_id, "0002", new.name, f"../{new.folder}", f"../{new.folder}/report/history.csv"):
            assert trace.trace(reference).link.name == new.run_id, reference
    assert names("0002", "checkpoint", "v") == [f"{new.folder}/checkpoints/{step}" for step in (41, 82)]
    assert names("0002", "evaluation", "v") == [f"{new.folder}/records/evaluation.json"]
    assert names("0002", "model", "v") == [f"{new.folder}/models/{name}.keras" for name in ("best", "final")]
    assert names("0002", "model version", "v") == ["digits-convnet2/2"]
    assert names("0002", "git commit", "^") == [second]
    assert names("latest", "run", "") == [run_id_of(3)]
    assert names("models:/m-" + "a" * 32, "run", "") == [new.run_id], "the newest run that has logged it"


def test_data_and_a_commit_lead_down_to_all_runs_and_models(chain):
    old, new, other, first, second = chain
    for reference in (NEW, NEW[:4], f"{NEW}.dir", "data/digits/prepared", "data/digits", "digits"):
        assert names(reference, "data version", "") == [NEW]
        assert names(reference, "run", "v") == [other.run_id, new.run_id]
        assert names(reference, "model version", "vv") == ["digits-convnet2/2"]
        assert names(reference, "raw data", "^") == ["22" * 16]
    assert names(OLD[:8], "model version", "vv") == ["digits-convnet2/1"]
    assert names(OLD[:8], "raw data", "^") == ["11" * 16]
    for reference in (second, second[:7], "HEAD"):
        assert names(reference, "git commit", "") == [second]
        assert names(reference, "run", "v") == [other.run_id, new.run_id]
    assert names(f"{first[:10]}", "run", "v") == [old.run_id]
    assert names("HEAD~2", "run") == [], "a commit of no run"


@pytest.mark.usefixtures("chain")
def test_a_flow_run_and_a_comparison_lead_to_their_runs():
    assert names(FLOW[:6], "flow run", "") == [FLOW]
    assert names(FLOW, "run", "v") == [run_id_of(3)]
    for reference in ("0009", f"mlruns/comparisons/{run_id_of(9)}/comparison.md"):
        assert names(reference, "comparison", "") == [run_id_of(9)]
        assert names(reference, "run", "v") == [run_id_of(3)]
    assert names("0003", "comparison", "^") == [run_id_of(9)]


def test_a_checkpoint_leads_to_what_was_made_of_it_also_when_it_is_gone(chain):
    _, new, *_ = chain
    place = f"{new.folder}/checkpoints/82"
    for reference in (place, f"{place}/arrays.npz", str(Path(place).absolute())):
        assert names(reference, "checkpoint", "") == [place]
        assert names(reference, "run", "^") == [new.run_id]
        assert names(reference, "evaluation", "v") == [f"{new.folder}/records/evaluation.json"]
        assert names(reference, "model version", "v") == ["digits-convnet2/2"]
    assert names(f"{new.folder}/checkpoints/41", "evaluation") == []
    pruning.prune(pruning.Selection(keep_last=0), list, dry_run=False)
    found = trace.trace(place).link
    assert (found.facts, found.up[0].facts["state"]) == ({"state": "not in mlruns/"}, "pruned")


def export(run, folder, model_digest):
    made = records.ExportedModel(
        format="onnx", run_id=run.run_id, dataset="digits", checkpoint=f"{run.folder}/checkpoints/82",
        model_digest=model_digest, weights_digest="w", data_version=NEW, git_commit="c0", inputs=(), outputs=(),
        num_examples=1, max_difference=0.0, files={"model.onnx": "s", "variables/one": "s"},
    )  # fmt: skip
    records.save(made, Path(folder, "export.json"))
    Path(folder, "model.onnx").touch()
    Path(folder, "variables").mkdir()
    Path(folder, "variables", "one").touch()


def test_an_export_leads_to_its_version_wherever_it_lies(chain, tmp_path):
    _, new, *_ = chain
    export(new, f"{new.folder}/exports/onnx-82", "d1")
    assert names("0002", "export", "v") == [f"{new.folder}/exports/onnx-82"]
    assert names("digits-convnet2/2", "export", "v") == [f"{new.folder}/exports/onnx-82"]
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(Path(new.folder, "exports", "onnx-82"), elsewhere)
    for place in ("", "export.json", "model.onnx", "variables", "variables/one"):
        assert names(str(elsewhere / place), "export", "") == [str(elsewhere)]
        assert names(str(elsewhere / place), "model version", "^") == ["digits-convnet2/2"]
        assert names(str(elsewhere / place), "run", "^^^") == [new.run_id]
    export(new, tmp_path / "unregistered", "d2")
    assert names(str(tmp_path / "unregistered"), "run", "^^") == [new.run_id]
    export(new.model_copy(update={"run_id": "7" * 32}), tmp_path / "strange", "d3")
    (of_another,) = trace.trace(str(tmp_path / "strange")).link.up
    assert of_another.facts == {"state": "not in mlruns/", "data version": NEW, "git commit": "c0"}


# Each: what is given, and the message.
UNKNOWN = {
    "digits-convnet3@champion": "unknown model version .*did you mean 'digits-convnet2@champion'",
    "digits-convnet2@nobody": "unknown model version 'digits-convnet2@nobody': .*known: digits-convnet2/1, ",
    "digits-convnet2/4": "unknown model version 'digits-convnet2/4': did you mean 'digits-convnet2/[123]'",
    "models:/digits-convnet2": "'models:/digits-convnet2' is not the address of a model: write models:/NAME@ALIAS",
    "dig": "unknown reference 'dig': did you mean 'digits'.? name a version of a model",
    "000": "unknown reference '000': ",
    "0002f": "unknown reference '0002f': ",
    "params.yaml": "unknown reference 'params.yaml': ",
    "./params.yaml": "./params.yaml does not belong to a run, a dataset or an export",
    "..": "unknown reference '..': ",
    "../../etc": "unknown reference '../../etc': ",
    "mlruns/runs/../../params.yaml": "does not belong to a run, a dataset or an export",
    "data": "unknown reference 'data': ",
    "": "unknown reference '': ",
    "x" * 999: "unknown reference 'xx",
    "a\0b": "unknown reference ",
}


def test_what_is_not_known_is_refused_with_the_nearest(chain):
    for reference, message in UNKNOWN.items():
        with pytest.raises(UserError, match=message):
            trace.trace(reference)
    shared = write_run(0xAAAA, data_version=OLD)
    with pytest.raises(
        UserError, match=f"'aaaa' is the beginning of 2 ids: data version {OLD}, run {shared.run_id}. Add more"
    ):
        trace.trace("aaaa")
    Path("data/digits/dvc.lock").unlink()
    with pytest.raises(UserError, match="data/digits is not prepared, so it has no data version"):
        trace.trace("digits")


def test_a_registry_that_does_not_answer_is_told_and_the_records_are_shown(chain, monkeypatch):
    _, new, *_ = chain

    def refuse():
        raise StratagemError("no MLflow server answers")

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setattr(stages, "list_versions", refuse)
    found = trace.trace("0002")
    assert found.registry == "no MLflow server answers"
    (version,) = [link for _, link in links_of(found.link) if link.kind == "model version"]
    assert (version.name, version.facts) == ("digits-convnet2/2", {"aliases": "@challenger"})
    assert names("digits-convnet2/2", "run", "^") == [new.run_id]


def test_what_was_edited_or_removed_since_breaks_no_chain(chain):
    _, new, *_ = chain
    Path("data/digits/dvc.lock").write_text("[")
    assert names("0002", "data version", "^") == [NEW]
    assert names("0002", "raw data", "^^") == ["22" * 16], "of its commit"
    Path(new.folder, "records", "evaluation.json").write_text("{")
    assert names("0002", "evaluation") == []
    shutil.rmtree(".git")
    (commit, *_) = trace.trace("0001").link.up
    assert commit.facts["subject"] == "not in this repository"
    assert names("0001", "raw data") == []


def test_versions_are_listed_with_the_aliases_and_the_ids_of_the_project(project, empty_store):
    store = project / "mlruns" / "mlflow.db"
    assert list_versions() == []
    assert not store.exists()
    shutil.copy(empty_store, store)
    client = mlflow.MlflowClient(f"sqlite:///{store}", registry_uri=f"sqlite:///{store}")
    here, renamed = (client.create_run("0").info.run_id for _ in range(2))
    write_run(1, run_id=here, folder=f"mlruns/runs/{here}")
    client.set_tag(renamed, "stratagem.run_id", "5" * 32)
    for name in ("b", "a"):
        client.create_registered_model(name)
    for number in range(11):
        client.create_model_version("a", "/tmp/m", here, tags={"number": str(number)})
    client.create_model_version("b", "/tmp/m", renamed)
    client.create_model_version("b", "/tmp/m")
    client.create_model_version("b", "/tmp/m", here)
    for alias in ("one", "champion"):
        client.set_registered_model_alias("a", alias, "11")
    client.set_registered_model_alias("b", "gone", "3")
    client.delete_model_version("b", "3")
    found = list_versions()
    numbers = [*(("a", str(number)) for number in range(1, 12)), ("b", "1"), ("b", "2")]
    assert [(one.name, one.version) for one in found] == numbers
    assert found[10] == records.ModelVersion(
        name="a", version="11", aliases=("champion", "one"), run_id=here, tags={"number": "10"}
    )
    assert [one.run_id for one in found[11:]] == ["5" * 32, None]
