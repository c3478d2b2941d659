"""What a comparison says of its figures, on records made by hand."""

import pytest

from tasks.records import Comparison, ComparisonRow, Repeat, StepTime
from tasks.reports.comparison import comparison_pages, findings, steps_table

CPU, GPU = "/device:CPU:0", "/device:GPU:0"


def step(compute, collectives=0.0, input_wait=0.0, host=0.0):
    return StepTime(
        num_steps=30, compute_ms=compute, collectives_ms=collectives, input_wait_ms=input_wait, host_ms=host
    )


def row(strategy, speeds, parts=None, device=CPU, devices=1, loop="fit", base=None, span=None, **more):
    """A row of rounds with these speeds, held against the speeds of `base`."""
    ratios = [speed / other for speed, other in zip(speeds, base or speeds, strict=True)]
    ordered = sorted(ratios)
    return ComparisonRow(
        strategy=strategy,
        loop=loop,
        run_id=f"{strategy}-{loop}",
        devices=(device,) * devices,
        examples_per_second=sorted(speeds)[len(speeds) // 2],
        speed_up=ordered[len(ordered) // 2],
        speed_up_range=(ordered[0], ordered[-1]) if base and len(ratios) > 1 else None,
        step_time=parts,
        repeats=tuple(
            Repeat(
                run_id=f"r{i}", round=i, examples_per_second=speed, total_seconds=1.0, load=0.0, start_up_seconds=1.0
            )
            for i, speed in enumerate(speeds, start=1)
        ),
        **{"num_replicas": devices, **more},
    )


def compared(*rows, batch=100, **more):
    return Comparison(
        run_id="p", folder="f", flow_run_id=None, git_commit="abc", data_version="def", dataset="digits", model="mlp",
        seed=7, epochs=3, global_batch_size=batch, num_cores=2, rows=rows, seconds=9.5, finished_at="now",
        **{"left_out": (), "note": None, "rounds": 2} | more,
    )  # fmt: skip


ONE = [1000.0, 1010.0, 990.0]  # 100 ms a step of 100 examples.
ALONE = step(95, host=5)
# Each row: what is held against one device, and what its sentence must say, and must not.
ROWS = {
    "slower because of shared cores": (
        row("mirrored", [930.0, 940.0, 925.0], step(90, 7, 0, 10), devices=2, base=ONE),
        ["mirrored, fit is slower than one_device: 0.93 times its speed",
         "2 replicas share 2 cores: compute per replica x1.9;",
         "summing gradients, with the wait for the last replica, takes 7% of a step", "take 9% of a step"],
        ["faster"],
    ),
    "collective bound": (
        row("multi_worker", [400.0, 410.0, 405.0], step(50, 190, 0, 7), devices=2, base=ONE),
        ["multi_worker, fit is slower", "Summing gradients, with the wait for the last replica, takes 77% of a step"],
        ["share 2 cores"],
    ),
    "input bound": (
        row("data_parallel", [500.0, 490.0, 505.0], step(48, 2, 148, 3), device=GPU, devices=2, base=ONE),
        ["The wait for input takes 74% of a step"],
        ["share", "compute per"],
    ),
    "launching takes more than computing": (
        row("mirrored", [900.0, 890.0, 910.0], step(30, 2, 0, 78), device=GPU, devices=4, base=ONE),
        ["Python, launching and copies take 71% of a step, more than the 30 ms that it computes"],
        ["share 2 cores"],
    ),
    "two devices of one replica, which both compute what the layout has not cut": (
        row("model_parallel", [400.0, 410.0, 405.0], step(200, 10, 0, 37), devices=2, base=ONE, num_replicas=1),
        ["2 devices share 2 cores: compute per device x2.1, on JAX in place of TensorFlow",
         "passing shards between the devices takes 4% of a step",
         "take 15% of a step"],
        ["x4.2"],
    ),
    "faster": (
        row("mirrored", [1850.0, 1800.0, 1870.0], step(50, 2, 0, 2.5), device=GPU, devices=2, base=ONE),
        ["mirrored, fit is faster than one_device: 1.85 times its speed",
         "Summing gradients, with the wait for the last replica, takes 4% of a step."],
        ["slower", "share"],
    ),
    "too noisy to tell": (
        row("mirrored", [600.0, 1400.0, 990.0], step(90, 7), devices=2, base=ONE),
        ["mirrored, fit: too noisy to judge. The rounds measured 0.60 to 1.39 times the speed", "--repeats"],
        ["slower", "faster", "share"],
    ),
    "no difference": (
        row("mirrored", [990.0, 1020.0, 1000.0], step(92, 4, 0, 4), devices=2, base=ONE),
        ["mirrored, fit is as fast as one_device: the rounds measured 0.99 to 1.01",
         "2 replicas share 2 cores: compute per replica x1.9"],
        ["slower than", "faster than"],
    ),
    "without parts no reason is given": (
        row("mirrored", [500.0, 510.0, 505.0], None, devices=2, base=ONE),
        ["is slower than", "were not measured, so the reason is unknown"],
        ["share", "x"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("held", "said", "unsaid"), ROWS.values(), ids=ROWS.keys())
def test_a_row_is_explained_by_its_figures(held, said, unsaid):
    sentence, *_ = findings(compared(row("one_device", ONE, ALONE), held))
    assert [words for words in said if words not in sentence] == [], sentence
    assert [words for words in unsaid if words in sentence] == [], sentence


def test_one_round_may_be_chance():
    one, two = row("one_device", [1000.0], ALONE), row("mirrored", [500.0], step(180, 20), devices=2, base=[1000.0])
    sentence, *_ = findings(compared(one, two, rounds=1))
    assert sentence.startswith("mirrored, fit was measured once, at 0.50 times the speed of one_device, which may be")


def test_another_loop_of_one_device_is_named_where_there_is_no_such_row():
    base = row("one_device", ONE, ALONE, loop="custom")
    sentence, *_ = findings(compared(base, row("mirrored", [500.0, 510.0, 505.0], base=ONE)))
    assert "is slower than one_device, custom: 0.50 times its speed" in sentence


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ([[1000.0, 1010.0], [900.0, 910.0]], "one_device, fit is the fastest, with 1,010 examples/s."),
        ([[1000.0, 1010.0], [990.0, 1020.0]], "Not measurably slower: one_device, fit."),
        ([[1000.0], [500.0]], "one_device, fit is the fastest. Not measurably slower: mirrored, fit."),
    ],
)
def test_the_fastest_is_so_in_every_round(speeds, said):
    made = compared(*(row(name, found) for name, found in zip(("one_device", "mirrored"), speeds, strict=True)))
    assert any(said in sentence for sentence in findings(made)), findings(made)


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        ((-0.01, 0.02), "No row's test accuracy differs measurably from that of one_device, fit: "),
        (
            (0.01, 0.03),
            "The test accuracy differs from that of one_device, fit, on the same test examples: mirrored, fit ",
        ),
        (None, None),
    ],
)
def test_the_metric_differs_where_the_difference_on_the_same_examples_is_sure(difference, said):
    one, two = (
        row(name, ONE, intervals={"test/accuracy": span})
        for name, span in (("one_device", (0.90, 0.92)), ("mirrored", (0.91, 0.94)))
    )
    if difference is not None:
        two = two.model_copy(update={"differences": {"test/accuracy": difference}, "num_replicas": 2})
    about = [sentence for sentence in findings(compared(two, one)) if "test accuracy" in sentence]
    assert len(about) == (said is not None)
    assert said is None or said in about[0]
    assert (
        difference != (0.01, 0.03) or "to +0.0300. This is to be expected: each replica sums its own part" in about[0]
    )


def test_the_spread_between_seeds_is_measured_by_repeats():
    def last(**ranges):
        one, two = (
            row(name, ONE, intervals={"test/accuracy": (0.9, 0.94)}, metric_ranges={"test/accuracy": ranges[name]})
            if ranges
            else row(name, ONE, intervals={"test/accuracy": (0.9, 0.94)})
            for name in ("one_device", "mirrored")
        )
        two = two.model_copy(update={"differences": {"test/accuracy": (0.01, 0.03)}})
        return findings(compared(one, two))[-1]

    assert last(one_device=(0.91, 0.92), mirrored=(0.925, 0.94)).endswith(
        "Another seed alone changes it by up to 0.0150 (range within a row)."
    )
    assert last().endswith("Use --repeats 2 or more to see how much another seed alone changes it.")


def test_rows_that_failed_say_nothing():
    failed = ComparisonRow(strategy="tpu", loop="fit", reason="no TPU")
    assert findings(compared(row("one_device", ONE), failed)) == (
        "Only one row has figures, so there is nothing to compare.",
    )


def test_without_one_device_only_the_fastest_is_named():
    rows = [row("mirrored", ONE), row("multi_worker", [500.0, 510.0, 505.0])]
    assert findings(compared(*(one.model_copy(update={"speed_up": None}) for one in rows))) == (
        "mirrored, fit is the fastest, with 1,000 examples/s.",
    )


def test_the_page_begins_with_what_follows(tmp_path):
    made = compared(row("one_device", ONE, ALONE), row("mirrored", [500.0] * 3, step(150, 50), base=ONE))
    made = made.model_copy(update={"finding": findings(made)})
    assert made.finding == Comparison.model_validate_json(made.model_dump_json()).finding
    text = comparison_pages(made, tmp_path)[1].read_text()
    assert f"\n\n{made.finding[0]}\n\n" in text
    assert "| one_device | fit | 100 | 95% | 0% | 0% | 5% |" in text
    assert "| mirrored | fit | 200 | 75% | 25% | 0% | 0% |" in text


def test_columns_that_no_row_has_are_left_out():
    plain = compared(row("one_device", ONE), row("mirrored", ONE, peak_memory_bytes=123_400_000))
    table = steps_table(plain)
    assert table.header == ("strategy", "loop", "peak MB")
    assert table.rows == [["one_device", "fit", "-"], ["mirrored", "fit", "123"]]
