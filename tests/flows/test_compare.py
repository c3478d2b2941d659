"""`stratagem compare` and `stratagem strategies`: what is compared, the table, a whole comparison."""

import itertools
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from statistics import median

import mlflow
import psutil
import pytest
import yaml

from flows import comparison
from flows.cli import project as project_commands
from flows.cli import training as training_commands
from flows.pairs import LOOPS, plan
from tasks import config, records
from tasks.operations import preconditions
from tasks.records import Comparison, ComparisonRow, Repeat, StepTime, TrainingResult
from tasks.reports.comparison import comparison_remarks, figures_table, findings
from tasks.system.errors import UserError
from tests.tasks.written_runs import PREPARED

# Fails when the model is built for the second time: after the checks, when the run has begun.
MODELS = """
import keras

built = []

def broken(input_shape, num_classes):
    built.append(input_shape)
    if len(built) > 1:
        raise RuntimeError("no second model")
    images = keras.Input(input_shape)
    return keras.Model(images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(images)))
"""


# What is compared


@pytest.fixture
def any_machine(monkeypatch):
    """What a strategy needs of the machine is the business of other tests."""
    monkeypatch.setattr(preconditions, "check_devices", lambda settings: None)


ALL = list(config.strategy_kinds())


@pytest.mark.parametrize(
    ("overrides", "batch"),
    [
        ({}, 32),
        ({"train.per_replica_batch_size": 48}, 48),
        ({"train.global_batch_size": 80}, 80),
        ({"train.per_replica_batch_size": None, "train.global_batch_size": 80}, 80),
    ],
    ids=str,
)
def test_every_pair_does_the_same_work(any_machine, overrides, batch):
    planned = plan(ALL, LOOPS, None, overrides)
    assert [(pair.strategy, pair.loop) for pair in planned.pairs] == [
        ("one_device", "fit"), ("one_device", "custom"), ("mirrored", "fit"), ("mirrored", "custom"),
        ("multi_worker", "fit"), ("multi_worker", "custom"), ("parameter_server", "custom"),
        ("tpu", "fit"), ("tpu", "custom"), ("data_parallel", "fit"), ("data_parallel", "custom"),
        ("model_parallel", "fit"), ("model_parallel", "custom"),
    ]  # fmt: skip
    assert len(planned.trainable) == len(planned.pairs)
    for pair in planned.pairs:
        assert (pair.settings.strategy.kind, pair.settings.train.loop) == (pair.strategy, pair.loop)
    shared = [
        {key: value for key, value in settings.flat().items() if key[:9] != "strategy." and key != "train.loop"}
        for settings in planned.trainable
    ]
    assert [other for other in shared if other != shared[0]] == []
    assert shared[0]["train.global_batch_size"] == batch
    assert shared[0]["train.per_replica_batch_size"] is None
    assert planned.left_out == ("parameter_server with fit: its only loop is custom",)


def test_a_recipe_is_what_all_train(any_machine, tmp_path):
    values = {"strategy": {"kind": "mirrored", "devices": 3}, "train": {"epochs": 7, "loop": "custom"}}
    recipe = tmp_path / "own.yaml"
    recipe.write_text(yaml.safe_dump(values))
    one, mirrored, parallel = plan(["one_device", "mirrored", "data_parallel"], ["fit"], str(recipe), {}).trainable
    assert {settings.train.epochs for settings in (one, mirrored, parallel)} == {7}
    assert mirrored.strategy.devices == 3
    assert parallel.strategy.devices == 3
    assert not hasattr(one.strategy, "devices")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"strategy.devices": 2}, {"mirrored": 2, "multi_worker": 2}),
        ({"strategy.mirrored.devices": 2}, {"mirrored": 2, "multi_worker": None}),
        ({"strategy.devices": 4, "strategy.mirrored.devices": 2}, {"mirrored": 2, "multi_worker": 4}),
        ({"strategy.mirrored.devices": 2, "strategy.devices": 4}, {"mirrored": 2, "multi_worker": 4}),
    ],
    ids=str,
)
def test_a_key_goes_to_each_strategy_that_has_it(any_machine, overrides, expected):
    planned = plan(["one_device", "mirrored", "multi_worker"], ["fit"], None, overrides)
    given = {s.strategy.kind: s.strategy.devices for s in planned.trainable if s.strategy.kind != "one_device"}
    assert given == expected
    assert len(planned.trainable) == 3


@pytest.mark.parametrize(
    ("strategies", "loops", "overrides", "words"),
    [
        (["mirrord"], LOOPS, {}, ["unknown strategy 'mirrord'", "did you mean 'mirrored'?"]),
        ([" "], LOOPS, {}, ["no strategy is given", "one_device, mirrored"]),
        (["one_device"], ["fitt"], {}, ["unknown loop 'fitt'", "Allowed: custom, fit"]),
        (["one_device"], LOOPS, {"train.epoch": 3}, ["unknown key 'train.epoch'", "'train.epochs'"]),
        (["one_device"], ["fit"], {}, ["one_device --loops fit is only one row", "add another", "stratagem run"]),
        (["parameter_server"], LOOPS, {}, ["is only one row, so there is nothing to compare"]),
        (["one_device"], LOOPS, {"train.epochs": 0}, ["train.epochs = 0", "greater than 0"]),
        (["one_device"], LOOPS, {"strategy.kind": "mirrored"}, ["--set strategy.kind", "--strategies"]),
        (["one_device"], LOOPS, {"train.loop": "fit"}, ["--set train.loop", "--loops"]),
        (
            ["one_device", "mirrored"], LOOPS, {"strategy.workers": 2},
            ["strategy.workers: none of one_device, mirrored", "multi_worker, parameter_server"],
        ),
        (
            ["one_device", "mirrored"], LOOPS, {"strategy.device_count": 2},
            ["unknown key 'strategy.device_count'", "Allowed", "strategy.devices"],
        ),
        (
            ["one_device", "mirrored"], LOOPS, {"strategy.mirrored.device": 2},
            ["unknown key 'strategy.mirrored.device'", "did you mean 'strategy.mirrored.devices'?"],
        ),
        (["one_device"], LOOPS, {"strategy.mirrored.devices": 2}, ["mirrored is not compared", "one_device"]),
        (
            ["parameter_server", "mirrored"], ["fit"], {"train.jit_compile": True},
            ["none of these rows can be trained", "parameter_server: its only loop", "mirrored, fit: train.jit_"],
        ),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_mistake_is_refused_at_once(any_machine, strategies, loops, overrides, words):
    with pytest.raises(UserError) as refusal:
        plan(strategies, loops, None, overrides)
    assert [word for word in words if word not in str(refusal.value)] == [], str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "loops", "overrides", "loop", "reason"),
    [
        ("mirrored", ["fit"], {"train.jit_compile": True}, "fit", "train.jit_compile = true does not work with"),
        ("parameter_server", ["fit"], {}, None, "its only loop is custom: use --loops fit,custom"),
        ("model_parallel", ["fit"], {"strategy.devices": 2}, "fit", "make them equal"),
        ("multi_worker", ["fit"], {"strategy.launcher": "tf_config"}, "fit", "use --set strategy.launcher=local"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_strategy_that_cannot_be_trained_stays_with_its_reason(any_machine, kind, loops, overrides, loop, reason):
    trained, refused = plan(["one_device", kind], loops, None, overrides).pairs
    assert trained.settings is not None
    assert (refused.strategy, refused.loop, refused.settings) == (kind, loop, None)
    assert reason in refused.reason


def test_what_the_machine_lacks_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)  # Python then finds no such module.
    lacking, there = plan(["data_parallel", "one_device"], ["fit"], None, {}).pairs
    assert "trains on JAX, which is not installed" in lacking.reason
    assert (lacking.settings, there.reason) == (None, None)


def test_a_cluster_of_someone_else_is_not_compared(any_machine, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    refused, trained = plan(["multi_worker", "one_device"], ["fit"], None, {}).pairs
    assert "strategy.launcher=local" in refused.reason
    assert trained.settings is not None
    own, _ = plan(["multi_worker"], LOOPS, None, {"strategy.launcher": "local"}).pairs
    assert own.settings is not None


def test_two_plans_have_one_key_where_they_would_measure_the_same(any_machine):
    def key(*strategies, loops=("fit",), **overrides):
        return plan(strategies, loops, None, {"train.epochs": 2, **overrides}).key

    same = key("one_device", "mirrored")
    assert key("one_device", " mirrored ") == same
    assert re.fullmatch("comparison-[0-9a-f]{16}", same)
    others = [
        key("mirrored", "one_device"), key("one_device", "multi_worker"), key("one_device", "mirrored", loops=LOOPS),
        key("one_device", "mirrored", **{"train.seed": 1}), key("one_device", "mirrored", **{"strategy.devices": 2}),
        key("one_device", "mirrored", **{"train.traced_steps": 5}),
    ]  # fmt: skip
    assert len({same, *others}) == len(others) + 1


@pytest.mark.parametrize(
    ("given", "steps"), [({}, 30), ({"train.traced_steps": 7}, 7), ({"train.traced_steps": None}, None)]
)
def test_each_training_is_traced_afterwards_unless_it_is_turned_off(any_machine, given, steps):
    planned = plan(["one_device", "multi_worker"], ["fit"], None, given)
    assert [settings.train.traced_steps for settings in planned.trainable] == [steps, steps]


def test_what_fits_the_data_is_chosen_when_these_are_prepared(any_machine, tiny):
    """An earlier version of them lies in data/tiny; only the flow knows what this comparison trains on."""
    given = ["one_device", "mirrored"], ["fit"], None, {"dataset.name": "tiny", "train.epochs": 3}
    asked = plan(*given)
    assert asked.shared.model == config.load().model
    larger = tiny.splits["train"].model_copy(update={"num_examples": 6000, "class_counts": (5700, 300)})
    fitted = plan(*given, tiny.model_copy(update={"splits": {"train": larger}}))
    for settings in fitted.trainable:
        train, register = settings.train, settings.register_
        assert (settings.model.name, train.global_batch_size, train.epochs) == ("vgg", 128, 3)
        assert register.minimum == 0.95
    assert fitted.shared.train.per_replica_batch_size == 128


# The table

CPU = "/device:CPU:0"


def row(
    strategy: str, loop: str, *speeds: float | None, devices: int = 1, load: float = 0.0, **more: object
) -> ComparisonRow:
    """One row of as many rounds as there are speeds."""
    number = next(numbers)
    repeats = [
        ComparisonRow(
            strategy=strategy,
            loop=loop,
            run_id=f"{number}-{i}",
            repeats=(
                Repeat(
                    run_id=f"{number}-{i}",
                    round=i,
                    examples_per_second=speed,
                    total_seconds=float(i),
                    load=load,
                    start_up_seconds=1.0,
                ),
            ),
            devices=(CPU,) * devices,
            num_replicas=more.get("num_replicas", devices),
            examples_per_second=speed,
            metrics={"test/accuracy": 0.98765},
            **{name: value for name, value in more.items() if name != "num_replicas"},
        )
        for i, speed in enumerate(speeds, start=1)
    ]
    return comparison.median_row(repeats)


numbers = itertools.count()


def summarised(*rows: ComparisonRow) -> Comparison:
    planned = plan(["one_device"], LOOPS, None, {})
    origin = records.Lineage(git_commit="c", git_dirty=False, code_digest="", settings_digest="", data_version="d")
    run = records.Run(run_id="p", experiment="e", name="n", folder="mlruns/comparisons/p", lineage=origin, settings={})
    rounds = max(len(row.repeats) for row in rows)
    return comparison.summarise(planned, rows, PREPARED, run, 12.3456, rounds)


def test_a_row_is_the_median_of_its_rounds_and_is_held_against_those_of_one_device(any_machine):
    """A machine that is half as fast in the second round is nobody's gain or loss."""
    made = summarised(
        row("one_device", "fit", 100, 50, 104),
        row("mirrored", "fit", 120, 61, 124.8, devices=2),
        row("data_parallel", "fit", 90, 55, 104, devices=2),
        row("multi_worker", "fit", 80, 40, 78, devices=2),
    )
    one, faster, same, _ = made.rows
    assert [found.examples_per_second for found in made.rows] == [100, 120, 90, 78]
    assert (one.speed_up, one.speed_up_range) == (1, None)
    assert faster.speed_up == pytest.approx(1.2)
    assert faster.speed_up_range == pytest.approx((1.2, 1.22))
    assert same.speed_up_range == pytest.approx((0.9, 1.1))
    assert [found.differs for found in made.rows] == [False, True, False, True]
    table = figures_table(made)
    shown = [dict(zip(table.header, texts, strict=True)) for texts in table.rows]
    assert [texts["speed-up"] for texts in shown] == ["1.00", "1.20", "~1", "0.80"]
    assert [texts["efficiency"] for texts in shown] == ["100%", "60%", "~50%", "40%"]
    assert "data_parallel, fit is as fast as one_device: the rounds measured 0.90 to 1.10" in findings(made)[1]


def test_what_was_measured_once_is_no_gain(any_machine):
    made = summarised(row("one_device", "fit", 100), row("mirrored", "fit", 193, devices=2))
    assert not made.rows[1].differs
    assert "measured once, at 1.93 times the speed of one_device, which may be chance: use" in findings(made)[0]


def test_a_table_does_not_contradict_itself(any_machine, machine_with_cores):
    """On a busy machine it once had an efficiency of 193% beside "expect no speed-up"."""
    machine_with_cores(2)
    gained = summarised(row("one_device", "fit", 100, 100), row("mirrored", "fit", 200, 193, devices=2, load=1.5))
    assert "expect no speed-up" not in gained.note
    assert "more devices cannot explain a faster row" in gained.note
    assert "Other programs kept up to 1.5 of 2 processor cores busy" in gained.note
    quiet = summarised(row("one_device", "fit", 100, 100), row("mirrored", "fit", 130, 90, devices=2, load=0.1))
    assert "expect no speed-up" in quiet.note
    assert "Other programs" not in quiet.note


def test_a_later_round_that_fails_leaves_what_was_measured(any_machine):
    worked = row("mirrored", "fit", 100.0)
    broken = ComparisonRow(strategy="mirrored", loop="fit", reason="it broke", run_id="x")
    made = comparison.median_row([worked, broken])
    assert (made.reason, made.failures, made.examples_per_second, len(made.repeats)) == (None, ("it broke",), 100.0, 1)
    assert "mirrored, fit: a later round: it broke" in comparison_remarks(summarised(made))
    assert comparison.median_row([broken]) == broken


def test_speed_up_is_against_one_device_of_the_same_loop(any_machine):
    made = summarised(
        row("mirrored", "custom", 300, devices=2),
        row("one_device", "fit", 100),
        row("one_device", "custom", 400),
        row("one_device", "custom", 999),
        row("mirrored", "fit", 150, devices=2),
        row("model_parallel", "fit", 200, devices=8, num_replicas=2),
        row("mirrored", "fit", None, devices=2),
        ComparisonRow(strategy="tpu", loop="fit", reason="no TPU"),
    )
    assert [(found.speed_up, found.efficiency) for found in made.rows] == [
        (0.75, 0.375), (1, 1), (1, 1), (999 / 400, 999 / 400), (1.5, 0.75), (2, 0.25), (None, None), (None, None),
    ]  # fmt: skip
    assert (made.epochs, made.global_batch_size, made.seed) == (15, 32, 0)
    assert made.seconds == 12.346


def test_without_the_same_loop_any_one_device_counts_and_without_one_nothing_is_said(any_machine):
    slow, fast = row("one_device", "fit", 100), row("mirrored", "custom", 50, devices=2)
    assert summarised(slow, fast).rows[1].speed_up == 0.5
    failed = ComparisonRow(strategy="one_device", loop="fit", reason="it broke")
    for rows in ((fast,), (failed, fast)):
        made = summarised(*rows)
        assert made.rows[-1].speed_up is None
        headings = figures_table(made).header
        assert "examples/s" in headings
        assert not {"speed-up", "efficiency"} & set(headings)


@pytest.mark.parametrize(
    ("devices", "note"),
    [
        ([(CPU,), (CPU, CPU)], "2 devices share 3 processor cores"),
        ([(CPU,), (CPU,) * 4, ("cpu:0", "cpu:1")], "4 devices share 3 processor cores"),
        ([("/device:GPU:0", "/device:GPU:1"), (CPU,)], None),
        ([(CPU,), ()], None),
    ],
)
def test_devices_that_share_cores_are_pointed_out(any_machine, machine_with_cores, devices, note):
    machine_with_cores(3)
    rows = [row("mirrored", "fit", 1.0).model_copy(update={"devices": held}) for held in devices]
    made = summarised(*rows)
    assert made.num_cores == 3
    assert made.note is None if note is None else made.note.startswith(note)
    assert made.note is None or "expect no speed-up" in comparison_remarks(made)[-1]


def test_the_widest_table_fits_80_columns(any_machine, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    wide = {
        "seconds_per_epoch": 1234.56,
        "total_seconds": 12345.6,
        "start_up_seconds": 123.4,
        "tracing_seconds": 99.94,
        "peak_memory_bytes": 123_456_000_000,
        "intervals": {"test/accuracy": (0.98701, 0.98812)},
        "step_time": StepTime(num_steps=30, compute_ms=1234.0, collectives_ms=1.0, input_wait_ms=0.0, host_ms=0.0),
    }
    long = "strategy.devices = [gpu:0, gpu:2]: this machine has 0 GPUs. " * 3
    made = summarised(
        row("one_device", "custom", 1_234_567.8, **wide),
        row("parameter_server", "custom", 1_234_567.8, devices=16, num_replicas=1, **wide),
        ComparisonRow(strategy="model_parallel", loop="fit", reason=long.strip()),
        ComparisonRow(strategy="tpu", loop=None, reason="no loop"),
    ).model_copy(update={"left_out": ("parameter_server with fit: its only loop is custom",)})
    training_commands.print_comparison(made)
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > 80 or "…" in line] == []
    cells = [line.split() for line in shown.splitlines()]
    speed = ["1,234,568", "1,235", "1.00"]
    assert ["one_device", "custom", "1", *speed, "100%", "12,346", "0.9877", "123"] in cells
    assert ["parameter_server", "custom", "1", "on", "16", *speed, "6%", "12,346", "0.9877", "123"] in cells
    assert ["tpu", *"-" * 9] in cells
    parts = ["1,235", "100%", "0%", "0%", "0%", "123,456", "0.987-0.988"]
    assert ["one_device", "custom", *parts] in cells
    assert ["parameter_server", "custom", *parts] in cells
    said = " ".join(shown.split())
    assert f"model_parallel, fit: {long.strip()}" in said, "brackets are no markup"
    assert "left out: parameter_server with fit: its only loop is custom" in said
    assert "16 devices share" in said
    assert "mlruns/comparisons/p" in said


# What each strategy offers


def test_every_cell_that_says_no_has_its_reason():
    rows, reasons = project_commands.offers_cells()
    named = {mark.removeprefix("no ") for _, *marks in rows for mark in marks if mark != "yes"}
    assert named == reasons.keys()
    assert len(set(reasons.values())) == len(reasons), "one number for each reason"
    assert all(len(row) == 1 + len(config.strategy_kinds()) for row in rows)
    assert config.FEATURES.keys() < {feature for feature, *_ in rows}


def test_the_documentation_describes_each_strategy():
    text = (config.project_root() / "docs" / "strategies.md").read_text()
    assert [kind for kind in config.strategy_kinds() if f"## `{kind}`" not in text] == []


def test_strategies_are_listed(project, run):
    listed = run(["stratagem", "strategies"], env={"COLUMNS": "80"})
    assert listed.returncode == 0, listed.stderr
    assert [line for line in listed.stdout.splitlines() if len(line) > 80 or "…" in line] == []
    reasons = " ".join(listed.stdout.split())
    for section in config.strategy_kinds().values():
        assert [reason for reason in section.refuses.values() if reason not in reasons] == []
    assert "on jax: data_parallel, model_parallel" in listed.stdout
    values = json.loads(run(["stratagem", "strategies", "--json"]).stdout)
    assert values.keys() == config.strategy_kinds().keys()
    assert values["parameter_server"]["loops"] == ["custom"]
    assert values["mirrored"]["refuses"] == dict(config.Mirrored.refuses)
    assert "train.jit_compile" in values["one_device"]["offers"]


# Whole comparisons


@pytest.fixture(scope="module")
def compared(prepared_template, record_imports, tmp_path_factory, one_prefect_server):
    """One device and two replicas, twice each, and one without this loop, beside a program that does a little."""
    project = tmp_path_factory.mktemp("compared") / "project"
    shutil.copytree(prepared_template, project, symlinks=True)
    imports = record_imports(project)
    command = "stratagem compare --strategies one_device,mirrored,parameter_server --loops fit --json"
    # A model without Dropout, which each replica would draw for itself.
    settings = "train.epochs=1 strategy.devices=2 train.per_replica_batch_size=64 model.name=mlp"
    other = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: sum(range(100_000)), time.sleep(0.03)"])
    try:
        done = subprocess.run(
            [*command.split(), *(part for text in settings.split() for part in ("--set", text))],
            cwd=project,
            env=os.environ | imports.environment | {"COLUMNS": "80"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1400,
            check=False,
        )
    finally:
        other.kill()
        other.wait()
    assert done.returncode == 0, done.stderr
    assert len(set(imports.of("tensorflow"))) == 5, "a process for each training, and the parent's first"
    return project, done


def _store(project) -> mlflow.MlflowClient:
    uri = f"sqlite:///{project}/mlruns/mlflow.db"
    return mlflow.MlflowClient(uri, registry_uri=uri)


@pytest.mark.slow
def test_a_comparison_trains_the_same_everywhere(compared):
    project, done = compared
    made = Comparison.model_validate_json(done.stdout)
    assert done.stdout.count("\n") == 1
    assert [(found.strategy, found.loop, found.num_replicas) for found in made.rows] == [
        ("one_device", "fit", 1), ("mirrored", "fit", 2), ("parameter_server", None, None),
    ]  # fmt: skip
    assert made.rounds == 2
    assert made.global_batch_size == 64
    for found in made.rows[:2]:
        assert found.reason is None
        assert found.steps == 21, "1,293 examples are 21 batches of 64, however many replicas share them"
        assert [repeat.round for repeat in found.repeats] == [1, 2]
        folders = [project / "mlruns/runs" / repeat.run_id / "records" for repeat in found.repeats]
        trained = [records.load(TrainingResult, folder / "training.json") for folder in folders]
        assert {(one.global_batch_size, one.epochs) for one in trained} == {(64, 1)}
        assert [repeat.examples_per_second for repeat in found.repeats] == [one.examples_per_second for one in trained]
        assert found.examples_per_second == median(one.examples_per_second for one in trained) > 0
        assert found.tracing_seconds == median(one.first_call_seconds for one in trained) > 0
        assert found.total_seconds == median(repeat.total_seconds for repeat in found.repeats)
        assert found.total_seconds > found.start_up_seconds > 0
        assert all(0 < repeat.load <= made.num_cores for repeat in found.repeats)
        assert found.seconds_per_epoch > 0
        assert abs(found.metrics["test/accuracy"] - made.rows[0].metrics["test/accuracy"]) < 0.01
    one, two, refused = made.rows
    assert "its only loop is custom" in refused.reason
    assert refused.run_id is None
    assert (one.speed_up, one.speed_up_range) == (1, None)
    ratios = [
        repeat.examples_per_second / base.examples_per_second
        for base, repeat in zip(one.repeats, two.repeats, strict=True)
    ]
    assert two.speed_up == median(ratios)
    assert two.speed_up_range == (min(ratios), max(ratios))
    assert two.efficiency == two.speed_up / 2
    assert made.note.startswith("2 devices share")
    for found in made.rows[:2]:
        steps = [repeat.step_time for repeat in found.repeats]
        assert found.step_time in steps
        assert min(step.num_steps for step in steps) >= 30
        assert min(value for step in steps for value in step.parts.values()) >= 0
        assert min(step.compute_ms for step in steps) > 0
        assert found.peak_memory_bytes > 100e6, "TensorFlow alone takes more"
        low, high = found.intervals["test/accuracy"]
        assert low <= found.metrics["test/accuracy"] <= high < low + 0.2
    assert one.step_time.collectives_ms == 0 < two.step_time.collectives_ms
    assert made.finding[0].startswith("mirrored, fit")
    assert made.finding[-1].startswith("No row's test accuracy differs measurably from that of one_device, fit")
    page = (project / made.folder / "comparison.html").read_text()
    assert all(re.sub("&#39;", "'", page).count(sentence) == 1 for sentence in made.finding)
    assert done.stderr.index("one_device, fit\n") < done.stderr.index("mirrored, fit\n")
    assert done.stderr.index("mirrored, fit, round 2") < done.stderr.index("one_device, fit, round 2"), "and back"
    assert records.load(Comparison, project / made.folder / "comparison.json") == made
    assert [line for line in done.stderr.splitlines() if len(line) > 80] == []
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_mlflow_has_a_parent_with_the_table_and_a_child_each(compared):
    project, done = compared
    made = Comparison.model_validate_json(done.stdout)
    store = _store(project)
    parent = store.get_run(made.run_id)
    assert parent.info.status == "FINISHED"
    assert not {"strategy", "loop", "mlflow.parentRunId"} & parent.data.tags.keys()
    assert [file.path for file in store.list_artifacts(made.run_id, "comparison")] == [
        "comparison/comparison.csv", "comparison/comparison.html", "comparison/comparison.json",
        "comparison/comparison.md",
    ]  # fmt: skip
    page = (project / made.folder / "comparison.md").read_text()
    assert page.endswith(parent.data.tags["mlflow.note.content"])
    assert "| mirrored | fit | 2 |" in page
    children = store.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{made.run_id}'", order_by=["start_time"]
    )
    one, two, _ = made.rows
    expected = [(one, one.repeats[0]), (two, two.repeats[0]), (two, two.repeats[1]), (one, one.repeats[1])]
    assert [child.info.run_id for child in children] == [repeat.run_id for _, repeat in expected]
    for child, (found, repeat) in zip(children, expected, strict=True):
        assert child.info.status == "FINISHED"
        assert child.data.params["train.seed"] == str(repeat.round - 1), "each round has its own, the same for all rows"
        assert (child.data.params["strategy.kind"], child.data.params["train.loop"]) == (found.strategy, found.loop)
        metrics = child.data.metrics
        assert metrics["training/speed_up"] == found.speed_up
        assert metrics["training/seconds_per_epoch"] == found.seconds_per_epoch
        assert metrics["training/load"] == repeat.load
        assert metrics["training/compute_ms"] == found.step_time.compute_ms
        assert metrics["training/peak_memory_bytes"] == found.peak_memory_bytes
        low, high = found.metric_ranges["test/accuracy"]
        assert low <= metrics["test/accuracy"] <= high
    figures = [{name for name in child.data.metrics if not name.startswith("system/")} for child in children]
    assert [other for other in figures if other != figures[0]] == []
    with closing(sqlite3.connect(project / "mlruns/mlflow.db")) as database:
        assert database.execute("SELECT count(*) FROM registered_models").fetchone() == (0,)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_step_is_looked_at_in_other_processes_and_on_jax_too(prepared_project, run):
    """One round of each kind that the fixture lacks."""
    result = run(
        ["stratagem", "compare", "--strategies", "multi_worker,parameter_server,data_parallel", "--loops", "fit,custom",
         "--repeats", "1", "--json", "--set", "train.epochs=1", "--set", "strategy.devices=2",
         "--set", "model.name=mlp", "--set", "strategy.multi_worker.devices=null", "--set", "train.traced_steps=10"]
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("steps     one by one") == 2, "once in each training on JAX"
    made = Comparison.model_validate_json(result.stdout)
    assert {(found.strategy, found.loop) for found in made.rows} == {
        ("multi_worker", "fit"), ("multi_worker", "custom"), ("parameter_server", "custom"), ("data_parallel", "fit"),
        ("data_parallel", "custom"),
    }  # fmt: skip
    for found in made.rows:
        assert found.reason is None
        assert len(found.intervals["test/accuracy"]) == 2
        if found.strategy == "parameter_server":
            assert found.step_time is None
            continue
        assert found.step_time.num_steps >= 8
        assert min(found.step_time.parts.values()) >= 0
        assert min(found.step_time.compute_ms, found.step_time.collectives_ms, found.step_time.host_ms) > 0, found
    memory = {found.strategy: found.peak_memory_bytes for found in made.rows}
    assert memory["parameter_server"] > 2 * memory["data_parallel"], "four processes, and one"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_comparison_that_was_killed_goes_on_with_what_is_missing(prepared_project, start, run):
    """kill -9 of the command and all that it started, in the middle of the second training of four."""
    command = ["stratagem", "compare", "--strategies", "one_device,mirrored", "--loops", "fit", "--json",
               "--set", "train.epochs=1", "--set", "strategy.devices=2", "--set", "model.name=mlp"]  # fmt: skip
    killed = start(*command)
    killed.wait_until("\nmirrored, fit\n")
    killed.wait_until("strategy  mirrored")
    for process in (psutil.Process(killed.process.pid), *killed.family):
        with suppress(psutil.NoSuchProcess):  # It has ended with the command.
            process.kill()
    killed.process.wait()
    assert killed.survivors() == []
    (folder,) = (prepared_project / "mlruns/comparisons").iterdir()
    before = records.load(records.ComparisonProgress, folder / "records/progress.json")
    assert [(row.strategy, row.repeats[0].round) for row in before.rows] == [("one_device", 1)]

    other = run([*command, "--set", "train.seed=1", "--repeats", "1"])
    assert other.returncode == 0, other.stderr
    assert f"comparison {folder.name} is unfinished but is not continued: it has other rows, settings" in other.stderr
    assert Comparison.model_validate_json(other.stdout).run_id != folder.name

    again = run(command)
    assert again.returncode == 0, again.stderr
    assert f"resuming comparison {folder.name}, which is unfinished: 1 measured training is kept" in again.stderr
    made = Comparison.model_validate_json(again.stdout)
    assert made.run_id == folder.name
    assert made.rounds == 2
    one, two = made.rows
    assert one.repeats[0].run_id == before.rows[0].run_id, "it was not trained again"
    assert [[repeat.round for repeat in found.repeats] for found in (one, two)] == [[1, 2], [1, 2]]
    assert again.stderr.count("one_device, fit") == 1, "its second round alone"
    statuses = {found.info.run_id: found.info.status for found in _store(prepared_project).search_runs(["1"])}
    kept = [made.run_id, *(repeat.run_id for found in made.rows for repeat in found.repeats)]
    assert {statuses[run_id] for run_id in kept} == {"FINISHED"}
    assert sorted(statuses.values()).count("KILLED") == 1, "the training that was killed, and no other"


@pytest.mark.slow
def test_one_mistake_in_all_trainings_is_one_message(prepared_project, run):
    (prepared_project / "own_models.py").write_text(MODELS)
    result = run(
        ["stratagem", "compare", "--strategies", "one_device", "--set", "optimizer.kind=own_models:broken"]
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert message.startswith("error: optimizer.kind = 'own_models:broken' cannot be created")
    assert message.count("own_models:broken") == 1


@pytest.mark.exhaustive
def test_when_nothing_works_the_reasons_are_the_message(prepared_project, run):
    (prepared_project / "own_models.py").write_text(MODELS)
    result = run(
        ["stratagem", "compare", "--strategies", "one_device,mirrored", "--loops", "fit", "--set", "train.epochs=1",
         "--set", "strategy.devices=3", "--set", "model.name=own_models:broken"]
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stdout == ""
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for word in (
        "no strategy worked",
        "one_device, fit: model.name = 'own_models:broken'",
        "no second model",
        "mirrored, fit: train.global_",
    ):
        assert word in message
    (file,) = prepared_project.glob("mlruns/comparisons/*/comparison.json")
    made = records.load(Comparison, file)
    broken, refused = made.rows
    store = _store(prepared_project)
    child = store.get_run(broken.run_id)
    assert child.info.status == "FAILED"
    assert "no second model" in child.data.tags["reason"]
    assert child.data.tags["mlflow.parentRunId"] == made.run_id
    assert refused.run_id is None, "it was refused before it had a run"
    assert store.get_run(made.run_id).info.status == "FAILED"


def test_bad_input_leaves_nothing(digits, project, run):
    result = run(["stratagem", "compare", "--strategies", "one_device,mirrored", "--set", "strategy.workers=2"])
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: --set strategy.workers: none of one_device, mirrored has this key")
    assert {path.name for path in (project / "mlruns").iterdir()} == {".gitkeep", "code.json"}, "as before"
