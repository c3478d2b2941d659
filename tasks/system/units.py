"""How sizes, durations and numbers are written for people."""

from rich.filesize import decimal


def size(num_bytes: float) -> str:
    """Return a number of bytes with the unit that fits it, such as 1.2 MB."""
    return decimal(round(num_bytes))


def count(num: int, what: str) -> str:
    """Return a number of things, such as 1 run or 2,000 runs."""
    return f"{num:,} {what}{'s' * (num != 1)}"


def duration(seconds: float) -> str:
    """Return a time with three digits and the unit that fits it, such as 450 ms."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if (rounded := float(f"{seconds / length:.3g}")) >= 1:
            return f"{rounded:,g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def number(value: float, digits: int = 6) -> str:
    """Return a number rounded to this many digits, such as 1,234.5; from a million on as 1.2e+06."""
    return f"{float(f'{value:.{digits}g}'):,.{max(digits, 6)}g}"
