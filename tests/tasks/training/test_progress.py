import io
import os
import sys

import pytest
from rich.console import Console

from tasks.process.child import StandardError
from tasks.training.callbacks.progress import ProgressBar

LOGS = {"loss": 2.30258, "accuracy": 0.12345, "learning_rate": 0.000123456}
VALIDATION = {"val_loss": 12.34567, "val_accuracy": 1.0}


def drive(console, logs, epochs=2, steps=3, stop_after=None):
    """Call the bar as a training does; an interrupted one ends without its callbacks."""
    bar = ProgressBar(epochs, steps)
    bar.console = console or bar.console
    bar.on_train_begin()
    for epoch in range(epochs):
        bar.on_epoch_begin(epoch)
        for batch in range(steps):
            bar.on_train_batch_end(batch, logs)
            if stop_after == (epoch, batch):
                bar.close()
                return
        bar.on_epoch_end(epoch, logs)
    bar.on_train_end()


def printed(logs, width=80, **how):
    """What a training prints where there is no terminal."""
    text = io.StringIO()
    drive(Console(file=text, width=width), logs, **how)
    return text.getvalue()


def test_lines_where_there_is_no_terminal():
    assert printed(LOGS).splitlines() == [
        "  epoch     loss  accuracy  learning rate",
        "    1/2   2.3026    0.1235       0.000123",
        "    2/2   2.3026    0.1235       0.000123",
    ]


@pytest.mark.parametrize("epochs", [1, 10, 999])
def test_no_line_is_longer_than_80_columns(epochs):
    # A console that does not wrap: what is too long stays so.
    lines = printed(LOGS | VALIDATION, width=1000, epochs=epochs).splitlines()
    assert len(lines) == 1 + epochs
    assert "val loss  val accuracy" in lines[0]
    assert f"1/{epochs}" in lines[1]
    assert " 12.3457        1.0000" in lines[1]
    assert max(map(len, lines)) <= 80
    assert len({len(line) for line in lines}) == 1, "columns stand under their names"


def test_large_metrics_stand_under_their_names():
    lines = printed(LOGS | {"mae": 125082.2109, "val_mae": 90729.71}).splitlines()
    assert "125,082.2" in lines[1]
    assert len({len(line) for line in lines}) == 1


def test_more_metrics_than_columns_have_their_names_beside_them():
    text = printed(LOGS | {"my_metrics:share": 0.25, "auc": 0.5} | VALIDATION, epochs=1)
    assert " ".join(text.split()) == (
        "epoch 1/1, loss 2.3026, accuracy 0.1235, my_metrics:share 0.2500, auc 0.5000, val loss 12.3457, "
        "val accuracy 1.0000, learning rate 0.000123"
    )
    assert max(map(len, text.splitlines())) <= 80


def terminal():
    # In memory, so that nothing is drawn by a clock: a frame a start, a stop and a line.
    return Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False, _environ={"TERM": "xterm"})


def test_a_bar_only_on_a_terminal():
    console = terminal()
    drive(console, LOGS | VALIDATION, steps=4)
    seen = console.file.getvalue()
    assert "epoch 1/2" in seen
    assert "epoch 2/2" in seen
    assert "4/4" in seen
    assert "━" in seen
    # And it is gone at the end: the cursor is there again.
    assert seen.rstrip().endswith("0.000123")
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 2
    assert not set(printed(LOGS | VALIDATION, steps=4)) & {"━", "\x1b"}


def test_an_interrupted_epoch_leaves_no_bar():
    console = terminal()
    drive(console, LOGS, stop_after=(0, 1))
    seen = console.file.getvalue()
    assert "━" in seen
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1
    length = len(seen)
    console.print("after", end="")
    assert console.file.getvalue()[length:] == "after", "nothing is drawn around it any more"


def test_it_writes_to_standard_error(capsys):
    drive(None, LOGS)
    out, err = capsys.readouterr()
    assert out == ""
    assert "2.3026" in err


def test_a_training_goes_on_if_nobody_reads_its_output(monkeypatch):
    reads, writes = os.pipe()
    os.close(reads)
    monkeypatch.setattr(sys, "stderr", StandardError(writes))
    drive(None, LOGS)
    print("it is registered", file=sys.stderr, flush=True)
    os.close(writes)


def test_a_number_that_one_epoch_lacks_leaves_its_column_empty():
    bar, text = ProgressBar(2, 3), io.StringIO()
    bar.console = Console(file=text, width=80)
    bar.on_train_begin()
    for epoch, logs in enumerate([LOGS | {"extra": 3.0}, LOGS]):
        bar.on_epoch_begin(epoch)
        bar.on_epoch_end(epoch, logs)
    assert text.getvalue().splitlines() == [
        "  epoch     loss  accuracy    extra  learning rate",
        "    1/2   2.3026    0.1235   3.0000       0.000123",
        "    2/2   2.3026    0.1235                0.000123",
    ]
