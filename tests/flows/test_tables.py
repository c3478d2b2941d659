from rich.text import Text

from flows.cli import tables
from tasks.records import RolledBack


def test_names_are_printed_as_they_are_and_the_terminal_obeys_none(capsys):
    rows = [("\x1b[31mred\x07", "$0 - $10"), (Text("[gpu:0]"), ":x:\nsecond line")]
    tables.print_table(("class", "\u202ecolumn"), rows)
    tables.print_rows({"\x1b]0;title": "a_b^c"})
    tables.print_text("\x9b2J [gpu:0] :x:\nnext")
    out = capsys.readouterr().out
    for shown in (
        r"\x1b[31mred\x07", "$0 - $10", "[gpu:0]", r"\u202ecolumn", r"\x1b]0;title", "a_b^c", r"\x9b2J [gpu:0] :x:"
    ):  # fmt: skip
        assert shown in out
    assert not set(out) & set("\x1b\x07\x9b\u202e❌")
    assert len(out.splitlines()) == 7, "the end of a line in a cell or a text is one"


def test_what_a_result_does_not_have_is_not_printed(capsys):
    back = RolledBack(model_name="digits", before=None, now="3", loaded_back="loads")
    assert list(tables.show_record(back, ("model_name", "before", "now", "missing"))) == [back]
    assert capsys.readouterr().out.split() == ["model", "name", "digits", "now", "3"]
