"""A comparison's page, and the intervals that it shows."""

import re

import numpy as np
import pytest

from tasks.records import ComparisonRow
from tasks.reports import intervals
from tasks.reports.comparison import comparison_pages, sections
from tasks.reports.material import load
from tests.tasks import made_up
from tests.tasks.test_findings import ALONE, ONE, compared, row, step


def rows():
    """Rows of each kind that a page has to show: with and without parts, intervals and memory, and one that failed."""
    known = {"peak_memory_bytes": 987_000_000, "metrics": {"test/accuracy": 0.9}}
    return (
        row("one_device", ONE, ALONE, intervals={"test/accuracy": (0.89, 0.91)}, **known),
        row("mirrored", [500.0, 510.0, 505.0], step(90, 60, 10, 40), devices=2, base=ONE, **known,
            intervals={"test/accuracy": (0.88, 0.92)}),
        row("parameter_server", [100.0, 120.0, 110.0], None, loop="custom", devices=2, base=ONE),
        ComparisonRow(strategy="tpu", loop="fit", reason="no TPU <here> & nowhere"),
    )  # fmt: skip


def test_the_page_shows_all_and_asks_nobody(tmp_path):
    made = compared(*rows(), finding=("one is faster & <better>",), note="2 devices share 2 cores.")
    page, markdown = comparison_pages(made, tmp_path)
    text = page.read_text()
    assert "one is faster &amp; &lt;better&gt;" in text
    assert "no TPU &lt;here&gt; &amp; nowhere" in text
    assert not re.search(r"<script|https?://|@import|url\(", text)
    drawings = re.findall(r'<svg [^>]*role="img" aria-label="([^"]+)"', text)
    assert len(drawings) == text.count("<svg ") == 3
    assert '<td class="whole">mirrored</td><td class="whole">fit</td>' in text
    assert "Not measured: parameter_server, custom. Either train.traced_steps is null" in text
    assert any(alt.startswith("test accuracy, with its 95% interval: one_device, fit 0.9000") for alt in drawings)
    assert "one is faster & <better>" in markdown.read_text()
    assert "| tpu | fit |" in markdown.read_text()


def test_start_up_and_peak_memory_are_drawn_with_what_the_rounds_span():
    rounds = [(11.0, 500_000_000), (10.0, 250_000_000), (20.0, 1_000_000_000)]
    figures = [dict(zip(("start_up_seconds", "peak_memory_bytes"), values, strict=True)) for values in rounds]
    wide = row("mirrored", ONE, **figures[0])
    repeats = [one.model_copy(update=values) for one, values in zip(wide.repeats, figures, strict=True)]
    wide = wide.model_copy(update={"repeats": tuple(repeats)})
    once = row("one_device", ONE, start_up_seconds=5.0, peak_memory_bytes=500_000_000)
    once = once.model_copy(update={"repeats": ()})
    blocks = [block for part in sections(compared(wide, once)) for block in part.blocks if block.kind == "figure"]
    found = {one.alt.partition(":")[0]: one for block in blocks for one in block.charts}
    assert found.keys() == {"examples/s", "start-up, s", "peak memory, MB"}
    for name, ends in (("start-up, s", (10, 20)), ("peak memory, MB", (250, 1000))):
        long, _, short, _ = found[name].figure.axes[0].lines
        assert tuple(long.get_xdata()) == ends
        assert np.ptp(short.get_xdata()) == 0
    said = "start-up, s: median and range of the rounds: mirrored, fit 11; one_device, fit 5"
    assert found["start-up, s"].alt == said


@pytest.mark.parametrize(
    "given", [(), (ComparisonRow(strategy="one_device", loop="fit"),)], ids=["nothing worked", "one call only"]
)
def test_a_page_of_little_is_a_page(tmp_path, given):
    failed = ComparisonRow(strategy="tpu", loop="fit", reason="no TPU")
    text = comparison_pages(compared(*given, failed), tmp_path)[0].read_text()
    assert "no TPU" in text
    assert "<svg" not in text
    assert ("Not measured: one_device, fit. Either train.traced_steps is null" in text) == bool(given)


def test_the_interval_is_that_of_the_runs_own_report(tmp_path, monkeypatch):
    monkeypatch.chdir(made_up.project(tmp_path / "project"))
    run = made_up.run(*made_up.classification(200, 4))
    found = row("one_device", ONE).model_copy(update={"run_id": run.run_id})
    lost = row("mirrored", ONE).model_copy(update={"run_id": "f" * 32})
    one, two = intervals.with_intervals(compared(found, lost)).rows
    material = load(run)
    expected = intervals.of_metric(material, "accuracy")
    assert one.intervals == {"test/accuracy": (expected.low, expected.high)}
    accuracy = float(np.mean(material.scores))
    assert expected.low < accuracy < expected.high
    assert two.intervals == {}, "its run is gone"
