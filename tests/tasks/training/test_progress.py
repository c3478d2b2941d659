import io

import pytest
from rich.console import Console

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


def test_lines_where_there_is_no_terminal():
    text = io.StringIO()
    drive(Console(file=text, width=80), LOGS)
    assert text.getvalue().splitlines() == [
        "  epoch     loss  accuracy  learning rate",
        "    1/2   2.3026    0.1235       0.000123",
        "    2/2   2.3026    0.1235       0.000123",
    ]


@pytest.mark.parametrize("epochs", [1, 10, 999])
def test_no_line_is_longer_than_80_columns(epochs):
    text = io.StringIO()
    # A console that does not wrap: what is too long stays so.
    drive(Console(file=text, width=1000), LOGS | VALIDATION, epochs)
    lines = text.getvalue().splitlines()
    assert len(lines) == 1 + epochs
    assert "val loss  val accuracy" in lines[0]
    assert f"1/{epochs}" in lines[1]
    assert " 12.3457        1.0000" in lines[1]
    assert max(map(len, lines)) <= 80
    assert len({len(line) for line in lines}) == 1, "columns stand under their names"


MORE = {"auc": 0.5, "macro_f1": 0.25, "top_5_accuracy": 0.75}


def test_several_metrics_have_two_lines_an_epoch():
    text = io.StringIO()
    validation = {f"val_{name}": value / 2 for name, value in MORE.items()}
    drive(Console(file=text, width=80), LOGS | MORE | VALIDATION | validation)
    assert text.getvalue().splitlines() == [
        "                                                        top_5_  learning",
        "  epoch            loss  accuracy      auc  macro_f1  accuracy      rate",
        "    1/2  train   2.3026    0.1235   0.5000    0.2500    0.7500  0.000123",
        "           val  12.3457    1.0000   0.2500    0.1250    0.3750",
        "    2/2  train   2.3026    0.1235   0.5000    0.2500    0.7500  0.000123",
        "           val  12.3457    1.0000   0.2500    0.1250    0.3750",
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("epochs", [9, 10_000])
def test_metrics_for_which_there_is_no_room_are_told(epochs):
    text = io.StringIO()
    many = {f"my_metrics:share_{number}": 0.5 for number in range(9)}
    drive(Console(file=text, width=80), LOGS | many, epochs, steps=1)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "no room for" in lines[0]
    assert "my_metrics:share_8" in " ".join(lines[:3])
    heading = next(line for line in lines if "epoch" in line)
    assert heading.count("share_") == 3
    assert lines[-1].startswith(f"{epochs}/{epochs}".rjust(7))


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

    text = io.StringIO()
    drive(Console(file=text, width=80), LOGS | VALIDATION, steps=4)
    assert "━" not in text.getvalue()
    assert "\x1b" not in text.getvalue()


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
