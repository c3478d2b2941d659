import math

import pytest

from tasks.system import units


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0 us"),
        (0.00045, "450 us"),
        (0.9996, "1 s"),
        (59.99, "1 min"),
        (86399, "1 d"),
        (100_000_000, "1,160 d"),
    ],
)
def test_a_duration_has_three_digits_and_the_unit_that_fits_it(seconds, written):
    assert units.duration(seconds) == written


@pytest.mark.parametrize(
    ("value", "digits", "written"),
    [
        (12345.6, 4, "12,350"),
        (250_000, 4, "250,000"),
        (1234.5, 6, "1234.5"),
        (1_234_567, 6, "1,234,567"),
        (2023, 6, "2023"),
        (10_000, 6, "10,000"),
        (-1_234_567.5, 4, "-1,235,000"),
        (1e30, 6, "1e+30"),
        (0.000123456, 4, "0.0001235"),
        (math.nan, 4, "nan"),
    ],
)
def test_a_number_has_at_most_this_many_digits(value, digits, written):
    assert units.number(value, digits) == written


@pytest.mark.parametrize(
    ("value", "sign", "written"),
    [
        (0.98333, "", "0.9833"),
        (999.5, "", "999.5000"),
        (26060.4852, "", "26,060.5"),
        (0.0083, "+", "+0.0083"),
        (-1250.04, "+", "-1,250.0"),
        (None, "", "-"),
        (math.nan, "", "nan"),
    ],
)
def test_a_metric_has_no_meaningless_decimals(value, sign, written):
    assert units.metric(value, sign) == written


def test_one_thing_and_several():
    assert (units.count(1, "run"), units.count(2000, "run")) == ("1 run", "2,000 runs")
    assert units.size(1_234_567) == "1.2 MB"
