"""Formats sizes, durations and numbers for people."""

from rich.filesize import decimal


def size(num_bytes: float) -> str:
    """Return a number of bytes with a suitable unit, such as 1.2 MB."""
    return decimal(round(num_bytes))


def count(num: int, what: str) -> str:
    """Return a number of things, such as 1 run or 2,000 runs."""
    return f"{num:,} {what}{'s' * (num != 1)}"


def duration(seconds: float) -> str:
    """Return a time with three digits and a suitable unit, such as 450 ms."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if (rounded := float(f"{seconds / length:.3g}")) >= 1:
            return f"{rounded:,g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def number(value: float, digits: int = 6) -> str:
    """Return a number rounded to this many digits, such as 12,345.6, but a whole number in full; below 10,000 without a
    comma: it may be a year."""
    rounded = value if float(value).is_integer() else float(f"{value:.{digits}g}")
    return f"{rounded:{',' if abs(value) >= 10_000 else ''}.15g}"


def metric(value: float | None, sign: str = "") -> str:
    """Return a metric with four decimals, or with one from 1,000 on; with a plus if ``sign`` is ``+``; - for None."""
    return "-" if value is None else f"{value:{sign},.{4 if abs(value) < 1000 else 1}f}"


def interval(low: float, high: float, sign: str = "") -> str:
    """Return the interval of a metric, such as 0.8757 to 0.8901."""
    return f"{metric(low, sign)} to {metric(high, sign)}"
