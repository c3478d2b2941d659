"""`stratagem compare` and `stratagem strategies`: what is compared, the table, a whole comparison."""

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
from contextlib import closing

import mlflow
import pytest
import yaml

from flows import cli, comparison
from flows.plan import LOOPS, plan
from tasks import config, processes, records, report
from tasks.errors import UserError
from tasks.records import Comparison, ComparisonRow, TrainingResult

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
    monkeypatch.setattr(processes, "check_devices", lambda settings: None)


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
        ("tpu", "fit"), ("tpu", "custom"), ("data_parallel", "fit"), ("model_parallel", "fit"),
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
    only = {
        "parameter_server": ("fit", "custom"),
        "data_parallel": ("custom", "fit"),
        "model_parallel": ("custom", "fit"),
    }
    assert planned.left_out == tuple(
        f"{kind} with {asked}: its only loop is {offered}" for kind, (asked, offered) in only.items()
    )


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
        ([" "], LOOPS, {}, ["no strategy is named", "one_device, mirrored"]),
        (["one_device"], ["fitt"], {}, ["unknown loop 'fitt'", "Allowed: custom, fit"]),
        (["one_device"], LOOPS, {"train.epoch": 3}, ["unknown key 'train.epoch'", "'train.epochs'"]),
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
            ["nothing can be compared here", "parameter_server: its only loop is custom", "mirrored, fit: train.jit_"],
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
        ("mirrored", ["fit"], {"train.jit_compile": True}, "fit", "train.jit_compile = true: not under"),
        ("parameter_server", ["fit"], {}, None, "its only loop is custom: give --loops fit,custom"),
        ("model_parallel", ["fit"], {"strategy.devices": 2}, "fit", "make them equal"),
        ("multi_worker", ["fit"], {"strategy.launcher": "tf_config"}, "fit", "give --set strategy.launcher=local"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_strategy_that_cannot_be_trained_stays_with_its_reason(any_machine, kind, loops, overrides, loop, reason):
    trained, refused = plan(["one_device", kind], loops, None, overrides).pairs
    assert trained.settings is not None
    assert (refused.strategy, refused.loop, refused.settings) == (kind, loop, None)
    assert reason in refused.reason


def test_what_the_machine_lacks_is_a_reason(any_machine, monkeypatch):
    def check_devices(settings):
        if settings.strategy.kind == "tpu":
            raise UserError("no TPU")

    monkeypatch.setattr(processes, "check_devices", check_devices)
    pairs = plan(["tpu", "one_device"], ["fit"], None, {}).pairs
    assert [pair.reason for pair in pairs] == ["no TPU", None]


def test_a_cluster_of_someone_else_is_not_compared(any_machine, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    refused, trained = plan(["multi_worker", "one_device"], ["fit"], None, {}).pairs
    assert "strategy.launcher=local" in refused.reason
    assert trained.settings is not None
    (own,) = plan(["multi_worker"], ["fit"], None, {"strategy.launcher": "local"}).pairs
    assert own.settings is not None


# The table

CPU = "/device:CPU:0"


def row(strategy: str, loop: str, speed: float | None, devices: int = 1, **more: object) -> ComparisonRow:
    return ComparisonRow(
        strategy=strategy,
        loop=loop,
        devices=(CPU,) * devices,
        num_replicas=more.pop("num_replicas", devices),
        examples_per_second=speed,
        metrics={"test/accuracy": 0.98765},
        **more,
    )


def summarised(*rows: ComparisonRow) -> Comparison:
    planned = plan(["one_device"], LOOPS, None, {})
    split = records.PreparedSplit(
        num_examples=3,
        images="i.npy",
        labels="l.npy",
        sha256={},
        class_counts=(1, 2),
        pixel_mean=(0.0,),
        pixel_std=(1.0,),
    )
    prepared = records.PreparedDataset(
        name="digits", version="1", tfds_version="4", folder="f", raw_folder="r", image_shape=(8, 8, 1), num_classes=2,
        class_names=("a", "b"), splits={"train": split}, sources=(), licence=None,
    )  # fmt: skip
    origin = records.Lineage(git_commit="c", git_dirty=False, code_digest="", settings_digest="", data_version="d")
    run = records.Run(run_id="p", experiment="e", name="n", folder="mlruns/comparisons/p", lineage=origin, settings={})
    return comparison.summarise(planned, rows, prepared, run, 12.3456)


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
        headings = [column.heading for column in report.comparison_cells(made)[0]]
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
def test_devices_that_share_cores_are_pointed_out(any_machine, monkeypatch, devices, note):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    rows = [row("mirrored", "fit", 1.0).model_copy(update={"devices": held}) for held in devices]
    made = summarised(*rows)
    assert made.num_cores == 3
    assert made.note is None if note is None else made.note.startswith(note)
    assert made.note is None or "no speed-up is to be expected" in report.comparison_remarks(made)[-1]


@pytest.mark.parametrize(
    ("epochs", "first_call", "speed", "expected"),
    [
        ((5.0, 2.0, 3.0), 4.0, 9.0, 2.5),
        ((5.0,), 4.0, 9.0, 1.0),
        ((5.0,), None, 9.0, 5.0),
        ((), 4.0, 9.0, None),
        ((5.0,), 4.9, None, None),  # The first call was the epoch.
    ],
)
def test_an_epoch_is_counted_without_the_first_call(epochs, first_call, speed, expected):
    times = {"epoch_seconds": epochs, "first_call_seconds": first_call, "examples_per_second": speed}
    trained = TrainingResult.model_construct(**times)
    assert comparison.seconds_per_epoch(trained) == expected


def test_the_widest_table_fits_80_columns(any_machine, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    wide = {"seconds_per_epoch": 1234.56, "start_seconds": 100.0, "setup_seconds": 23.4, "tracing_seconds": 99.94}
    long = "strategy.devices = [gpu:0, gpu:2]: this machine has 0 GPUs. " * 3
    made = summarised(
        row("one_device", "custom", 1_234_567.8, **wide),
        row("parameter_server", "custom", 1_234_567.8, devices=16, num_replicas=1, **wide),
        ComparisonRow(strategy="model_parallel", loop="fit", reason=long.strip()),
        ComparisonRow(strategy="tpu", loop=None, reason="no loop"),
    ).model_copy(update={"left_out": ("data_parallel with custom: its only loop is fit",)})
    cli.print_comparison(made)
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if len(line) > 80 or "…" in line] == []
    cells = [line.split() for line in shown.splitlines()]
    speed = ["1,234,568", "1,235", "1.00"]
    assert ["one_device", "custom", "1", *speed, "100%", "0.9877", "123", "99.9"] in cells
    assert ["parameter_server", "custom", "1", "on", "16", *speed, "6%", "0.9877", "123", "99.9"] in cells
    assert ["tpu", *"-" * 9] in cells
    said = " ".join(shown.split())
    assert f"model_parallel, fit: {long.strip()}" in said, "brackets are no markup"
    assert "left out: data_parallel with custom: its only loop is fit" in said
    assert "16 devices share" in said
    assert "mlruns/comparisons/p" in said


# What each strategy offers

ASKING = {
    "train.steps_per_execution": 8,
    "train.jit_compile": True,
    "train.gradient_accumulation_steps": 2,
    "train.deterministic": True,
    "train.profile_steps": [10, 20],
}


@pytest.mark.parametrize("feature", report.offers())
def test_the_table_of_offers_says_what_the_settings_accept(feature):
    key, _, value = feature.partition("=")
    for kind, reason in report.offers()[feature].items():
        loops = config.strategy_kinds()[kind].loops
        wanted = {"strategy.kind": kind, "train.loop": loops[0], key: value or ASKING[key]}
        if reason is None:
            config.load(None, wanted)
        else:
            with pytest.raises(UserError, match=re.escape(key)) as refusal:
                config.load(None, wanted)
            assert key == "train.loop" or reason in str(refusal.value)


def test_the_documentation_has_the_table_of_the_code():
    text = (config.project_root() / "docs" / "strategies.md").read_text()
    (written,) = re.findall(r"<!-- offers: begin.*?-->\n(.*?)<!-- offers: end -->", text, re.DOTALL)
    assert written == report.offers_page(), (
        "put what `stratagem strategies --markdown` prints between the two markers in docs/strategies.md"
    )
    for kind in config.strategy_kinds():
        assert f"## `{kind}`" in text


def test_strategies_are_listed(project, run):
    listed = run(["stratagem", "strategies"], env={"COLUMNS": "80"})
    assert listed.returncode == 0, listed.stderr
    assert [line for line in listed.stdout.splitlines() if len(line) > 80 or "…" in line] == []
    reasons = " ".join(listed.stdout.split())
    for section in config.strategy_kinds().values():
        assert [reason for reason in section.refuses.values() if reason not in reasons] == []
    assert "on jax: data_parallel, model_parallel" in listed.stdout
    assert run(["stratagem", "strategies", "--markdown"]).stdout == report.offers_page()
    values = json.loads(run(["stratagem", "strategies", "--json"]).stdout)
    assert values.keys() == config.strategy_kinds().keys()
    assert values["parameter_server"]["loops"] == ["custom"]
    assert values["mirrored"]["refuses"] == dict(config.Mirrored.refuses)
    assert "train.jit_compile" in values["one_device"]["offers"]


# Whole comparisons


@pytest.fixture(scope="module")
def compared(prepared_template, record_imports, tmp_path_factory):
    """One device and two replicas under both loops, and a TPU that is not there."""
    project = tmp_path_factory.mktemp("compared") / "project"
    shutil.copytree(prepared_template, project, symlinks=True)
    imports = record_imports(project)
    command = "stratagem compare --strategies one_device,mirrored,tpu --loops fit,custom --json"
    # A model without Dropout, which each replica would draw for itself.
    settings = "train.epochs=1 strategy.devices=2 train.per_replica_batch_size=64 model.name=mlp"
    done = subprocess.run(
        [*command.split(), *(part for text in settings.split() for part in ("--set", text))],
        cwd=project,
        env=os.environ | imports.environment | {"COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(set(imports.of("tensorflow"))) == 5, "a process for each row that trained, and the parent's first"
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
        ("one_device", "fit", 1), ("one_device", "custom", 1), ("mirrored", "fit", 2), ("mirrored", "custom", 2),
        ("tpu", "fit", None), ("tpu", "custom", None),
    ]  # fmt: skip
    assert made.global_batch_size == 64
    for found in made.rows[:4]:
        assert found.reason is None
        assert found.steps == 21, "1,293 examples are 21 batches of 64, however many replicas share them"
        trained = records.load(TrainingResult, project / "mlruns/runs" / found.run_id / "records" / "training.json")
        assert (trained.global_batch_size, trained.epochs) == (64, 1)
        assert found.examples_per_second == trained.examples_per_second > 0
        assert found.tracing_seconds == trained.first_call_seconds > 0
        assert found.setup_seconds > 0
        assert found.start_seconds > 0
        assert found.seconds_per_epoch > 0
        assert abs(found.metrics["test/accuracy"] - made.rows[0].metrics["test/accuracy"]) < 0.01
    for found in made.rows[4:]:
        assert "TPU" in found.reason
        assert found.run_id is None
    one_fit, one_custom, two_fit, two_custom = made.rows[:4]
    assert (one_fit.speed_up, one_custom.speed_up) == (1, 1)
    assert two_fit.efficiency == two_fit.examples_per_second / one_fit.examples_per_second / 2
    assert two_custom.efficiency == two_custom.examples_per_second / one_custom.examples_per_second / 2
    assert made.note.startswith("2 devices share")
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
    assert [file.path for file in store.list_artifacts(made.run_id, "comparison")] == [
        "comparison/comparison.csv", "comparison/comparison.json", "comparison/comparison.md",
    ]  # fmt: skip
    page = (project / made.folder / "comparison.md").read_text()
    assert page.endswith(parent.data.tags["mlflow.note.content"])
    assert "| mirrored | custom | 2 |" in page
    children = store.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{made.run_id}'", order_by=["start_time"]
    )
    trained = [found for found in made.rows if found.run_id is not None]
    assert [child.info.run_id for child in children] == [found.run_id for found in trained]
    for child, found in zip(children, trained, strict=True):
        assert child.info.status == "FINISHED"
        assert (child.data.params["strategy.kind"], child.data.params["train.loop"]) == (found.strategy, found.loop)
        metrics = child.data.metrics
        assert metrics["performance/speed_up"] == found.speed_up
        assert metrics["performance/seconds_per_epoch"] == found.seconds_per_epoch
        assert metrics["test/accuracy"] == found.metrics["test/accuracy"]
    figures = [{name for name in child.data.metrics if not name.startswith("system/")} for child in children]
    assert [other for other in figures if other != figures[0]] == []
    with closing(sqlite3.connect(project / "mlruns/mlflow.db")) as database:
        assert database.execute("SELECT count(*) FROM registered_models").fetchone() == (0,)


@pytest.mark.slow
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
        "one_device, fit: train failed",
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


@pytest.mark.slow
def test_a_comparison_that_is_interrupted_ends_as_killed(prepared_project, start):
    command = start(
        "stratagem", "compare", "--strategies", "one_device,mirrored", "--set", "train.epochs=400",
        "--set", "tracking.system_metrics=false",
    )  # fmt: skip
    command.wait_until("  1/400")
    command.process.send_signal(signal.SIGINT)
    assert command.process.wait(120) == 130
    assert command.survivors() == []
    statuses = {r.info.run_name.rsplit("-", 1)[0]: r.info.status for r in _store(prepared_project).search_runs(["1"])}
    assert statuses == {"digits-comparison": "KILLED", "digits-one_device-fit": "KILLED"}
    assert "Traceback" not in command.err.read_text()


def test_bad_input_leaves_nothing(prepared_project, run):
    result = run(["stratagem", "compare", "--strategies", "one_device,mirrored", "--set", "strategy.workers=2"])
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: --set strategy.workers: none of one_device, mirrored has this key")
    assert [path.name for path in (prepared_project / "mlruns").iterdir()] == [".gitkeep"]
