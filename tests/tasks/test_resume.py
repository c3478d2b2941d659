import contextlib
import json
import socket
from pathlib import Path

import pytest

from tasks import config, records
from tasks.runs import entries, lineage, locks, outcome, resume
from tasks.system.errors import UserError
from tests.tasks.written_runs import write_results

RUN = "0123456789abcdef" * 2


def begin(*overrides, run_id=RUN, ended="KILLED", data_version="d", settings=None):
    """Leave a run behind that ended as ``ended`` says; return it."""
    begun_with = config.load(None, overrides)
    run = records.Run(
        run_id=run_id,
        experiment="e",
        name="n",
        folder=f"mlruns/runs/{run_id}",
        lineage=lineage.collect(begun_with, data_version),
        settings=settings or begun_with.to_json(),
        key=locks.key_of(begun_with),
        host=socket.gethostname(),
        number=entries.next_number(),
    )
    records.save(run, Path(run.folder, "records", "run.json"))
    outcome.set_status(run, ended)
    return run


def resumed(*overrides, data_version="d"):
    """Return the run that a command resumes without being told to."""
    settings = config.load(None, overrides)
    found = entries.find_unfinished(settings, lineage.collect(settings, data_version))
    return found and found.run_id


# What a command may give anew without being another run.
SAME = [
    "register.alias=staging",
    "train.tensorboard=true",
    "input.prefetch=0",
    "checkpoint.keep=7",
    "train.loop=custom",
    "train.steps_per_execution=4",
    "tracking.experiment=other",
]


def test_a_setting_without_result_makes_no_other_run(project):
    run = begin()
    assert resume.changes_without_result(config.load(), run) == ""
    for override in SAME:
        assert resumed(override) == RUN, override
        key, _, value = override.partition("=")
        said = resume.changes_without_result(config.load(None, [override]), run)
        assert said.startswith(f" ({key} was ")
        assert value.lower() in said.lower()


# Each row: what the next command is given, and why the run is not resumed.
OTHER = [
    (["train.seed=7"], f"train.seed was 0 and is now 7. A new run starts; --resume {RUN} and its own settings resumes"),
    (
        ["train.epochs=2"],
        f"train.epochs was 15 and is now 2. A new run starts; --resume {RUN} resumes the unfinished one",
    ),
    (
        ["train.seed=7", "train.epochs=2", "schedule.learning_rate=0.5", "optimizer.kind=sgd"],
        "optimizer.kind was 'adam' and is now 'sgd'; schedule.learning_rate was 0.003 and is now 0.5; train.epochs was "
        "15 and is now 2 and 1 more.",
    ),
]


def test_a_run_that_is_not_resumed_is_named_with_the_reason(project):
    begin()
    for overrides, said in OTHER:
        settings = config.load(None, overrides)
        traced = lineage.collect(settings, "d")
        assert entries.find_unfinished(settings, traced) is None
        why = resume.why_not_resumed(settings, traced)
        assert why.startswith(f"run {RUN} is unfinished but is not resumed: ")
        assert said in why
        assert "\n" not in why


@pytest.mark.usefixtures("own_code")
def test_other_data_and_other_code_are_reasons(project):
    begin()
    Path("tasks/modeling/models/own.py").write_text("new = True\n")
    settings = config.load()
    why = resume.why_not_resumed(settings, lineage.collect(settings, "e"))
    assert "its data version was d and is now e; the code of flows/, tasks/" in why


@pytest.mark.usefixtures("own_code")
def test_a_comment_in_the_code_is_no_reason(project):
    begin()
    with Path("tasks/modeling/models/mlp.py").open("a") as file:
        file.write("# changed\n")
    assert resumed() == RUN


def test_nothing_is_said_of_a_run_that_ended_or_is_at_work_or_has_other_data(project):
    run = begin(ended="RUNNING")
    settings = config.load(None, ["train.seed=7"])
    traced = lineage.collect(settings, "d")
    with locks.lock(run.key, "a training"):
        assert resume.why_not_resumed(settings, traced) is None
    assert resume.why_not_resumed(settings, traced) is not None
    assert resume.why_not_resumed(config.load(None, ["dataset.name=mnist"]), traced) is None
    outcome.set_status(run, "FINISHED")
    assert resume.why_not_resumed(settings, traced) is None


# Each row: what a resume gives, and what it is refused with; None where it is not.
RESUMES = [
    ([], None),
    (["train.epochs=99", "strategy.kind=mirrored", "train.loop=custom", "checkpoint.monitor=train/loss"], None),
    (["train.per_replica_batch_size=16"], "train.per_replica_batch_size was 32 and is now 16 (a run keeps"),
    (["train.global_batch_size=64"], "train.global_batch_size was 48 and is now 64"),
    (
        ["model.options.dropout=0.1"],
        "model.options was {'dropout': 0.4, 'padding': 'same'} and is now {'dropout': 0.1,",
    ),
    (
        ["train.seed=1", "input.source=array"],
        "input.source was 'auto' and is now 'array'; train.seed was 0 and is now 1",
    ),
]


def test_a_resume_may_change_how_a_training_goes_on_and_not_what_it_learns(project):
    run = begin()
    # The newest checkpoint that can be read says what the batch is by now.
    for step, text in (("9", json.dumps({"state": {"global_batch_size": 48}})), ("10", "{")):
        state = project / run.folder / "checkpoints" / step / "state.json"
        state.parent.mkdir(parents=True)
        state.write_text(text)
    for overrides, said in RESUMES:
        settings = config.load(None, overrides)
        resume.refuse_other_training(settings, run, allow_changes=True)
        with pytest.raises(UserError) if said else contextlib.nullcontext() as error:
            resume.refuse_other_training(settings, run)
        assert said is None or said in str(error.value)


def test_a_resume_is_refused_before_anything_is_downloaded_or_begun(project, run):
    begin()
    before = sorted(project.rglob("*"))
    command = ["stratagem", "run", "--resume", RUN, "--allow-changes", "--set", "dataset.name=fashion_mnist"]
    done = run(command)
    assert done.returncode == 2
    assert f"error: run {RUN} cannot be resumed: it was trained on dataset.name = 'digits'" in done.stderr
    new = {path.relative_to(project).as_posix() for path in project.rglob("*")} - {
        path.relative_to(project).as_posix() for path in before
    }
    assert [name for name in new if "__pycache__" not in name] == []


# Each row: what is given anew, and which records of the stages stay.
KEPT = [
    ([], {"training.json", "evaluation.json", "registration.json"}),
    (["input.prefetch=0"], {"training.json", "evaluation.json", "registration.json"}),
    (["register.alias=staging"], {"training.json", "evaluation.json"}),
    (["train.epochs=99"], set()),
]


def test_what_a_stage_left_stays_while_its_settings_are_those(project):
    run = begin()
    folder = project / run.folder / "records"
    for overrides, kept in KEPT:
        for name in ("training.json", "evaluation.json", "registration.json"):
            (folder / name).touch()
        settings = config.load(None, overrides)
        resume.forget_what_changed(run, settings, lineage.collect(settings, "d"))
        assert {path.name for path in folder.iterdir()} - {"run.json"} == kept


def test_what_a_resume_changes_stands_in_the_record_with_the_step_that_it_was_resumed_at(project):
    here = {"tensorflow": "2.21.0", "cores": "2"}
    run = begin().model_copy(update={"environment": here})
    overrides = ["train.epochs=9", "train.loop=custom", "checkpoint.keep=7", "evaluate.checkpoint=best"]
    settings = config.load(None, overrides)
    now = lineage.collect(settings, "d")
    assert resume.what_changed(run, settings, now, here) == (), "it has no checkpoint, so it begins anew"
    state = project / run.folder / "checkpoints" / "82" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text(json.dumps({"state": {"global_batch_size": 32}}))
    there = here | {"cores": "4"}
    others = now.model_copy(update={"code_digest": "c" * 64, "data_version": "e"})
    changed = resume.what_changed(run, settings, others, there)
    assert [(one.kind, one.what, one.values, one.affects) for one in changed] == [
        ("settings", "train.epochs", "15 up to step 82, then 9", "result"),
        ("settings", "train.loop", "'fit' up to step 82, then 'custom'", "speed"),
        ("code", "code", f"{run.lineage.code_digest[:12]} up to step 82, then {'c' * 12}", "result"),
        ("data", "data version", "d up to step 82, then e", "result"),
        ("machine", "cores", "'2' up to step 82, then '4'", "speed"),
    ]
    update = {"settings": settings.to_json(), "lineage": others, "environment": there, "changed": changed}
    again = run.model_copy(update=update)
    assert resume.what_changed(again, settings, others, there) == changed, "it is not forgotten"
    later = state.parent.rename(state.parent.with_name("91"))
    more = resume.what_changed(again, config.load(None, ["train.epochs=12", *overrides[1:]]), others, there)
    assert [one.values for one in more if one.what == "train.epochs"] == [
        "15 up to step 82, then 9",
        "9 up to step 91, then 12",
    ]
    later.rename(state.parent)
    write_results(run)
    assert resume.what_changed(again, config.load(None, [*overrides, "train.loop=fit"]), others, there) == changed, (
        "no step is done again"
    )
    resume.forget_what_changed(run, settings, others)
    records.save(again, project / run.folder / "records" / "run.json")
    assert entries.find_run(RUN).changed == changed
