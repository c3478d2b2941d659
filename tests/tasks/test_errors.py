import pytest

from tasks.system.errors import (
    Interrupted,
    Preempted,
    StratagemError,
    UserError,
    cut,
    from_json,
    listed,
    one_of,
    printable,
    to_json,
)


def test_what_a_terminal_obeys_is_written_out():
    odd, shown = "\x1b[31mr\u202eed\n\u200f\x9b\ud800", r"\x1b[31mr\u202eed\n\u200f\x9b\ud800"
    assert printable(odd) == shown
    assert printable(odd, keep="\n") == shown.replace(r"\n", "\n")
    assert str(StratagemError(odd)) == shown
    assert listed([odd, "b"]) == f"{shown}, b"
    assert cut("a\x1b[1m") == r"a\x1b[1m"
    for plain in ("$0 - $10", "a_b^c", "naïve 漢字", "مرحبا", "می\u200cخواهم", "👩\u200d🔬"):
        assert printable(plain) == plain, "letters of any writing, and what joins them"


def test_a_message_lists_at_most_100_of_the_names_that_are_allowed():
    assert one_of("column", "x", (f"gene {number:03}" for number in range(300))).endswith("gene 099 and 200 more")


class Damaged(UserError):
    """As a module of its own has it."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StratagemError("m"), StratagemError),
        (UserError("m"), UserError),
        (Damaged("m"), UserError),
        (Interrupted("m", 143), Interrupted),
        (Preempted("m"), Interrupted),
    ],
)
def test_an_error_travels_between_processes_as_what_it_is(error, expected):
    received = from_json(to_json(error))
    assert type(received) is expected
    assert str(received) == "m"
