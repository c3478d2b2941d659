"""What threads do while their caller goes on."""

from tasks.system.background import in_order


def test_what_is_made_ahead_comes_in_order_and_no_further_than_it_may():
    made = []

    def make(number):
        made.append(number)
        return 10 * number

    found = in_order(make, range(9), threads=2, ahead=3)
    assert next(found) == 0
    assert len(made) <= 5
    assert list(found) == [10 * number for number in range(1, 9)]
