"""Sweeps without a training: what a space may hold, which trials follow from it, and where they are kept."""

import contextlib
import json
import math
import shutil
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest

from tasks import config, sweeps
from tasks.records import Limits, Sweep, Target, Trial
from tasks.reports.sweep import _dots, sweep_cells, sweep_remarks
from tasks.reports.sweep import sweep_page as write_page
from tasks.reports.tables import records_table
from tasks.runs import lineage, outcome
from tasks.sweeps.space import Halving
from tasks.sweeps.study import rungs
from tasks.system.errors import UserError
from tests.tasks import made_up
from tests.tasks.written_runs import write_run

ROOT = Path(__file__).resolve().parents[2]
RATES = "space: {schedule.learning_rate: [0.1, 0.2]}\n"
SPACE = """
set: {train.epochs: 9, model.name: mlp}
space:
  schedule.learning_rate: {low: 1.0e-4, high: 1.0e-1, log: true}
  train.per_replica_batch_size: {low: 16, high: 64, step: 16}
  model.options.units: [[16], [32, 16]]
metric: validation/loss
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with the project's settings and recipes; a test that needs its code too goes to a copy of all."""
    folder = made_up.project(tmp_path / "here")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    monkeypatch.chdir(folder)


@pytest.fixture
def write():
    """Write a space into the current folder, and return its path."""

    def write(text, name="mine"):
        path = Path(f"{name}.yaml")
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def space(write):
    return sweeps.load(write(SPACE))


def value_of(params):
    """What a trial of ``SPACE`` gives here: the best learning rate is 0.01, and units matter a little."""
    return abs(math.log10(params["schedule.learning_rate"]) + 2) + 0.1 * len(params["model.options.units"])


def end(trial):
    value = value_of(trial.params)
    if trial.number % 3 == 2:
        return trial.model_copy(update={"state": "pruned", "value": value + 1, "values": (value + 1,), "reason": "bad"})
    return trial.model_copy(update={"state": "complete", "value": value, "values": (value + 1, value), "seconds": 0.5})


def searched(space, number, parallel=1, known=(), stop_before=None, shuffled=False):
    """Return the trials of a sweep whose trainings are ``value_of``; killed before trial ``stop_before`` ends."""
    known = list(known)
    while (batch := sweeps.next_batch(known, number, parallel)) is not None:
        while len(known) < batch.stop:
            params = sweeps.next_params(space, known, batch.start)
            known.append(Trial(number=len(known), state="running", params=params))
        for place in reversed(batch) if shuffled else batch:
            if stop_before == place:
                return known
            if known[place].state == "running":
                known[place] = end(known[place])
    return known


# The file


@pytest.mark.parametrize("name", sweeps.spaces(ROOT))
def test_each_space_that_is_shipped_is_accepted(name):
    lines = sweeps.spaces(ROOT)[name].read_text().splitlines()
    assert f"stratagem sweep {name}" in lines[0]
    assert sweeps.load(name).name == name


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("space: {model.options.api_key: [s3cret-1, s3cret-2]}", "space.model.options.api_key"),
        ("space: {tracking.experiment: ['https://me:s3cret@host/runs', b]}", "space.tracking.experiment"),
        (f"{RATES}set: {{model.options.api_key: s3cret-1}}", "set.model.options.api_key"),
    ],
)
def test_a_password_is_nothing_of_a_space(write, text, key):
    with pytest.raises(UserError, match=rf"^mine.yaml: {key} seems to hold a password, which every") as refused:
        sweeps.load(write(text))
    assert "s3cret" not in str(refused.value)


def test_a_space_is_laid_over_the_settings(space):
    params = {"schedule.learning_rate": 0.02, "train.per_replica_batch_size": 48, "model.options.units": [32, 16]}
    settings = space.settings(params)
    assert (settings.schedule.learning_rate, settings.train.per_replica_batch_size) == (0.02, 48)
    assert (settings.model.name, settings.model.options) == ("mlp", {"units": [32, 16]})
    assert (settings.train.epochs, settings.checkpoint.monitor) == (9, "validation/loss")
    assert len(list(space.corners())) == 1 + 3, "one after another"
    given = sweeps.load("mine.yaml", None, {"train.epochs": 4, "model.options.dropout": 0.1})
    assert given.settings(params).model.options == {"units": [32, 16], "dropout": 0.1}
    assert (given.example.train.epochs, given.final_settings(params, 2)["model.options.dropout"]) == (4, 0.1)
    assert sweeps.plan_of(given, 1).space["set"]["train.epochs"] == 4
    with pytest.raises(UserError, match=r"^mine.yaml: model.options.units is swept, but model.options has one value"):
        sweeps.load("mine.yaml", None, {"model.options": {"units": [8]}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("space: {schedule.learning_rat: [1, 2]}", "did you mean 'schedule.learning_rate'?"),
        ("space: {schedule.learning_rate: {low: 0.1, high: 0.01}}", "low <= high"),
        ("space: {schedule.learning_rate: {low: 0, high: 0.1, log: true}}", "low > 0"),
        ("space: {schedule.learning_rate: {low: 0.01, high: 0.1, log: true, step: 0.01}}", "step"),
        ("space: {schedule.learning_rate: {low: 0.01}}", "learning_rate.high = {'low': 0.01}: field required"),
        ("space: {schedule.learning_rate: {low: a, high: 1}}", "low = 'a': "),
        ("space: {schedule.learning_rate: {low: 0.1, high: .inf}}", "high = inf: it must be a finite number"),
        ("space: {schedule.learning_rate: {low: 0.1, high: 1, log: 1}}", "log = 1: input should be a valid boolean"),
        ("space: {schedule.learning_rate: {low: 0.1, hihg: 1}}", "did you mean 'space.schedule.learning_rate.high'?"),
        ("space: {schedule.learning_rate: 0.1}", "Give each setting a range, such as {low: 1.0e-4, "),
        ("space: {schedule.learning_rate: [0.1]}", "at least 2 items"),
        ("space: {schedule.learning_rate: {low: -1, high: 0.1}}", "schedule.learning_rate = -1"),
        ("space: {optimizer.kind: [adam, adamm]}", "did you mean 'adam'?"),
        ("space: {dataset.name: [mnist, digits]}", "dataset.name cannot be swept: other data"),
        ("space: {train.seed: {low: 0, high: 9}}", "a lucky seed is not a better setting"),
        ("space: {strategy.kind: [one_device, mirrored]}", "`stratagem compare` compares strategies"),
        ("space: {input.validation: [0.1, 0.2]}", "space.input.validation cannot be swept"),
        ("space: {train.loop: [fit, custom]}", "space.train.loop cannot be swept: it does not change the result"),
        ("space: {train.label_smoothing: [0.0, 0.1]}\nmetric: validation/loss", "changes what validation/loss means"),
        ("space: []", "space = []"),
        ("space: {}", "space = {}"),
        ("spaces: {}", "unknown key 'spaces': did you mean 'space'?"),
        ("schedule.learning_rate: [1, 2]", "Swept settings belong under `space:`"),
        ("metric: validation/loss", "space = {'metric': 'validation/loss'}: field required. Give each setting a range"),
        ("- space", "must contain sections"),
        (RATES + "set: {schedule.learning_rate: 0.1}", "is swept, but schedule.learning_rate has one value"),
        (RATES + "set: {input.validation: null, checkpoint.monitor: train/loss}", "n is null"),
        (RATES + "set: {train.epoch: 3}", "did you mean 'train.epochs'?"),
        (RATES + "recipe: mnits", "did you mean 'mnist'?"),
        (RATES + "metric: test/accuracy", "the gate judges by the test split"),
        (RATES + "metric: validation/acuracy", "= 'validation/acuracy'"),
        (RATES + "direction: up", "direction = 'up'"),
        (RATES + "seed: -1", "seed = -1"),
        (RATES + "pruner: {factr: 3}", "did you mean 'pruner.factor'?"),
        (RATES + "pruner: {factor: 1}", "pruner.factor = 1"),
        (RATES + "pruner: {}\nset: {strategy: {kind: multi_worker, workers: 2}}", "set `pruner: null`"),
        ("space: {model.options.units: [[1], [2]]\n", "not valid YAML, line"),
    ],
)  # fmt: skip
def test_a_wrong_space_is_refused_in_one_sentence(write, text, said):
    with pytest.raises(UserError) as refused:
        sweeps.load(write(text))
    message = str(refused.value)
    assert message.startswith("mine.yaml: ")
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["digit", "nothing.yaml", "recipes", "x" * 300 + ".yaml", "../digits"])
def test_a_space_that_is_not_there(name):
    with pytest.raises(UserError, match=r"unknown space .*Allowed: digits, or the path of a YAML file"):
        sweeps.load(name)


@pytest.mark.parametrize(
    ("fixed", "more", "epochs"),
    [
        ("", {"evaluate.checkpoint": None}, 7),
        (", evaluate.checkpoint: best", {"evaluate.checkpoint": "latest"}, 4),
        (", train.early_stopping: {monitor: validation/loss}", {"train.early_stopping": None}, 7),
        (", train.early_stopping.monitor: validation/loss", {"train.early_stopping": None}, 7),
    ],
)
def test_the_training_on_all_needs_no_validation(write, fixed, more, epochs):
    space = sweeps.load(write(SPACE.replace("model.name: mlp", f"model.name: mlp{fixed}")))
    params = {"schedule.learning_rate": 0.02, "train.per_replica_batch_size": 48, "model.options.units": [16]}
    values = space.final_settings(params, epochs)
    settings = config.load(space.file.recipe, values)
    assert {key: values.get(key) for key in more} == more
    assert (settings.input.validation, settings.checkpoint.monitor) == (None, "train/loss")
    assert (settings.train.epochs, settings.evaluate.checkpoint) == (epochs, "latest")
    assert settings.train.early_stopping is None
    assert settings.schedule.learning_rate == 0.02


# The trials


def test_suggestions_lie_in_the_space_and_find_its_best(space):
    trials = searched(space, 40)
    for one in trials:
        assert 1e-4 <= one.params["schedule.learning_rate"] <= 1e-1
        assert one.params["train.per_replica_batch_size"] in (16, 32, 48, 64)
        assert one.params["model.options.units"] in ([16], [32, 16])
    assert len({json.dumps(one.params) for one in trials}) == 40
    best = sweeps.best_of(trials, True)
    assert best.state == "complete"
    assert value_of(best.params) < 0.25, "within a sixth of a decade, with the better units"
    late = [value_of(one.params) for one in trials[25:]]
    assert sum(late) / len(late) < sum(value_of(one.params) for one in trials[:10]) / 10


@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("killed_at", [0, 5, 13])
def test_a_killed_sweep_has_the_trials_of_one_that_was_not(space, parallel, killed_at):
    whole = searched(space, 16, parallel)
    left = searched(space, 16, parallel, stop_before=killed_at)
    assert searched(space, 16, parallel, known=left) == whole


def test_trials_side_by_side_are_the_same_whichever_ends_first_and_however_many_were_asked_for(space):
    whole = searched(space, 16, 4)
    assert searched(space, 16, 4, shuffled=True) == whole
    assert searched(space, 16, 4, known=searched(space, 6, 4)) == whole, "6 are one batch and a half"
    assert [one.params for one in searched(space, 16)] != [one.params for one in whole[:16]]


def test_importance_is_of_whole_trials(space):
    trials = searched(space, 30)
    found = sweeps.importance(space, trials)
    assert next(iter(found)) == "schedule.learning_rate"
    assert sum(found.values()) == pytest.approx(1)
    assert found["schedule.learning_rate"] > 0.8
    assert sweeps.importance(space, trials[:9]) == {}, "too few"
    same = [one.model_copy(update={"value": 1.0}) for one in trials]
    assert sweeps.importance(space, same) == {}, "all the same"


def test_the_best_is_the_first_of_the_best_that_were_trained_to_their_end():
    ended = [
        ("complete", 0.5),
        ("pruned", 0.1),
        ("complete", 0.4),
        ("complete", 0.4),
        ("failed", None),
        ("running", None),
    ]
    trials = [Trial(number=place, state=state, params={}, value=value) for place, (state, value) in enumerate(ended)]
    assert sweeps.best_of(trials, True).number == 2
    assert sweeps.best_of(trials, False).number == 0
    assert sweeps.best_of(trials[4:], True) is None


# Which are given up


def limits(pruner, number, epochs, earlier, lower=True):
    settings = SimpleNamespace(train=SimpleNamespace(epochs=epochs))
    space = SimpleNamespace(pruner=pruner, metric="m", lower_is_better=lower, settings=lambda _: settings)
    before = [Trial(number=place, state="complete", params={}, values=values) for place, values in enumerate(earlier)]
    return sweeps.limits(space, Trial(number=number, state="running", params={}), before)


def test_rungs_and_brackets():
    assert rungs(Halving(), 15) == [1, 3, 9]
    assert rungs(Halving(min_epochs=2, factor=2), 16) == [2, 4, 8]
    assert rungs(Halving(), 1) == []
    earlier = [[float(number)] * 15 for number in range(9)]
    first = [min(limits(Halving(), number, 15, earlier).by_epoch) for number in range(4)]
    assert first == [1, 3, 9, 1]
    assert limits(None, 0, 15, earlier).by_epoch == {}
    assert limits(Halving(min_trials=10), 0, 15, earlier).by_epoch == {}
    assert limits(Halving(), 0, 1, earlier).by_epoch == {}


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("factor", [2, 3, 4])
def test_those_go_on_that_are_among_the_best(lower, factor):
    """Held against the words: the best 1/factor of those that came so far, this one with them, and at least one."""
    values = [0.3, 0.7, 0.1, 0.9, 0.5, 0.2, 0.8, 0.6]
    for count in range(1, 9):
        before = [[value] for value in values[:count]]
        found = limits(Halving(factor=factor, min_trials=1), 0, 5, before, lower)
        for own in (0.05, 0.25, 0.45, 0.65, 0.95):
            ranked = sorted([own, *values[:count]], reverse=not lower)
            goes_on = ranked.index(own) < max(len(ranked) // factor, 1)
            assert (found.missed([own]) is None) == goes_on, (count, own)


def test_a_trial_is_given_up_at_the_first_limit_that_it_misses():
    found = Limits(metric="m", lower_is_better=False, by_epoch={3: 0.9, 1: 0.5})
    assert found.missed([]) is None
    assert found.missed([0.5, 0.1]) is None, "as good as the limit is good enough, and nobody asks after 2"
    assert found.missed([0.4, 1, 0.1]) == 1
    assert found.missed([0.6, 0.6, 0.8, 1.0]) == 3
    assert Limits.model_validate_json(found.model_dump_json()) == found


# Where they are kept


def test_the_store_gives_back_what_it_was_told(space, tmp_path):
    with sweeps.Trials(tmp_path, space) as kept:
        assert kept.all() == []
        begun = [kept.begin(one.params) for one in searched(space, 5)]
        assert kept.all() == begun
        ended = [
            end(begun[0]), end(begun[1]), end(begun[2]),
            begun[3].model_copy(update={"state": "failed", "reason": "it broke", "run_id": "r"}),
        ]  # fmt: skip
        for one in ended:
            kept.end(one)
    with sweeps.Trials(tmp_path, space) as kept:
        assert kept.all() == [*ended, begun[4]]
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path / 'optuna.db'}")
    assert study.best_trial.number == sweeps.best_of(ended, True).number
    assert study.trials[2].intermediate_values == {1: ended[2].value}
    study._storage._backend.engine.dispose()


def test_a_store_whose_process_died_while_it_made_it_is_completed(space, tmp_path):
    with sweeps.Trials(tmp_path, space):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "optuna.db")) as half, half:
        tables = ("version_info", "alembic_version", "studies", "study_directions")
        half.executescript("DROP TABLE trial_values;" + "".join(f"DELETE FROM {table};" for table in tables))
    with sweeps.Trials(tmp_path, space) as kept:
        kept.begin(searched(space, 1)[0].params)
        assert len(kept.all()) == 1


def test_a_damaged_store_is_refused(space, tmp_path):
    (tmp_path / "optuna.db").write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match=r"optuna.db cannot be read .*use --fresh for a new sweep"):
        sweeps.Trials(tmp_path, space)


# A sweep of before


def plan_of(space, **changes):
    return sweeps.plan_of(space, 1).model_copy(update=changes)


@pytest.fixture
def left(space, tiny):
    """A sweep that a process left behind, with the lineage of now."""
    prepared = tiny
    traced = lineage.collect(space.example, prepared.data_version)

    def left(status="KILLED"):
        run_id = "5" * 32
        run = write_run(
            5, status, folder=f"mlruns/sweeps/{run_id}", run_id=run_id, settings=space.example.to_json(),
            **traced.model_dump(),
        )  # fmt: skip
        outcome.save(run, plan_of(space))
        return run, prepared

    return left


def test_the_same_sweep_goes_on(space, left):
    run, prepared = left()
    assert sweeps.find_sweep(plan_of(space), space.example, prepared) == run
    assert sweeps.find_sweep(plan_of(space, name="other"), space.example, prepared) is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("1.0e-1", "0.5", "learning_rate was {'high': 0.1, 'log': True, 'low': 0.0001} and is now {'high': 0.5,"),
        ("epochs: 9", "epochs: 8", "train.epochs was 9 and is now 8"),
        ("validation/loss", "validation/accuracy", "metric was 'validation/loss' and is now 'validation/accuracy'"),
        ("metric:", "seed: 3\nmetric:", "seed was 0 and is now 3"),
    ],
)  # fmt: skip
def test_another_space_of_the_name_is_refused_as_long_as_the_first_is_unfinished(write, space, left, old, new, said):
    run, prepared = left()
    other = sweeps.load(write(SPACE.replace(old, new)))
    with pytest.raises(UserError) as refused:
        sweeps.find_sweep(plan_of(other), other.example, prepared)
    assert said in str(refused.value)
    assert f"sweep {run.run_id} of mine is unfinished" in str(refused.value)
    assert "--fresh" in str(refused.value)
    outcome.set_status(run, "FINISHED")
    assert sweeps.find_sweep(plan_of(other), other.example, prepared) is None, "a new one begins"


@pytest.mark.usefixtures("own_code")
def test_other_data_and_other_code_are_other_sweeps(space, left):
    _, prepared = left()
    with pytest.raises(UserError, match=r"parallel was 1 and is now 2; its data version was .* and is now new"):
        sweeps.find_sweep(
            plan_of(space, parallel=2), space.example, prepared.model_copy(update={"data_version": "new"})
        )
    Path("tasks/evaluation/gate.py").write_text(Path("tasks/evaluation/gate.py").read_text() + "\nMORE = 1\n")
    with pytest.raises(UserError, match="the code of flows/, tasks/ or its model"):
        sweeps.find_sweep(plan_of(space), space.example, prepared)


def test_what_fits_the_data_is_chosen_when_these_are_prepared(write, tiny):
    """An earlier version of them lies in data/tiny; only the flow knows what this sweep trains on."""
    path = write("set: {dataset.name: tiny, train.epochs: 3}\nspace: {schedule.learning_rate: [0.1, 0.2]}")
    assert sweeps.load(path).example.model == config.load().model
    numbers = tiny.model_copy(update={"target": Target(task="regression", num_outputs=1)})
    fitted = sweeps.load(path, numbers)
    assert (fitted.metric, fitted.example.register_.metric) == ("validation/loss", "test/r2")
    chosen = fitted.settings({"schedule.learning_rate": 0.2})
    assert (chosen.model.name, chosen.train.per_replica_batch_size, chosen.train.epochs) == ("vgg", 8, 3)
    assert chosen.schedule.learning_rate == 0.2


def write_trial(number, settings, **more):
    return write_run(number, settings=settings.to_json(), settings_digest=settings.digest(), **more)


def test_how_a_sweep_is_tracked_makes_it_no_other_one(write, space, left):
    run, prepared = left()
    fixed = "set: {train: {epochs: 9}, tracking.system_metrics: false, train.loop: custom, "
    other = sweeps.load(write(SPACE.replace("set: {train.epochs: 9, ", fixed)))
    assert other.example.tracking.system_metrics is False
    assert sweeps.find_sweep(plan_of(other), other.example, prepared) == run
    params = searched(space, 1)[0].params
    trial = write_trial(1, space.settings(params), parent_run_id=run.run_id)
    assert sweeps.run_of(run, other.settings(params)) == trial, "and the trial at work goes on"


def test_the_run_of_a_trial_is_found_by_its_settings(space):
    parent = write_run(5, folder=f"mlruns/sweeps/{'5' * 32}", run_id="5" * 32)
    first, second = (one.params for one in searched(space, 2))
    for number, params in enumerate((first, second)):
        write_trial(number, space.settings(params), parent_run_id=parent.run_id)
    write_trial(9, space.settings(first))
    assert sweeps.run_of(parent, space.settings(second)).number == 1
    assert sweeps.run_of(parent, space.settings(first)).number == 0, "not one that is not a trial"
    assert sweeps.run_of(parent, space.settings(first | {"train.epochs": 3})) is None


# What is told


def sweep_of(space):
    """Return the record of a sweep whose trainings are ``value_of``, one of which failed and one was a copy."""
    trials = searched(space, 25)
    trials[4] = Trial(number=4, state="failed", params=trials[4].params, reason="no <memory> left")
    trials[5] = trials[0].model_copy(update={"number": 5, "same_as": 0})
    return Sweep(
        run_id="5" * 32,
        folder=f"mlruns/sweeps/{'5' * 32}",
        flow_run_id=None,
        git_commit="c",
        data_version="d",
        dataset="digits",
        model="mlp",
        plan=plan_of(space),
        trials=tuple(trials),
        best=sweeps.best_of(trials, True).number,
        importance=sweeps.importance(space, trials),
        seconds=1.0,
        finished_at="now",
    )


@pytest.fixture
def swept(space):
    return sweep_of(space)


def test_a_table_has_the_best_first(swept):
    header, rows = sweep_cells(swept, sorted(swept.trials, key=lambda one: one.number))
    assert header[:5] == ["trial", "state", "validation/loss", "epochs", "s"]
    assert rows[5][1] == "same as 0"
    assert rows[4][1:5] == ["failed", "-", "-", "-"]
    remarks = sweep_remarks(swept)
    assert remarks[0].startswith("25 trials: ")
    assert "1 of them repeated" in remarks[0]
    assert remarks[-1] == "trial 4 failed: no <memory> left"


def test_the_csv_has_a_line_a_trial(swept, tmp_path):
    lines = records_table(swept.trials, tmp_path / "sweep.csv").read_text().splitlines()
    assert len(lines) == 26
    assert lines[0].startswith("number,state,")
    assert "params.schedule.learning_rate" in lines[0]
    assert lines[1].startswith("0,complete,")


def test_the_page_has_all_and_no_markup_of_others(swept, tmp_path):
    text = write_page(swept, tmp_path / "sweep.html").read_text()
    assert "Partial: the best trial has not been trained on all examples" in text
    assert "no &lt;memory&gt; left" in text
    assert text.count("<svg") == 2 + 1 + 3, "the course of it, importance, and a slice each"
    assert "fANOVA" in text
    drawn = [(x, y) for one in _dots(swept, lambda one: one.number) for x, y in zip(one.x, one.y, strict=True)]
    assert len(drawn) == len(set(drawn)) == 24, "nothing hides the best"
    assert ">[16]</text>" in text, "a choice has its name along the axis"
    assert ">[32, 16]</text>" in text
    assert "http" not in text.replace("http-equiv", "")


def test_the_page_of_a_sweep_without_a_whole_trial(swept, tmp_path):
    failed = tuple(Trial(number=n, state="failed", params=one.params, reason="x") for n, one in enumerate(swept.trials))
    text = write_page(swept.model_copy(update={"trials": failed, "best": None, "importance": {}}), tmp_path / "s.html")
    assert "No trial was completed." in text.read_text()
