"""Runs in a list, one by itself, and two side by side: of records, without a training."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.main import get_command

from flows.cli import main
from flows.cli import runs as run_commands
from tasks import config, records
from tasks.modeling import metrics
from tasks.records import MetricPair, RunDifference, RunStatus
from tasks.runs import entries, listing, locks, outcome
from tasks.system.errors import UserError
from tests.tasks.written_runs import run_id_of, write_results, write_run

ALL = listing.RunFilter()


def listed(choice=ALL, **how):
    """Return the numbers of the runs in a list."""
    return [int(line.run_id[:4], 16) for line in listing.list_runs(choice, **how).runs]


def test_no_run_is_a_list_of_none(project):
    found = listing.list_runs(ALL)
    assert (found.runs, found.num_runs, found.bytes, found.unreadable) == ((), 0, 0, {})
    with pytest.raises(UserError, match="unknown --dataset 'digits': no run exists yet"):
        listing.list_runs(listing.RunFilter(dataset="digits"))
    with pytest.raises(UserError, match=r"unknown --status 'wrong'\. Allowed: failed, finished, killed, running"):
        listing.list_runs(listing.RunFilter(status="wrong"))
    with pytest.raises(UserError, match="no run exists in mlruns/: train one first"):
        entries.resolve("latest")


@pytest.fixture
def three(project):
    """A run with a version, one under another strategy that failed, and one on other data that was not evaluated."""
    for number, status, overrides, results in (
        (1, "FINISHED", {}, {"version": "7", "accuracy": 0.9, "loss": 0.3}),
        (2, "FAILED", {"strategy.kind": "mirrored", "strategy.devices": 2, "train.loop": "custom"},
         {"accuracy": 0.8, "loss": float("nan")}),
        (3, "KILLED", {"dataset.name": "noise"}, {}),
    ):  # fmt: skip
        write_results(write_run(number, status, overrides), **results)


# Each: which runs are chosen, how they are sorted, and which come of it.
CHOICES = [
    ({}, {}, [3, 2, 1]),
    ({}, {"limit": 2}, [3, 2]),
    ({"dataset": "digits"}, {}, [2, 1]),
    ({"dataset": "noise"}, {}, [3]),
    ({"strategy": "mirrored"}, {}, [2]),
    ({"strategy": "tpu"}, {}, []),
    ({"status": "killed"}, {}, [3]),
    ({"status": "running"}, {}, []),
    ({"since": 2 * 3600}, {}, [3, 2]),
    ({"since": 2 * 3600 + 1}, {}, [3]),
    ({"dataset": "digits", "status": "finished"}, {}, [1]),
    ({}, {"sort": "test/accuracy"}, [1, 2, 3]),
    ({}, {"sort": "accuracy"}, [1, 2, 3]),
    ({}, {"sort": "test/accuracy", "lowest_first": True}, [2, 1, 3]),
    # What is not a number comes last, whichever come first.
    ({}, {"sort": "test/loss", "lowest_first": True}, [1, 3, 2]),
    ({}, {"sort": "test/loss"}, [1, 3, 2]),
    ({}, {"sort": "examples_per_second"}, [3, 2, 1]),
    ({}, {"sort": "bytes", "limit": 1}, [1]),
]


def test_runs_are_chosen_and_sorted(three):
    for choice, how, numbers in CHOICES:
        since = choice.get("since")
        chosen = listing.RunFilter(**choice | {"since": since and datetime.fromtimestamp(since, UTC)})
        assert listed(chosen, **how) == numbers, (choice, how)
        assert listing.list_runs(chosen, **how).num_runs == 3


def test_the_best_by_a_metric_of_ones_own_come_first(project):
    """What is better lies in the user's code, which a list of runs does not import."""
    far, near = "test/absent:far", "test/absent:near"
    assert not listing.lower_is_better(far), "no run has it"
    for number, lower, value in ((1, (far,), 0.1), (2, (far,), 0.3), (3, (far,), 0.2)):
        write_results(write_run(number), lower_is_better=lower, **{"absent:far": value, "absent:near": value})
    assert listed(sort=far, lowest_first=listing.lower_is_better(far)) == [1, 3, 2]
    assert listed(sort=near, lowest_first=listing.lower_is_better(near)) == [2, 3, 1]


def test_which_is_better_is_known_of_each_metric():
    for name in config.names_of("modeling/metrics"):
        assert listing.lower_is_better(f"test/{name}") == (metrics.find_metric(name).better == "lower"), name
    assert listing.lower_is_better("validation/loss")
    assert not listing.lower_is_better("test/top_3_accuracy"), "of which there is no file"
    assert not listing.lower_is_better("examples_per_second"), "it is not a metric"


# Each: what is asked for, and the message.
UNKNOWN = [
    ({"dataset": "digit"}, {}, "unknown --dataset 'digit': did you mean 'digits'.* Allowed: digits, noise"),
    ({"strategy": "miror"}, {}, "unknown --strategy 'miror': did you mean 'mirrored'"),
    ({"status": "done"}, {}, "unknown --status 'done'. Allowed: failed, finished, killed, running"),
    ({}, {"sort": "test/acuracy"}, "unknown --sort 'test/acuracy': did you mean 'test/accuracy'.* Allowed: bytes"),
]


def test_what_no_run_has_is_refused(three, capsys):
    for choice, how, message in UNKNOWN:
        with pytest.raises(UserError, match=message):
            listing.list_runs(listing.RunFilter(**choice), **how)
    with pytest.raises(SystemExit):
        get_command(main.app)(["runs", "--sort", "nothing"])
    assert "unknown --sort 'nothing'. Allowed: bytes" in capsys.readouterr().err


def test_a_line_says_what_came_of_a_run(three):
    line = listing.list_runs(listing.RunFilter(dataset="digits", status="finished")).runs[0]
    assert (line.model, line.strategy, line.loop, line.model_version) == (
        "convnet2", "one_device", "fit", "digits-convnet2/7"
    )  # fmt: skip
    assert (line.headline, line.metrics) == ("test/accuracy", {"test/accuracy": 0.9, "test/loss": 0.3})
    assert (line.examples_per_second, line.began) == (5001.0, "1970-01-01T01:00:00+00:00")
    assert line.ended is not None
    found = listing.list_runs(ALL)
    assert (found.checkpoint_bytes, found.model_bytes) == (3 * 2004, 3 * 2000)
    on_disk = sum(path.stat().st_size for path in Path("mlruns/runs").rglob("*") if path.is_file())
    assert found.bytes == on_disk == sum(line.bytes for line in found.runs)


def test_what_a_stage_leaves_after_the_end_of_a_run_is_seen(three):
    assert listing.list_runs(listing.RunFilter(dataset="noise")).runs[0].metrics == {}
    write_results(entries.find_run(run_id_of(3)), version="8", mae=2.5)
    line = listing.list_runs(listing.RunFilter(dataset="noise")).runs[0]
    assert (line.headline, line.metrics, line.model_version) == ("test/mae", {"test/mae": 2.5}, "digits-convnet2/8")


def test_a_run_whose_process_died_was_killed_and_one_at_work_is_running(project):
    run = write_run(1, "RUNNING")
    lost = write_run(2, status=None)
    write_run(3, "RUNNING", host="elsewhere")
    with locks.lock(run.key, "a training"), locks.lock(lost.key, "a training"):
        assert [line.status for line in listing.list_runs(ALL).runs] == ["running"] * 3
    lines = listing.list_runs(ALL).runs
    assert [line.status for line in lines] == ["running", "killed", "killed"]
    assert [line.ended for line in lines] == [None] * 3
    assert listing.show(lost).run.status == "killed"
    assert outcome.is_running(lost), "reconcile ends it"


@pytest.mark.parametrize(
    ("file", "content", "is_listed"),
    [
        ("records/run.json", "{", False),
        ("records/evaluation.json", "[]", True),
        ("status.json", "{", True),
    ],
)
def test_a_damaged_record_hides_no_other_run(three, file, content, is_listed):
    path = Path("mlruns/runs", run_id_of(2), file)
    path.write_text(content)
    assert listed() == ([3, 2, 1] if is_listed else [3, 1])
    assert (f"mlruns/runs/{run_id_of(2)}" in listing.list_runs(ALL).unreadable) is not is_listed


def test_a_run_of_another_format_is_named_at_a_start_and_left_out(three, caplog):
    folder = f"mlruns/runs/{run_id_of(2)}"
    path = Path(folder, "records", "run.json")
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))
    assert listed() == [3, 1]
    assert listed() == [3, 1]
    locks.remove_leftovers()  # As each start does.
    said = f"{path.absolute()} has format 0, but this version of Stratagem reads only format 1: start the run again"
    assert listing.list_runs(ALL).unreadable[folder].startswith(said)
    assert len([message for message in caplog.messages if message.startswith(said)]) == 1
    with pytest.raises(UserError, match="has format 0"):
        entries.resolve("0002")


def test_a_run_is_named_by_the_beginning_of_its_id(three):
    write_run(0x1000)
    assert entries.resolve("latest").run_id == run_id_of(0x1000)
    assert entries.resolve("0003").run_id == run_id_of(3)
    assert entries.resolve(run_id_of(2)).run_id == run_id_of(2)
    with pytest.raises(UserError, match=f"run '000': 3 runs begin with it: {run_id_of(1)}, .*Add more letters"):
        entries.resolve("000")
    for name in ("", "..", "../x", "%", "0_03", f"mlruns/runs/{run_id_of(1)}", "f" * 32, "f" * 33):
        with pytest.raises(UserError, match=r"unknown run '.*the newest runs: "):
            entries.resolve(name)


@pytest.mark.parametrize(
    ("text", "ago"),
    [("30m", {"minutes": 30}), ("12h", {"hours": 12}), ("7d", {"days": 7}), ("4w", {"weeks": 4}), ("0d", {})],
)
def test_a_time_is_how_long_ago(text, ago):
    before = datetime.now(UTC)
    assert before <= listing.moment(text, "--since") + timedelta(**ago) <= datetime.now(UTC)


@pytest.mark.parametrize("text", ["2026-11-20", "2026-11-20T18:30"])
def test_a_time_is_a_day_or_a_time_of_it_here(text):
    assert f"{listing.moment(text, '--since').astimezone():%Y-%m-%dT%H:%M}".startswith(text)


@pytest.mark.parametrize("text", ["", "7", "-7d", "7y", "2026-13-01", "yesterday"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UserError, match=r"--since = '.*' is not a time: use a day such as 2026-11-20"):
        listing.moment(text, "--since")


def test_a_run_is_shown_with_all_that_its_records_say(three):
    shown = listing.show(entries.find_run(run_id_of(1)))
    trained = shown.training
    assert (trained.epochs, trained.steps, trained.weights_digest, shown.evaluated) == (
        2, 82, "1", f"mlruns/runs/{run_id_of(1)}/checkpoints/82"
    )  # fmt: skip
    assert (shown.run.model_version, shown.registered.aliases, shown.settings) == (
        "digits-convnet2/7",
        ("challenger",),
        {},
    )
    assert shown.files == {
        "checkpoints/41": 1002, "checkpoints/82": 1002, "models/best.keras": 1000, "models/final.keras": 1000
    }  # fmt: skip
    other = listing.show(entries.find_run(run_id_of(2)))
    assert other.reason == "some reason"
    # Keys of another kind of a section are told, too.
    changed = ("strategy.kind", "strategy.devices", "train.loop")
    assert [other.settings[key] for key in changed] == [("mirrored", "one_device"), (2, None), ("custom", "fit")]
    bare = listing.show(entries.find_run(run_id_of(3)))
    assert (bare.evaluated, bare.run.model_version, bare.registered, bare.seconds) == (None, None, None, {})


def test_two_runs_differ_in_settings_data_code_metrics_and_speed(three):
    write_results(write_run(4, code_digest="other", data_version="f" * 32, overrides={"train.epochs": 3}), accuracy=0.7)
    first, second = entries.find_run(run_id_of(1)), entries.find_run(run_id_of(4))
    assert listing.compare(first, first) == {}
    assert listing.compare(first, second) == {
        "train.epochs": (15, 3),
        "data version": ("d" * 32, "f" * 32),
        "code": ("c0de", "other"),
        "test/accuracy": (0.9, 0.7),
        "test/loss": (0.3, None),
        "examples/s": (5001.0, 5004.0),
        "weights": ("1", "4"),
        "model version": ("digits-convnet2/7", None),
    }


def test_a_run_that_was_not_evaluated_is_named_where_metrics_are_compared(capsys):
    measured = MetricPair(first=0.9, second=None, first_interval=(0.8, 0.95))
    found = RunDifference(first="a" * 32, second="b" * 32, differences={"epochs": (1, 2)}, metrics={"test/x": measured})
    run_commands.print_difference(found)
    said = " ".join(capsys.readouterr().out.split())
    assert "95% intervals; bbbbbbbb was not evaluated (stratagem evaluate bbbbbbbb)" in said


def test_status_shows_how_far_a_training_is_the_last_result_and_what_failed(project, capsys):
    write_results(write_run(1), accuracy=0.9)
    write_run(2, "FAILED")
    old, trial, cancelled = (write_run(number, "KILLED") for number in (3, 6, 7))
    outcome.set_status(cancelled, "KILLED", "the training was stopped at step 3, which is saved")
    outcome.set_status(trial, "KILLED", "pruned after epoch 2: validation/loss 0.9000, and the limit was 0.8000")
    day_before = records.at(datetime.now(UTC).timestamp() - 25 * 3600)
    records.save(RunStatus(status="KILLED", reason=None, at=day_before), Path(old.folder, "status.json"))
    running, new, late = (write_run(number, "RUNNING", {"train.epochs": 5}, host="elsewhere") for number in (4, 5, 9))
    now = 1000 * datetime.now(UTC).timestamp()
    for run, ends in (running, (30_000, 20_000, 10_000)), (new, (10_000,)), (late, (60_000, 50_000, 40_000, 30_000)):
        lines = [[["train/loss", 0.5, now - ago, 41 * epoch]] for epoch, ago in enumerate(ends, 1)]
        others = [[["training/load", 0.1, now, 41]]]
        text = "".join(f"{json.dumps(line)}\n" for line in [*lines, *others]) + '[["train/loss", 0.'
        Path(run.folder, "metrics.jsonl").write_text(text)

    found = listing.recent_runs()
    assert [(one.run_id, one.epoch, one.epochs) for one in found.running] == [
        (late.run_id, 4, 5),
        (new.run_id, 1, 5),
        (running.run_id, 3, 5),
    ]
    assert found.running[1].seconds_left is None, "one epoch says nothing about the next"
    assert 0 <= found.running[2].seconds_left <= 10, "two epochs of 10 s are left, and 10 s of the first have passed"
    assert (found.latest.run_id, found.latest.metrics) == (run_id_of(1), {"test/accuracy": 0.9})
    assert found.failed == {f"{run_id_of(2)[:6]}-convnet2-one_device-fit": "some reason"}
    assert found.stopped == {cancelled.name: "the training was stopped at step 3, which is saved"}

    with pytest.raises(SystemExit):
        get_command(main.app)(["status"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "No servers are running: `stratagem up` starts them.",
        f"  running  {late.name}, epoch 4 of 5",
        f"  running  {new.name}, epoch 1 of 5",
    ]
    assert re.fullmatch(rf"  running  {running.name}, epoch 3 of 5, about [\d.]+ m?s left", lines[3])
    assert re.fullmatch(rf"  finished {run_id_of(1)[:6]}-convnet2-one_device-fit, test/accuracy 0\.9000, .+", lines[4])
    assert lines[5:] == [
        f"  stopped  {cancelled.name}, the training was stopped at step 3, which is saved",
        f"  failed   {run_id_of(2)[:6]}-convnet2-one_device-fit, some reason",
    ]
