"""docs/security.md: each promise has a test. That the test is there, tests/flows/test_docs.py sees: it is a link."""

import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from flows.cli import main

PAGE = (Path(__file__).parents[1] / "docs" / "security.md").read_text(encoding="utf-8")
TABLE = "| promise | test |\n|---|---|\n"
TEST = re.compile(r"\[(test_\w+)\.test_\w+\]\((\.\./tests/[\w/]+\.py)\)")


def test_each_promise_names_its_test():
    tables = [part.partition("\n\n")[0].splitlines() for part in PAGE.split(TABLE)[1:]]
    assert len(tables) >= 6
    for row in (row for table in tables for row in table):
        promise, tests = row.strip("| ").rsplit(" | ", 1)
        assert promise
        assert TEST.sub("", tests).strip(", ") == "", f"more than tests: {tests}"
        assert TEST.search(tests), f"no test: {promise}"


def test_no_other_table_of_promises_is_left_out():
    assert PAGE.count(".py)") == len(TEST.findall(PAGE))


@pytest.mark.parametrize("command", ["ui", "up", "serve-model"])
def test_no_server_listens_beyond_this_machine(command):
    """With an option for it there would have to be a way in for everybody else, and one to keep them out."""
    options = [option for one in get_command(main.app).commands[command].params for option in one.opts]
    assert not {"--host", "--address", "--bind", "--listen"} & set(options)
    refused = CliRunner().invoke(main.app, [command, "--host", "0.0.0.0"])
    assert refused.exit_code == 2
    assert "No such option" in refused.output
