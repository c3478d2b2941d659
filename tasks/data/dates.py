"""Recognises dates and times among the values of a column, and their formats."""

import math
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import islice
from typing import Any

from tasks.data.encoding import cells
from tasks.data.encoding.cells import BadValue

MISTAKES, SAMPLE = 0.1, 500
"""A column is numeric if at most this share of a sample is not a number; `prepare` reports the invalid values."""
TIMES = (
    "", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M%p", " %I:%M:%S %p", "T%H:%M:%S", ", %H:%M",
    ", %H:%M:%S", ", %I:%M %p", ", %I:%M:%S %p", " %H:%M:%S %Z", " %H:%M:%S.%f %Z", " %H:%M:%S,%f", " %H:%M:%S %z",
    ":%H:%M:%S", ":%H:%M:%S %z",
)  # fmt: skip
DATES = (
    "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%d/%m/%y",
    "%m/%d/%y", "%d.%m.%y", "%d-%m-%y", "%m-%d-%y", "%y-%m-%d", "%d %b %Y", "%d %B %Y", "%d. %B %Y", "%d %b, %Y",
    "%b %d, %Y", "%B %d, %Y", "%b %d %Y", "%B %d %Y", "%d-%b-%Y", "%d-%b-%y", "%d %b %y", "%d/%b/%Y", "%d%b%Y",
    "%d%b%y", "%A, %B %d, %Y", "%A, %d %B %Y", "%a, %d %b %Y", "%b %Y", "%B %Y", "%b-%y", "%b-%Y", "%m/%Y",
    "%Y年%m月%d日",
)  # fmt: skip
CLOCKS = ("%H:%M:%S", "%H:%M:%S.%f", "%H:%M", "%I:%M %p", "%I:%M%p", "%I:%M:%S %p")
FORMATS = (
    *(f"{day}{time}" for day in DATES for time in TIMES),
    *CLOCKS,
    "%a %b %d %H:%M:%S %Y",
    "%a %b %d %H:%M:%S %z %Y",
)
"""Common formats of dates and of times of day besides ISO 8601."""
LETTERS = re.compile("%[AaBbpZ]|T")
"""Marks a format that contains letters."""
COMPACT_DATES = {"%Y%m%d": re.compile(r"(19|20)\d{6}"), "%Y%m%d%H%M%S": re.compile(r"(19|20)\d{12}")}
ISO_START = re.compile(r"\d{4}[-/.]|\d{8}T\d{4}")
DATE = re.compile(
    r"(\d{4}([-/.])\d\d?\2\d\d?|\d\d?([-/.])\d\d?\3\d{4})"
    r"(\D\s?\d\d?[:.]\d\d\S*(\s([ap]\.?m\.?|[A-Z]{2,4}|Uhr|(GMT|UTC)?[+-]\d\S*))*)?"
    r"|\[?\d\d?(\.?[ -]|\.|/)([^\W\d]{3,}\.?|[^\W\d]{3})[ /-]((19|20)\d\d|\d\d)(:\d\d.*)?"
    r"|[^\W\d]{3,}\.? \d\d?(st|nd|rd|th)?,? (19|20)\d\d"
)
"""Dates, also in words of any language."""
SEASON = re.compile(r"\d\d(\d\d)[-/](\d\d)")


def spread(values: Sequence[Any]) -> Sequence[Any]:
    """Return at most ``SAMPLE`` values from all parts of a sequence."""
    return values[:: max(1, math.ceil(len(values) / SAMPLE))]


def can_read(values: Sequence[Any], read: Callable[[Sequence[Any]], Any], mistakes: float = 0.0) -> bool:
    """Return whether ``read`` accepts all values, or all but the fraction ``mistakes`` of a sample."""
    try:
        read(values)
    except BadValue:
        sample = spread(values)
        wrong = (value for value in sample if not can_read([value], read))
        return mistakes > 0 and not any(True for _ in islice(wrong, int(mistakes * len(sample)), None))
    return True


def are_iso(told: list[Any]) -> bool:
    """Return whether values are dates and times in ISO 8601."""
    some = told[:SAMPLE]
    marked = sum(not isinstance(value, str) or bool(ISO_START.match(value)) for value in some)
    return marked >= (1 - MISTAKES) * len(some) and can_read(told, lambda values: cells.days(values, ""), MISTAKES)


def are_seasons(told: list[Any]) -> bool:
    """Return whether values are years such as 2010-11: months would not all be the one after the year's last digits."""
    different = set(told)
    found = [isinstance(value, str) and SEASON.fullmatch(value) for value in different]
    return len(different) > 2 and all(one and (int(one[1]) + 1) % 100 == int(one[2]) for one in found)


def compact_format(told: list[Any]) -> str | None:
    """Return the ``strptime`` format of dates that are digits alone, such as 20260131; None for other values."""
    for form, pattern in COMPACT_DATES.items():
        if all(isinstance(value, str) and pattern.fullmatch(value) and _date(value, form) for value in told):
            return form
    return None


def formats_of(texts: Sequence[str]) -> list[str]:
    """Return the ``strptime`` formats that dates may have; none for ISO 8601 and for texts that are not dates.

    Args:
        texts: sorted, each once.
    """
    some = spread(texts)
    few = [text for text in some[:: math.ceil(len(some) / 3)] if re.search(r"\d\D|\D\d", text)] if some else []
    if not few or can_read(some, lambda values: cells.days(values, "")):
        return []
    fitting = [form for form in FORMATS if any(_date(text, form) for text in few)]
    if not any(re.search(r"\b0\d|:0", text) for text in texts):
        fitting = [form for form in fitting if form != "%H:%M"]  # Of many times, some have a 0; 21:15 may be a score.
    for looked_at in (some, texts):  # All of them only where some do not decide.
        shares = {form: sum(_date(text, form) is not None for text in looked_at) / len(looked_at) for form in fitting}
        best = max(shares.values(), default=0.0)
        if best < 1 - MISTAKES:
            return []
        fitting = [form for form, share in shares.items() if share == best]
        # %b and %B both match May.
        fitting = list({tuple(_date(text, form) for text in looked_at): form for form in fitting}.values())
        if len(fitting) == 1:
            break
    return fitting


def _date(text: str, form: str) -> datetime | None:
    has_letters = any(map(str.isalpha, text))
    if (":" in text) != (":" in form) or (has_letters != bool(LETTERS.search(form)) and text.isascii()):
        return None  # At once: there are many forms.
    if re.search(r":\d(?!\d)", text):
        return None  # 16:9 is not a time.
    if "%Z" in form and not text.endswith((" UTC", " GMT")):
        return None  # Others are names of time zones only on some machines.
    try:
        return datetime.strptime(text, form)  # noqa: DTZ007 - It is only compared with others.
    except ValueError:
        return None
