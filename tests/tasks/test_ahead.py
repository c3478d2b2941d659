"""What threads do while their caller goes on."""

import threading

import pytest

from tasks.system.background import OneBehind, in_order


def test_what_is_made_ahead_comes_in_order_and_no_further_than_it_may():
    made = []

    def make(number):
        made.append(number)
        return 10 * number

    found = in_order(make, range(9), threads=2, ahead=3)
    assert next(found) == 0
    assert len(made) <= 5
    assert list(found) == [10 * number for number in range(1, 9)]


def test_one_thing_is_done_behind_and_its_failure_is_raised_once():
    behind, go_on, done = OneBehind("test"), threading.Event(), []

    def do(number):
        assert go_on.wait(60)
        done.append(number)
        if number == 1:
            raise OSError("the disk is full")

    behind.start(do, 0)
    assert done == [], "the caller goes on"
    go_on.set()
    behind.start(do, 1)
    assert 0 in done, "the one before is waited for"
    with pytest.raises(OSError, match="the disk is full"):
        behind.start(do, 2)
    behind.start(do, 3)
    behind.stop()
    behind.wait()
    assert done == [0, 1, 3]
