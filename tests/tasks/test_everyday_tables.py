"""Tables as people write them: what is read, what is said of it, and what is asked."""

import gzip
import json
import shlex
import time as clock
from datetime import date, time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flows.cli.data import _described
from tasks import config
from tasks import prepare as stage
from tasks.data import prepared_data, tables
from tasks.data.encoding import Encoder, cells
from tasks.data.encoding.inputs import Reader, Wanted, encode_part
from tasks.data.kinds import table
from tasks.system.errors import UserError

pytestmark = pytest.mark.usefixtures("project")

LABELS = ["tall", "short"] * 20
PLAIN = [f"{number * 0.37 - 3:.2f}" for number in range(40)]


def quoted(value):
    return '"' + value.replace('"', '""') + '"' if any(sign in value for sign in ',"\n') else value


def first_word(text):
    """The first word of a text as a shell reads it."""
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.commenters = True, ""
    return words.get_token()


def csv_of(**columns):
    """CSV of texts by column; a column of numbers and one of labels is there in any case."""
    columns = columns | {"plain": columns.get("plain", PLAIN)} | ({} if "label" in columns else {"label": LABELS})
    rows = zip(*columns.values(), strict=True)
    return "\n".join([",".join(columns), *(",".join(map(quoted, row)) for row in rows)]) + "\n"


def guess(content, target="label", name="own.csv", **values):
    """Return what `data add` makes of a file, and what it says on one line."""
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    values = {"kind": "table", "name": "own", "source": name, "target": target, **values}
    dataset, lines = table.guess(config.describe(values, "test"))
    return dataset, " ".join(" ".join(lines).split())


def prepare(content, **values):
    dataset, said = guess(content, **values)
    Path("data/own").mkdir(exist_ok=True)
    return stage.prepare(dataset), said


def numbers_of(prepared, column):
    """All values of a column, in no order."""
    names = [one.name for one in prepared.features["number"].columns]
    parts = [np.load(split.features["number"])[:, names.index(column)] for split in prepared.splits.values()]
    return np.sort(np.concatenate(parts))


def num_examples(prepared):
    return sum(split.num_examples for split in prepared.splits.values())


def read_again(column, kind, name="own.csv"):
    """The values of a column as a prediction reads them, and what is broken."""
    (read,) = Reader(Wanted({column: kind}, (kind,)), Path.cwd(), 100, "utf-8").read([name])
    return list(read.columns[column]), read.broken


def times_of(values, count=40):
    return [values[row % len(values)] for row in range(count)]


WRITTEN = [
    (["$1,200.00", "$950.50", "$12,345.00"], [1200, 950.5, 12345], "numbers with $"),
    (["1.200,50 €", "950,25 €", "12.345,00 €"], [1200.5, 950.25, 12345], "numbers with €"),
    (["R$ 1.200,25", "R$ 90,25", "R$ 7,50"], [1200.25, 90.25, 7.5], "numbers with R$"),
    (["US$1,200.25", "US$90.25", "US$7.50"], [1200.25, 90.25, 7.5], "numbers with US$"),
    (["USD 1,200.25", "USD 90.25", "USD 7.50"], [1200.25, 90.25, 7.5], "numbers with USD"),
    (["-$5.50", "$-6.25", "$7.00"], [-5.5, -6.25, 7], "numbers with $"),
    (["12 345", "9 876", "1 234 567"], [12345, 9876, 1234567], ""),
    (["12\u202f345,5", "9\u00a0876,25", "17,5"], [12345.5, 9876.25, 17.5], "numbers are written as 3,14"),
    (["12'345.5", "9’876.5", "17"], [12345.5, 9876.5, 17], ""),
    (["1,234,567", "12,345,678", "9"], [1234567, 12345678, 9], ""),
    (["12,34,567", "1,20,000", "9"], [1234567, 120000, 9], ""),
    (["1.234.567", "12.345.678", "9"], [1234567, 12345678, 9], "numbers are written as 3,14"),
    (["45%", "4.5 %", "100%"], [45, 4.5, 100], "numbers with %"),
    (["(1,200.50)", "17.25", "(3)"], [-1200.5, 17.25, -3], ""),
    (["12.5-", "17", "3-"], [-12.5, 17, -3], ""),
    (["\u22125.5", "17.25", "+3"], [-5.5, 17.25, 3], ""),
    ([" 5.5", "17.25 ", "3"], [5.5, 17.25, 3], ""),
    (["$ 1,200.50", "$ (3.25)", "$1.00"], [1200.5, -3.25, 1], "numbers with $"),
    (["￥1,200.5", "￥90.25", "￥7.5"], [1200.5, 90.25, 7.5], "numbers with ¥"),
    (["1,200円", "90円", "7.5円"], [1200, 90, 7.5], "numbers with 円"),
    (["¥1,200.5", "￥90.25", "￥7.5"], [1200.5, 90.25, 7.5], "numbers with ¥"),
    (["1'200.-", "90.-", "7.5"], [1200, 90, 7.5], ""),
    (["1'200.--", "CHF 90.--", "7.5"], [1200, 90, 7.5], ""),
    (["1.200,- €", "90,– €", "7,5 €"], [1200, 90, 7.5], "numbers with €"),
    (["Rs. 1,200/-", "Rs. 90.50/-", "Rs 7/-"], [1200, 90.5, 7], "numbers with Rs"),
    (["7 209,41 руб.", "1\u00a0209,5\u00a0руб", "90 руб."], [7209.41, 1209.5, 90], "numbers with руб"),
    (["3 456 Ft", "12 345 Ft", "90 Ft"], [3456, 12345, 90], "numbers with Ft"),
    (["1.200,50 TL", "90,25 TL", "7 TL"], [1200.5, 90.25, 7], "numbers with TL"),
    (["1.5 €/m²", "7.5 €/m²", "9 €/m²"], [1.5, 7.5, 9], "numbers with €/m²"),
    (["90.5 km/h", "-7 km/h", "1,200km/h "], [90.5, -7, 1200], "numbers with km/h"),
    (["90,5平米", "7平米", "1.200,25平米"], [90.5, 7, 1200.25], "numbers with 平米"),
    (["$45k", "$7k", "n.a.", "$90.5k"], [45, 7, 90.5], "numbers with k; numbers with $; 10 of 40 are 'n.a.'"),
    (["1,200.5 sq. ft.", "90 sq. ft.", "7 sq. ft."], [1200.5, 90, 7], "numbers with sq. ft."),
]


@pytest.mark.parametrize(("texts", "expected", "said"), WRITTEN)
def test_numbers_are_read_as_people_write_them(texts, expected, said):
    prepared, lines = prepare(csv_of(own=times_of(texts)), columns={"plain": "ignore"})
    found = np.unique(numbers_of(prepared, "own"))
    np.testing.assert_allclose(found[np.isin(found, np.float32(expected))], np.sort(expected))
    assert said in lines
    encoder = Encoder({name: one.model_dump() for name, one in prepared.features.items()}, {})
    served = encoder.encode({"own": texts})["number"]
    served = [number for number, text in zip(served[:, 0], texts, strict=True) if text != "n.a."]
    np.testing.assert_allclose(served, expected, err_msg="a served model reads them alike")


NO_NUMBERS = "#DIV/0!|?|-|n.a.|N/A|#VALUE!| |$ -|UNKNOWN|..|\\N|#NV|k. A.|S/D|Nd|.a|.Z|._"


@pytest.mark.parametrize("mark", NO_NUMBERS.split("|"))
def test_what_stands_for_no_number_is_missing_and_counted(mark):
    texts = [mark if row % 4 == 1 else text for row, text in enumerate(PLAIN)]
    prepared, said = prepare(csv_of(own=texts), columns={"plain": "ignore"})
    mean = np.mean([float(text) for text in texts if text != mark])
    assert sum(split.num_missing.get("own", 0) for split in prepared.splits.values()) == 10
    assert abs(prepared.features["number"].columns[0].fill - mean) < 1
    if mark.strip() not in cells.MISSING_TEXTS:
        assert f"10 of 40 are '{mark}' and count as missing" in said


def test_a_price_is_a_regression():
    prices = [f"${1000 + 37 * row:,}" for row in range(40)]
    dataset, said = guess(csv_of(price=prices), target="price", columns={"label": "ignore"})
    assert dataset.task == "regression"
    assert "'price': numbers with $" in said


ASKED = [
    (
        ["1,234", "2,500", "17"],
        "the comma in '1,234' of the column 'own' may be a decimal mark",
        [{"decimal": ","}, {"decimal": "."}, {"columns": {"own": "category", "plain": "ignore"}}],
    ),
    (
        ["1.234 €", "12.500 €", "€ 1.100"],
        "the point in '1.234 €' of the column 'own' may be a decimal mark",
        [{"decimal": "."}, {"decimal": ","}],
    ),
    (
        ["$1.50", "€2.50", "$3.00"],
        "the column 'own' has numbers in several currencies: '$', '€'",
        [{"columns": {"own": "category"}}],
    ),
    (
        ["01/02/2025", "03/04/2025", "05/06/2025"],
        "the dates of the column 'own', such as 01/02/2025, 03/04/2025, 05/06/2025, can be read in 2 ways",
        [{"columns": {"own": {"kind": "datetime", "format": form}}} for form in ("%d/%m/%Y", "%m/%d/%Y")],
    ),
    (
        ["25-12-31", "25-01-02", "24-06-15"],
        "the dates of the column 'own', such as 24-06-15, 25-01-02, 25-12-31, can be read in 2 ways",
        [{"columns": {"own": {"kind": "datetime", "format": form}}} for form in ("%d-%m-%y", "%y-%m-%d")],
    ),
]


def test_points_between_three_digits_are_asked_about_in_a_file_with_semicolons():
    content = csv_of(own=times_of(["1.234", "2.500"]), plain=times_of(["1", "2", "4"]))
    assert "numbers are written as" not in guess(content)[1], "beside commas, a point is one of a fraction"
    with pytest.raises(UserError, match=r"the point in '1\.234' of the column 'own' may be a decimal mark"):
        guess(content.replace(",", ";"))
    for decimal, mean in ((".", 1.867), (",", 1867)):
        prepared, _ = prepare(content.replace(",", ";"), decimal=decimal)
        assert numbers_of(prepared, "own").mean() == pytest.approx(mean)
    content = content.replace("2.500", "0.500", 1)
    assert guess(content.replace(",", ";"))[0].decimal == ".", "0.500 has no thousands"


@pytest.mark.parametrize(("texts", "message", "answers"), ASKED)
def test_what_may_mean_two_things_is_asked_and_each_answer_is_taken(texts, message, answers):
    content = csv_of(own=times_of(texts), plain=times_of(["1", "2", "4"]))
    with pytest.raises(UserError) as asked:
        guess(content)
    assert message in str(asked.value)
    assert "dataset.source = 'own.csv'" in str(asked.value)
    for answer in answers:
        key, value = next(iter(answer.items()))
        value = next(iter(value.values())) if key == "columns" else value
        assert str(value["format"] if isinstance(value, dict) else value) in str(asked.value)
        guess(content, **answer)


@pytest.mark.parametrize("name", ["Unit Price", "Ann's $", 'a "b"', "p=q", "a.b", "naïve `x`!", "a\\b"])
@pytest.mark.parametrize("texts", [texts for texts, *_ in ASKED])
def test_each_option_in_a_question_works_as_it_is_typed(name, texts):
    content = csv_of(**{quoted(name): times_of(texts)}, plain=times_of(["1", "2", "4"]))
    with pytest.raises(UserError) as asked:
        guess(content.replace(quoted(name), '"' + name.replace('"', '""') + '"', 1))
    options = [first_word(end).rstrip(";.") for end in str(asked.value).split("--set ")[1:]]
    assert options
    for option in options:
        guess(content.replace(quoted(name), '"' + name.replace('"', '""') + '"', 1), **_described([option]))


def test_a_target_that_may_be_a_number_can_be_read_as_classes():
    content = csv_of(label=times_of(["1,234", "2,500", "1,700"]), plain=times_of(["1", "2", "4"]))
    with pytest.raises(UserError, match=r"to read 'label' as words: --set dataset\.task=classification"):
        guess(content)
    assert guess(content, task="classification")[0].task == "classification"


@pytest.mark.parametrize("role", [{"weight": "own"}, {"metadata": {"own": "number"}}, {"time": "own"}])
def test_a_decimal_comma_is_found_in_a_column_with_a_role(role):
    content = csv_of(own=PLAIN, plain=times_of(["1", "2", "4"])).replace("-", "").replace(",", ";").replace(".", ",")
    dataset, _ = guess(content, **role)
    assert dataset.decimal == ","


DATES = [
    (["31/12/2025", "01/02/2025", "15/06/2024"], ["2025-12-31", "2025-02-01", "2024-06-15"], "%d/%m/%Y"),
    (["12/31/2025", "02/01/2025", "06/15/2024"], ["2025-12-31", "2025-02-01", "2024-06-15"], "%m/%d/%Y"),
    (["31.12.25", "01.02.25", "15.06.24"], ["2025-12-31", "2025-02-01", "2024-06-15"], "%d.%m.%y"),
    (["Dec-2025", "Feb-2025", "Jun-2024"], ["2025-12-01", "2025-02-01", "2024-06-01"], "%b-%Y"),
    (["Dec 31, 2025", "Feb 1, 2025", "Jun 15, 2024"], ["2025-12-31", "2025-02-01", "2024-06-15"], "%b %d, %Y"),
    (
        ["12/31/2025 8:15:30 PM", "02/01/2025 6:30:00 AM"],
        ["2025-12-31 20:15:30", "2025-02-01 06:30"],
        "%m/%d/%Y %I:%M:%S %p",
    ),
    (["31 December 2025", "1 February 2025"], ["2025-12-31", "2025-02-01"], "%d %B %Y"),
    (["31/12/2025 08:15", "01/02/2025 18:30"], ["2025-12-31 08:15", "2025-02-01 18:30"], "%d/%m/%Y %H:%M"),
    (["2025-12-31 08:15", "2025-02-01 18:30"], ["2025-12-31 08:15", "2025-02-01 18:30"], None),
    (["2025.12.31", "2025.02.01"], ["2025-12-31", "2025-02-01"], None),
    (["20251231", "20250201"], ["2025-12-31", "2025-02-01"], "%Y%m%d"),
    (["Dec 2025", "Feb 2025"], ["2025-12-01", "2025-02-01"], "%b %Y"),
    (["Wednesday, December 31, 2025", "Saturday, February 1, 2025"], ["2025-12-31", "2025-02-01"], "%A, %B %d, %Y"),
    (
        ["Wed Dec 31 08:15:00 2025", "Sat Feb 1 18:30:00 2025"],
        ["2025-12-31 08:15", "2025-02-01 18:30"],
        "%a %b %d %H:%M:%S %Y",
    ),
    (["31/12/2025, 08:15", "01/02/2025, 18:30"], ["2025-12-31 08:15", "2025-02-01 18:30"], "%d/%m/%Y, %H:%M"),
    (["2025年12月31日", "2025年2月1日"], ["2025-12-31", "2025-02-01"], "%Y年%m月%d日"),
    (
        ["2025-12-31 08:15:00 UTC", "2025-02-01 18:30:00 UTC"],
        ["2025-12-31 08:15", "2025-02-01 18:30"],
        "%Y-%m-%d %H:%M:%S %Z",
    ),
    (["08:15:30", "18:30:00"], ["1900-01-01 08:15:30", "1900-01-01 18:30"], "%H:%M:%S"),
    (["08:15", "18:30"], ["1900-01-01 08:15", "1900-01-01 18:30"], "%H:%M"),
    (["8:15PM", "6:30AM"], ["1900-01-01 20:15", "1900-01-01 06:30"], "%I:%M%p"),
    (["31DEC2025", "01FEB2025"], ["2025-12-31", "2025-02-01"], "%d%b%Y"),
    (["31DEC2025:08:15:00", "01FEB2025:18:30:00"], ["2025-12-31 08:15", "2025-02-01 18:30"], "%d%b%Y:%H:%M:%S"),
    (["31/Dec/2025", "01/Feb/2025"], ["2025-12-31", "2025-02-01"], "%d/%b/%Y"),
    (
        ["Wed, 31 Dec 2025 08:15:00 +0100", "Sat, 01 Feb 2025 18:30:00 +0000"],
        ["2025-12-31 07:15", "2025-02-01 18:30"],
        "%a, %d %b %Y %H:%M:%S %z",
    ),
    (
        ["Wed Dec 31 08:15:00 +0000 2025", "Sat Feb 01 18:30:00 +0000 2025"],
        ["2025-12-31 08:15", "2025-02-01 18:30"],
        "%a %b %d %H:%M:%S %z %Y",
    ),
    (
        ["2025-12-31 08:15:00,5", "2025-02-01 18:30:00,25"],
        ["2025-12-31 08:15:00.5", "2025-02-01 18:30:00.25"],
        "%Y-%m-%d %H:%M:%S,%f",
    ),
    (["20251231T081500Z", "20250201T183000Z"], ["2025-12-31 08:15", "2025-02-01 18:30"], None),
    (["20251231081500", "20250201183000"], ["2025-12-31 08:15", "2025-02-01 18:30"], "%Y%m%d%H%M%S"),
]


@pytest.mark.parametrize(("texts", "iso", "form"), DATES)
def test_dates_are_read_where_one_reading_fits(texts, iso, form):
    prepared, said = prepare(csv_of(when=times_of(texts)), columns={"plain": "ignore"})
    (column,) = prepared.features["number"].columns
    assert (column.kind, column.format) == ("datetime", form)
    assert ("written as" in said) == (form is not None)
    expected = cells.days(iso, "when").astype(np.float32)
    np.testing.assert_allclose(np.unique(numbers_of(prepared, "when")), np.sort(expected))
    encoder = Encoder({name: one.model_dump() for name, one in prepared.features.items()}, {})
    np.testing.assert_allclose(encoder.encode({"when": texts})["number"][:, 0], expected)


@pytest.mark.parametrize("word", ["now", "today", " now "])
@pytest.mark.parametrize("form", [None, "%d/%m/%Y"])
def test_a_word_for_the_present_is_no_date(word, form):
    for values in ([word], ["2025-12-31" if form is None else "31/12/2025", word, None]):
        with pytest.raises(cells.BadValue, match="is not a date"):
            cells.days(values, "when", form)


def test_scores_are_no_times_of_day():
    dataset, _ = guess(csv_of(own=times_of(["21:15", "21:19", "15:21", "21:18"])))
    assert dataset.columns["own"].kind == "category"


@pytest.mark.parametrize("mark", "-/")
def test_seasons_are_no_months(mark):
    dataset, said = guess(csv_of(own=times_of([f"20{year:02}{mark}{year + 1:02}" for year in range(1, 12)])))
    assert dataset.columns["own"].kind == "category"
    assert f"own (years such as 2001{mark}02, not months)" in said
    for months in (["2010-11", "2010-12", "2011-01"], ["2010-11", "2011-12"]):
        assert guess(csv_of(own=times_of(months)))[0].columns["own"].kind == "datetime"
    dataset, said = guess(
        csv_of(own=[f"{1970 + row}{mark}{71 + row}" for row in range(29)], plain=PLAIN[:29], label=LABELS[:29])
    )
    assert dataset.columns["own"].kind == "ignore"
    assert f"(a different value in each row; years such as 1970{mark}71, not months)" in said


@pytest.mark.parametrize(
    "texts",
    [
        ["31/12/2025", "2025-11-07", "2025-10-08"],
        ["31.12.2025 08:15 Uhr", "01.02.2025 18:30 Uhr"],
        ["2025/03/31 1:02:03 PM GMT+1", "2025/03/15 11:12:13 AM GMT+1"],
    ],
)
@pytest.mark.parametrize("count", [3, 40], ids=["repeated", "distinct"])
def test_dates_that_no_form_fits_are_words_and_that_is_said(texts, count):
    texts = [times_of(texts)[row].replace("1", str(1 + row % count % 9), 1) for row in range(40)]
    dataset, said = guess(csv_of(own=texts))
    assert dataset.columns["own"].kind in ("category", "ignore")
    assert "words, because no form of a date fits all values" in said


@pytest.mark.parametrize(
    "form",
    [
        "{day:02}.12.2025 paid {row} of the bills",
        "2025-12-{day:02} 10:{row} cash paid",
        "2025-12-{day:02} 10:{row} paid",
        "2025-12-{day:02} 10:{row}:00 login ok",
        "{row}.25;the meter {row} was broken and nobody could read it",
        "{row}.25 kg;the scale {row} was broken and nobody weighed the letters",
    ],
)
def test_notes_among_dates_and_numbers_are_texts(form):
    forms = times_of([*form.split(";"), form.split(";")[0]])
    dataset, _ = guess(csv_of(own=[text.format(day=1 + row % 28, row=row + 10) for row, text in enumerate(forms)]))
    assert dataset.columns["own"].kind == "text"


def test_a_time_zone_is_read_alike_on_every_machine(monkeypatch):
    monkeypatch.setenv("TZ", "Europe/Berlin")
    clock.tzset()
    try:
        dataset, _ = guess(csv_of(own=times_of(["2024-01-01 10:00:00 CET", "2024-07-02 11:00:00 CEST"])))
    finally:
        monkeypatch.undo()
        clock.tzset()
    assert dataset.columns["own"].kind == "category"


def test_a_few_mistakes_among_dates_are_named():
    texts = ["unknown" if row % 10 == 3 else f"{1 + row % 28:02}/{1 + row // 28:02}/2025" for row in range(40)]
    assert "written as %d/%m/%Y; 4 of 40 are 'unknown' and count as missing" in prepare(csv_of(when=texts))[1]
    texts = ["soon" if row == 7 else f"{1 + row % 28:02}/{1 + row // 28:02}/2025" for row in range(40)]
    with pytest.raises(UserError, match=r"the column 'when' has the value 'soon' in row 8"):
        prepare(csv_of(when=texts))


def test_rows_are_ordered_by_dates_as_people_write_them():
    days = [f"{1 + row % 28:02}/{1 + row // 28:02}/2025" for row in range(40)]
    prepared, _ = prepare(csv_of(when=days, size=[f"{row}.5" for row in range(40)]), time="when")
    assert np.load(prepared.splits["test"].features["number"])[:, 0].tolist() == [row + 0.5 for row in range(32, 40)]


def test_a_time_that_may_be_read_in_two_ways_is_asked():
    content = csv_of(when=times_of(["01/02/2025", "03/04/2025", "05/06/2025"]))
    with pytest.raises(UserError, match=r"columns.when=\{kind: ignore, format: '%d/%m/%Y'\}"):
        guess(content, time="when")
    dataset, _ = guess(content, time="when", columns={"when": {"kind": "ignore", "format": "%m/%d/%Y"}})
    assert dataset.columns["when"].format == "%m/%d/%Y"


CODES = {
    "row number": [str(row) for row in range(40)],
    "steps of ten": [str(1000 - 10 * row) for row in range(40)],
    "shuffled": [str(100 + 17 * row % 40) for row in range(40)],
    "customer_id": [str(7_919 * row**3 % 1_000_003) for row in range(1, 41)],
    "user_ids": [str(7_919 * row**3 % 1_000_003) for row in range(1, 41)],
    "account": [str(7_919 * row**3 % 1_000_003) for row in range(1, 41)],
    "grows": [str(1_467_810_369 + 37 * row**2) for row in range(40)],
    "name": [f"Ann {chr(65 + row % 26)}{row}" for row in range(40)],
    "large": [str(2**60 + 7_919**4 * row**2) for row in range(40)],
    "close": [str(2**60 + 7 * row**2 % 199) for row in range(40)],
    "phone": [f"+49 170 {1_000_000 + 7_919 * row}" for row in range(40)],
    "mobile_phone": [str(49_170_000_000 + 7_919**2 * row**2 % 9_999_991) for row in range(40)],
    "ISBN13": [str(9_780_000_000_000 + 7_919**3 * row**2 % 9_999_999_967) for row in range(40)],
}


@pytest.mark.parametrize("name", CODES)
def test_what_says_which_row_it_is_is_ignored_and_that_is_said(name):
    dataset, said = guess(csv_of(**{name: CODES[name]}))
    assert dataset.columns[name].kind == "ignore"
    assert f"ignore {name} (" in said


@pytest.mark.parametrize(
    "texts",
    [
        [str(row**3 * 7_919 % 90_001) for row in range(1, 41)],  # Whole numbers of a wide range: incomes, populations.
        [str(18 + row * 5 % 31) for row in range(40)],
        [f"{row / 4}" for row in range(40)],
        [str(3 + 7 * row**2) for row in range(40)],  # Counts that add up.
        [str(12_000 + 2_000 * row + row % 3 * 100) for row in range(40)],  # The rows are sorted by it.
    ],
)
def test_measured_numbers_stay(texts):
    dataset, _ = guess(csv_of(own=texts))
    assert dataset.columns["own"].kind == "number"


SPELLINGS = [
    (["tall ", "tall", " short", "short"], ("short", "tall")),
    (["cafe\u0301", "caf\u00e9", "the\u0301", "th\u00e9"], ("café", "thé")),
    (["0", "0.0", "1", "1.0"], ("0", "1")),
    (["a\u00a0", "a", "b", "b\t"], ("a", "b")),
]


@pytest.mark.parametrize(("texts", "classes"), SPELLINGS)
def test_one_value_in_several_spellings_is_one(texts, classes):
    content = csv_of(label=times_of(texts), own=times_of(texts, 40))
    prepared, _ = prepare(content, columns={"own": "category"}, task="classification")
    assert prepared.target.class_names == classes
    assert sorted(json.loads(Path(prepared.features["category"].vocabulary).read_text())[0]) == list(classes)


def test_a_column_of_splits_is_pointed_out():
    _, said = guess(csv_of(part=times_of(["train", "train", "TEST"])))
    assert "category part (names of splits: --set dataset.split_column=part uses them)" in said


@pytest.mark.parametrize("texts", [["4:3", "16:9", "1:1"], ["45:30", "12:15"], ["12-15", "1-5"]])
def test_numbers_with_signs_between_them_are_words(texts):
    assert guess(csv_of(own=times_of(texts)))[0].columns["own"].kind == "category"


@pytest.mark.parametrize("count", [4, 40], ids=["repeated", "distinct"])
@pytest.mark.parametrize(
    ("form", "units"),
    [("{} {}", ["km/h", "mph"]), ("€{}{}", ["K", "M"]), ("1 {} kg", ["kg"]), ("{}{}", ["平米", "m²"])],
)
def test_several_units_make_words_and_that_is_said(count, form, units):
    _, said = guess(csv_of(own=times_of([form.format(row + 0.5, units[row % len(units)]) for row in range(count)])))
    assert f"words, because the numbers have {', '.join(map(repr, sorted(units)))} after them" in said


def test_the_unit_of_a_target_a_weight_and_metadata_is_read():
    texts = times_of([f"{number} kg" for number in (7, 8, 9.5)])
    content = csv_of(label=[f"{row + 0.5} mm" for row in range(40)], heavy=texts, known=texts)
    prepared, said = prepare(content, weight="heavy", metadata={"known": "number"})
    assert prepared.target.task == "regression"
    assert "note 'label': numbers with mm" in said
    weights = np.concatenate([np.load(split.weights) for split in prepared.splits.values()])
    assert {*weights.tolist()} == {7, 8, 9.5}
    with pytest.raises(cells.BadValue, match="'7 lb' is not a number"):
        cells.numbers(["7 kg", "7 lb"], "own", ".", "kg")


@pytest.mark.parametrize("other", ["Varies", "null kg", "7", "- kg"])
def test_most_numbers_with_a_unit_are_enough_to_say_so(other):
    _, said = guess(csv_of(own=[other if row % 6 == 1 else f"{row + 0.5} kg" for row in range(40)]))
    assert "words, because the numbers have 'kg' after them" in said


def test_a_class_that_looks_like_a_number_is_pointed_out():
    texts = times_of(["1.5k", "2.5M"])
    assert "'label': words, because the numbers have 'M', 'k' after them" in guess(csv_of(label=texts))[1]
    assert "'label':" not in guess(csv_of(label=times_of(["1", "2"])))[1]
    said = guess(csv_of(label=times_of(["2025-12-31", "2025-11-30"])))[1]
    assert "'label': words, because a target cannot be a date" in said


def test_a_column_of_words_says_which_may_mean_a_missing_value():
    _, said = guess(csv_of(label=times_of(["yes", "no", "?", "no"]), city=times_of(["Bonn", "\\N"])))
    assert (
        "10 of 40 rows of 'label' are '?', read as a value; if there is none: --set 'dataset.na_values=[\"?\"]'" in said
    )
    assert "20 of 40 rows of 'city' are '\\N', read as a value" in said
    _, said = guess(csv_of(end=times_of([".c", ".h", ".py", ".py"])))
    assert "20 of 40 rows of 'end' are '.c' or '.h', read as a value" in said


def test_percents_beside_other_numbers_are_counted_and_beside_shares_asked_about():
    _, said = guess(csv_of(own=times_of(["45%", "31.5", "0.5", "7%"])))
    assert "own (numbers with % in 20 of 40 rows)" in said
    with pytest.raises(UserError, match=r"percentages such as '45%' and numbers up to 1 such as '0.31', which may be"):
        guess(csv_of(own=times_of(["45%", "0.31", "0.5", "7%"])))


@pytest.mark.parametrize(
    "texts",
    [
        ["01067", "1067", "00123", "123"],
        ["1.50", "1.5", "7", "+7"],
        ["TRUE", "FALSE"],
        ["1e5", "100000"],
        ["00340434161094042557", "99340434161094042557123", "01067"],
    ],
)
@pytest.mark.parametrize("later", [False, True], ids=["whole", "after words"])
def test_codes_stay_as_they_are_written(texts, later, monkeypatch):
    monkeypatch.setattr(tables, "CHUNK_ROWS", 10)
    codes = ["none yet"] * 10 * later + times_of(texts, 40 - 10 * later)
    prepared, _ = prepare(csv_of(label=codes, own=codes), columns={"own": "category"}, task="classification")
    vocabulary = json.loads(Path(prepared.features["category"].vocabulary).read_text())
    assert set(vocabulary[0]) == set(prepared.target.class_names) == set(codes)
    features = {name: one.model_dump() for name, one in prepared.features.items() if name == "category"}
    served = Encoder(features, {"category": vocabulary}).encode({"own": texts})["category"][:, 0]
    assert [vocabulary[0][place - 2] for place in served] == texts


def test_a_sum_below_the_rows_is_pointed_out():
    said = guess(csv_of(region=[f"Region {row}" for row in range(39)] + ["TOTAL"]))[1]
    assert "'TOTAL' at the end of 'region' may be a sum of the other rows: remove its row if it is one" in said
    assert "may be a sum" not in guess(csv_of(region=["Total"] + [f"Region {row}" for row in range(39)]))[1]


def test_a_table_with_many_columns_takes_a_few_lines():
    content = csv_of(**{f"x{place}": PLAIN for place in range(300)}, day=["2025-01-31"] * 39 + ["k.A."])
    said = guess(content)[1]
    assert "x28, x29 and 271 more" in said, "the labels' numbers are one more"
    assert "x30" not in said
    assert "day (1 of 40 are 'k.A.' and count as missing)" in said


def test_one_group_in_several_spellings_lies_in_one_split():
    people = [f"p{row // 4}{' ' * (row % 2)}" for row in range(40)]
    prepared, _ = prepare(csv_of(who=people, row=[f"{row}.5" for row in range(40)]), group="who")
    rows = {name: (np.load(split.features["number"])[:, 0] - 0.5) // 4 for name, split in prepared.splits.items()}
    persons = [set(own.tolist()) for own in rows.values()]
    assert sum(map(len, persons)) == len(set().union(*persons)) == 10


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("Bonn", "bonn"), ("Bad Ems", "Bad\u00a0Ems"), ("Bad Ems", "Bad  Ems"), ("Bonn", "\u200bBonn")),
        *(("❤", "❤\ufe0f"), ("TRUE", "1"), ("no", "N")),
    ],
)
def test_values_that_look_alike_are_pointed_out(one, other):
    dataset, said = guess(csv_of(city=times_of([one, other, "Ulm", "Ulm"])))
    assert dataset.columns["city"].kind == "category"
    shown = " ".join(f"{one!r} and {other!r} of 'city' may mean the same".split())
    assert shown in said


def test_a_category_of_numbers_and_words_is_pointed_out():
    dataset, said = guess(csv_of(size=["large" if row % 4 == 1 else text for row, text in enumerate(PLAIN)]))
    assert dataset.columns["size"].kind == "category"
    assert "category size (75% of its values are numbers, but not 'large')" in said


@pytest.mark.parametrize("form", ["{}-30", "<{}.5", "{}h 5m", "{}°12'N", "12{}/80", "3{}:23:45"])
def test_many_words_that_look_like_numbers_are_pointed_out(form):
    _, said = guess(csv_of(own=times_of([form.format(10 + row) for row in range(30)])))
    first = ", ".join(repr(form.format(10 + row)) for row in range(3))
    assert f"own (words, because {first} are not numbers)" in said
    assert "own (" not in guess(csv_of(own=times_of([form.format(10 + row) for row in range(5)])))[1]


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (["<0.5", "10-20"], "75% of its values are numbers, but not '<0.5', '10-20'"),
        ([f"{row + 5}-{row + 20}" for row in range(40)], "words, because '5-20', '6-21', '7-22' are not numbers"),
        ([f"{row}{'KM'[row % 2]}" for row in range(40)], "words, because the numbers have 'K', 'M' after them"),
    ],
)
def test_a_target_that_may_be_numbers_or_classes_is_asked_about(odd, why):
    texts = [odd[row // 4 % 2] if row % 4 == 1 else text for row, text in enumerate(PLAIN)] if len(odd) == 2 else odd
    with pytest.raises(UserError, match=r"dataset\.target = 'label': .+ values are in only one row") as asked:
        guess(csv_of(label=texts))
    assert why in str(asked.value)
    assert guess(csv_of(label=texts), task="classification")[0].task == "classification"


def test_a_class_called_none_is_said_and_can_be_kept(capsys):
    content = csv_of(label=times_of(["None", "Mild", "Severe", "Mild"]))
    with pytest.raises(UserError, match=r"no value in 10 of 40 rows \('None' is read as missing"):
        prepare(content)
    prepared, said = prepare(content, on_broken="skip")
    assert "10 of 40 rows of 'label' are 'None', read as missing" in said
    assert (
        "left out: 10 of 40 rows without a value of dataset.target = 'label', and with them the class"
        in capsys.readouterr().err
    )
    assert prepared.target.class_names == ("Mild", "Severe")
    prepared, said = prepare(content, not_missing=["None"])
    assert prepared.target.class_names == ("Mild", "None", "Severe")
    assert "missing" not in said


def test_a_category_called_none_can_be_kept_and_is_served():
    content = csv_of(alley=times_of(["None", "Gravel", "", "Paved"]))
    prepared, _ = prepare(content, not_missing=["None"])
    vocabulary = json.loads(Path(prepared.features["category"].vocabulary).read_text())
    assert sorted(vocabulary[0]) == ["Gravel", "None", "Paved"]
    features = {name: one.model_dump() for name, one in prepared.features.items() if name == "category"}
    places = Encoder(features, {"category": vocabulary}).encode({"alley": ["None", "", "NA"]})["category"][:, 0]
    assert places.tolist() == [2 + vocabulary[0].index("None"), 0, 0]


HEADERS = [
    ("\n\n", "line 3 names the columns; above it: blank lines"),
    ("# made by a machine\n", "line 2 names the columns; above it: '# made by a machine'"),
    ("Report of 2025,,\n,,\n", "line 3 names the columns; above it: 'Report of 2025,,', ',,'"),
    ("Report of 2025\n", "line 2 names the columns; above it: 'Report of 2025'"),
    ("// made by a machine\n\n", "line 3 names the columns; above it: '// made by a machine'"),
    ("# a, b, c\n# and, of, it\n", "line 3 names the columns; above it: '# a, b, c', '# and, of, it'"),
    ("Size,,Result\n", "line 2 names the columns; above it: 'Size,,Result'"),
    ("device,17,\nowner,Ann,\n", "line 3 names the columns; above it: 'device,17,', 'owner,Ann,'"),
]


@pytest.mark.parametrize("title", ["", 'All of 5" and more\n'])
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_no_row_is_lost_below_a_header_of_several_lines(title, delimiter):
    content = csv_of(label=LABELS).replace("label,plain", '"label",' + quoted("plain\n(cm)")).replace(",", delimiter)
    prepared, _ = prepare(title + content)
    np.testing.assert_allclose(numbers_of(prepared, "plain (cm)"), sorted(map(float, PLAIN)))
    assert read_again("plain (cm)", "number")[0] == PLAIN


@pytest.mark.parametrize(("above", "said"), HEADERS)
def test_what_stands_above_the_header_is_skipped_and_said(above, said):
    content = csv_of(other=times_of(["1.5", "2.25", "7.5"]))
    dataset, lines = guess(above + content)
    assert said in lines
    assert list(dataset.columns) == ["other", "plain"]
    plain, _ = prepare(content)
    before = numbers_of(plain, "plain")
    np.testing.assert_array_equal(numbers_of(prepare(above + content)[0], "plain"), before)


def test_the_delimiter_that_excel_names_is_taken():
    content = "sep=;\n" + csv_of().replace(",", ";").replace(".", ",")
    dataset, said = guess(content)
    assert (dataset.delimiter, dataset.decimal, dataset.header) == (";", ",", 2)
    assert "line 2 names the columns; above it: 'sep=;'" in said


def test_a_first_line_of_values_is_pointed_out_and_need_not_be_the_header():
    content = csv_of(other=times_of(["1.5", "2.25", "7.5"])).split("\n", 1)[1]
    _, said = guess(content, target="tall")
    assert "the first line is read as the header: 1.5, -3.00, tall. If the file has none, --set dataset.header" in said
    prepared, said = prepare(content, target="column_3", header=None)
    assert num_examples(prepared) == 40
    assert "header" not in said
    for values in (["7", "9", "12"], ["-3.00", "-3.00", "7.5"]):
        headless = csv_of(other=times_of(values)).split("\n", 1)[1]
        with pytest.raises(UserError, match=r"dataset\.header=null"):
            guess(headless)


def test_columns_without_a_name_are_those_of_their_place():
    content = csv_of().split("\n")
    dataset, said = guess("\n".join(line and f"{line},," for line in content))
    assert {name: one.kind for name, one in dataset.columns.items()} == {
        "plain": "number",
        "column 3": "ignore",
        "column 4": "ignore",
    }
    assert "column 3, column 4 (no values)" in said
    content = ["plain,,label", *(f"{row + 0.5},{row % 3},{'yn'[row % 2]}" for row in range(40))]
    assert guess("\n".join(content), target="column 2")[0].header == 1


@pytest.mark.parametrize("names", [("2023", "2024"), ("0", "1"), ("x1", "x2"), ("2019", "2010"), ("10", "20", "30")])
@pytest.mark.parametrize("above", ["", "A title,,\n\n", "Source,Office,Today\n\n"])
def test_numbers_may_be_names_of_columns(names, above):
    dataset, said = guess(above + csv_of(**{name: times_of(["1.5", "2.25", "7.5"]) for name in names}))
    assert "header" not in said
    assert list(dataset.columns) == [*names, "plain"]


@pytest.mark.parametrize("first", [("58", "33809"), ("58", "Private"), ("a text", "Private")])
def test_an_unknown_target_may_mean_that_there_is_no_header(first):
    content = csv_of(one=times_of([first[0], "17"]), two=times_of([first[1], "5"])).split("\n", 1)[1]
    with pytest.raises(UserError, match=r"unknown column 'label'.+own\.csv") as refused:
        guess(content)
    assert str(refused.value).count("--set dataset.header=null") == 1


def test_the_names_of_rows_that_r_writes_are_a_column():
    header, *rows = csv_of(other=times_of(["1.5", "2.25", "7.5"])).splitlines()
    content = "\n".join([header, *(f"Ann {row},{line}" for row, line in enumerate(rows))])
    prepared, said = prepare(content)
    assert "ignore column 1 (a different value in each row)" in said
    assert "the header has one name fewer than a row has values: the first column is 'column 1'" in said
    np.testing.assert_allclose(numbers_of(prepared, "plain"), sorted(map(float, PLAIN)), rtol=1e-6)
    for some in (content, "\n".join(content.splitlines()[:2])):
        Path("some.csv").write_text(some)
        assert read_again("plain", "number", "some.csv")[0] == PLAIN[: len(some.splitlines()) - 1]


def test_a_line_break_in_the_last_row_that_is_looked_at_hides_no_names_of_rows():
    rows = [f'{row},"line {row % 7}\nanother line",{row % 2}' for row in range(60)]
    for first in ([], ["a,short,1"]):
        names = guess("\n".join(["text,label", *first, *rows]))[0].columns
        assert list(names) == ["column 1", "text"]


def test_a_header_that_lacks_a_name_is_not_taken_for_one_of_r(tmp_path):
    rows = [f"{20 + row % 30},{2000 + row},{'yn'[row % 2]},ab" for row in range(45)]
    with pytest.raises(UserError, match="line 2 has 4"):
        prepare("\n".join(["age,income,label", *rows]))


def test_rows_without_a_value_are_examples_without_a_label_where_there_may_be_several(capsys):
    rows = [f"{row},{'' if row % 5 == 4 else PLAIN[row]},{'' if row % 5 == 4 else 'x;y'}" for row in range(40)]
    columns = {"id": "ignore", "plain": "number"}
    prepared, _ = prepare("\n".join(["id,plain,label", *rows]), columns=columns, separator=";")
    assert num_examples(prepared) == 40
    assert "left out" not in capsys.readouterr().err


def test_rows_without_any_value_are_left_out_and_counted(capsys):
    rows = csv_of(number=[str(row) for row in range(40)]).splitlines()
    content = "\n".join([*rows[:9], ",,", *rows[9:], " , ,", ",,"])
    prepared, said = prepare(content)
    assert "number (a row number)" in said
    assert num_examples(prepared) == 40
    assert not any(split.num_missing for split in prepared.splits.values())
    assert "left out: 3 of 43 rows without a value in the columns that are used" in capsys.readouterr().err


def test_names_of_columns_have_one_unicode_form():
    content = csv_of(**{"Gro\u0308\u00dfe": PLAIN})
    prepared, _ = prepare(content, columns={"Größe": "number", "plain": "ignore"})
    np.testing.assert_allclose(numbers_of(prepared, "Größe"), sorted(map(float, PLAIN)), rtol=1e-6)
    assert read_again("Größe", "number")[0] == PLAIN


@pytest.mark.parametrize("sign", "|,;>-")
def test_a_sign_is_set_as_it_is_typed(sign):
    assert config.read_texts([f"dataset.separator={sign}"]) == {"dataset.separator": sign}


def reviews(first):
    lines = [f"good\tit was a nice film number {row} to see" for row in range(40)]
    lines[5] = lines[25] = f"bad\t{first}so they say it is a film to sleep"
    return "label\ttext\n" + "\n".join(lines) + "\n"


def test_a_quote_that_is_not_closed_swallows_no_rows():
    with pytest.raises(UserError) as refused:
        guess(reviews('"'), name="own.tsv")
    assert "line 7 opens a quote" in str(refused.value)
    assert "--set dataset.quoting=none" in str(refused.value)
    prepared, _ = prepare(reviews('"'), name="own.tsv", quoting="none")
    assert num_examples(prepared) == 40
    assert read_again("text", "text", "own.tsv")[0] == [line.split("\t")[1] for line in reviews('"').splitlines()[1:]]


def test_a_quote_that_swallows_whole_rows_is_asked_about():
    lines = reviews("").splitlines()
    lines[8], lines[13] = 'good\t"a film to see', 'good\ta film to remember"'
    with pytest.raises(UserError) as asked:
        guess("\n".join(lines), name="own.tsv")
    assert "line 9 opens a quote that line 14 closes" in str(asked.value)
    for quoting, rows in (("none", 40), ("minimal", 35)):
        assert f"--set dataset.quoting={quoting}" in str(asked.value)
        prepared, _ = prepare("\n".join(lines), name="own.tsv", quoting=quoting)
        assert num_examples(prepared) == rows


def test_texts_of_several_lines_in_quotes_stay_whole():
    notes = [f'He said "well, number {row}"\nand went, as people do' for row in range(40)]
    prepared, _ = prepare(csv_of(note=notes))
    assert num_examples(prepared) == 40
    assert prepared.features["note"].kind == "text"


@pytest.mark.parametrize(
    "brackets", ["['{0}', '{1}']", "['{0}' '{1}']", "['{0}', None, '{1}']", '["{0}", "{1}"]', "[{0}, {1}]"]
)
def test_lists_as_texts_are_labels(brackets):
    pairs = [("sun", "rain"), ("rain", "wind"), ("wind", "sun")]
    prepared, said = prepare(csv_of(label=times_of([brackets.format(*pair) for pair in pairs])))
    assert (prepared.target.task, prepared.target.class_names) == ("multilabel", ("rain", "sun", "wind"))
    assert "'label' contains lists of labels" in said


@pytest.mark.parametrize(
    ("text", "words"), [("这部电影真的很好看", 9), ("この映画は面白い", 8), ("หนังเรื่องนี้ดี", 15), ("我喜欢 tea!", 5)]
)
def test_texts_without_spaces_are_learnt_by_characters(text, words):
    found, lengths = cells.words_of([text])
    assert lengths.tolist() == [words]
    assert "".join(found).replace(" ", "") == text.replace(" ", "")
    texts = [text + chr(0x4E00 + row) for row in range(40)]
    dataset, said = guess(csv_of(note=texts))
    assert dataset.columns["note"].kind == "text"
    assert "each character is a word" in said


def test_half_a_character_in_json_is_named_with_its_line():
    lines = [json.dumps({"x": row / 3, "label": LABELS[row]}) for row in range(40)]
    lines[6] = '{"x": 1.5, "label": "a\\ud800"}'
    with pytest.raises(UserError, match=r"own.jsonl': line 7 is not valid text: it has half of a character"):
        guess("\n".join(lines), name="own.jsonl")


def test_utf_16_is_found_by_its_mark():
    dataset, _ = guess(csv_of(city=times_of(["Köln", "Ulm"])).encode("utf-16"))
    assert (dataset.encoding, dataset.columns["city"].kind) == ("utf-16", "category")
    lines = "\n".join(json.dumps({"city": city, "label": city}) for city in times_of(["Köln", "Ulm"]))
    dataset, _ = guess(lines.encode("utf-16"), name="own.jsonl")
    assert dataset.encoding == "utf-16"


@pytest.mark.parametrize("name", ["own.csv", "own.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("city", ["Köln", "Åre", "Ulm"])
def test_utf_16_without_a_mark_is_named_and_read_again(city, encoding, name):
    content = csv_of(city=times_of([city, "Bonn"])).replace("plain", "größe" if city == "Åre" else "plain")
    if name == "own.jsonl":
        rows = [json.dumps({"city": city, "x": n / 3, "label": LABELS[n]}, ensure_ascii=False) for n in range(40)]
        content = "\n".join(rows)
    for given in ({}, {"encoding": "utf-16"}):
        with pytest.raises(UserError, match="seems to be UTF-16 without a byte order mark") as asked:
            guess(content.encode(encoding), name=name, **given)
        assert f"--set dataset.encoding={encoding}" in str(asked.value)
    compare_readings(prepare(content.encode(encoding), name=name, encoding=encoding)[0], name)


@pytest.mark.parametrize("quote", ["", '"'])
@pytest.mark.parametrize("mark", ["", "\ufeff"])  # "CSV UTF-8" files that were joined.
@pytest.mark.parametrize("columns", [{}, {"plain": times_of(["u", "v", "w"]), "other": times_of(["p", "q"])}])
def test_a_header_that_is_repeated_is_no_row(columns, mark, quote, capsys):
    header, *rows = csv_of(**columns).splitlines()
    header = quote + header.replace(",", f"{quote},{quote}") + quote
    content = "\n".join([header, *rows[:15], mark + header, *rows[15:25], mark + header, *rows[25:]])
    prepared, _ = prepare(content)
    assert prepared.target.class_names == ("short", "tall")
    assert num_examples(prepared) == 40
    assert "left out: 2 of 42 rows" in capsys.readouterr().err
    assert guess("\n".join([header, *rows]))[0].columns == guess(content)[0].columns
    assert guess(f"Report of 2025\n\n{content}")[0].header == 3
    assert read_again("plain", "text")[1] == {15: "repeats the header", 26: "repeats the header"}


@pytest.mark.parametrize(
    ("second", "shown", "header_rows"),
    [
        ("-,m,Response\n", "-, m, Response", 2),
        ('"","How far?\n(m)",Which?\n{},"{""ImportId"":""QID1""}",x\nBonn,,tall\n', "How far? (m), Which?", 3),
    ],
)
def test_a_second_row_of_a_header_is_asked_about(second, shown, header_rows):
    header, rows = csv_of(city=times_of(["Bonn", "Ulm"])).split("\n", 1)
    content = f"{header}\n{second}{rows}"
    with pytest.raises(UserError) as asked:
        guess(content)
    assert f"the first row below the header, '{shown}', has no number" in str(asked.value)
    assert f"--set dataset.header_rows={header_rows}. If not" in str(asked.value)
    assert "to read 'plain' as words: --set dataset.columns.plain=category" in str(asked.value)
    assert guess(content, columns={"plain": "category"})[0].columns["city"].kind == "category"
    prepared, _ = prepare(content, header_rows=header_rows)
    assert num_examples(prepared) == content.count("tall") + 20
    assert guess(f"{header}\nBonn,n.a.,tall\n{rows}")[0].columns["plain"].kind == "number", "a missing value is no unit"


@pytest.mark.parametrize(
    "content",
    [
        '[{"plain": 1, "label": "tall"},\n {"plain": 2, "label": "short"}]\n',
        '{"plain": 1, "label": "tall"}\n',
        "<!DOCTYPE html>\n<html>\n",
        b"PK\x03\x04\x14\x00\x06\x00",
        gzip.compress(csv_of().encode()),
    ],
)
def test_another_format_called_csv_is_refused(content):
    with pytest.raises(UserError, match="it is not CSV but an Excel workbook, an archive, HTML, XML or JSON"):
        guess(content)


def test_a_row_with_the_name_of_one_column_stays():
    prepared, _ = prepare(csv_of(up=times_of(["up", "down"]), label=times_of(["label", "no", "yes"])))
    assert num_examples(prepared) == 40
    assert prepared.target.class_names == ("label", "no", "yes")
    Path("own.csv").write_text("up\ndown\nup\n")
    assert read_again("up", "category") == (["down", "up"], {})


def test_a_row_that_repeats_the_header_only_in_the_columns_that_are_used_stays(capsys):
    content = csv_of(number=times_of(["7", "8"]), up=times_of(["up", "down"]), label=times_of(["label", "no"]))
    columns = {"up": "category", "number": "ignore", "plain": "ignore"}
    prepared, _ = prepare(f"{content}number,up,label,plain\n", columns=columns)
    assert prepared.target.class_names == ("label", "no")
    assert num_examples(prepared) == 40
    assert "left out: 1 of 41 rows" in capsys.readouterr().err


def test_rows_may_end_with_a_delimiter_that_the_header_lacks():
    header, *rows = csv_of().splitlines()
    content = "\n".join([header, *(f"{row},," for row in rows)])
    prepared, said = prepare(content)
    assert "ignore column 3, column 4 (no values)" in said
    np.testing.assert_allclose(numbers_of(prepared, "plain"), sorted(map(float, PLAIN)), rtol=1e-6)
    assert read_again("plain", "number")[0] == PLAIN
    with pytest.raises(UserError, match="line 2 has 3"):
        prepare("\n".join([header, *(f"{row},{number % 2 or ''}" for number, row in enumerate([rows[0]] * 40))]))


def test_spaces_may_stand_before_quotes():
    rows = [f'{PLAIN[row]}, "a, b{row % 3}", "{LABELS[row]}"' for row in range(40)]
    content = "\n".join(['"plain", "note", "label"', *rows])
    prepared, _ = prepare(content)
    assert prepared.target.class_names == ("short", "tall")
    assert read_again("note", "category")[0] == [f"a, b{row % 3}" for row in range(40)]
    content = "\n".join(["plain,note", *(f'{PLAIN[row]}, "well" he said' for row in range(40))])
    Path("own.csv").write_text(content)
    assert read_again("note", "text")[0] == [' "well" he said'] * 40, "of a header without quotes, they are characters"


def test_columns_without_a_name_are_found_below_a_title():
    content = "Report,,\n\n" + csv_of(other=PLAIN).replace("other,", ",", 1)
    dataset, _ = guess(content)
    assert (list(dataset.columns), dataset.header) == (["column 1", "plain"], 3)
    assert read_again("column 1", "number")[0] == PLAIN


def test_a_single_column_suggests_another_delimiter():
    with pytest.raises(UserError, match=r"If its values are not separated by ',': --set dataset\.delimiter=CHARACTER"):
        guess(csv_of().replace(",", "^"))
    assert guess(csv_of().replace(",", "^"), delimiter="^")[0].columns["plain"].kind == "number"


def test_labels_may_be_true_and_false():
    content = csv_of(a=times_of(["True", "False"]), b=times_of(["FALSE", "TRUE", "TRUE"]))
    prepared, _ = prepare(content, target=["a", "b"], columns={"plain": "number", "label": "ignore"})
    assert (prepared.target.task, prepared.target.class_names) == ("multilabel", ("a", "b"))
    labels = np.concatenate([np.load(split.labels) for split in prepared.splits.values()])
    assert labels.sum(0).tolist() == [20, 26]
    content = csv_of(a=times_of(["True", "False"]), b=times_of(["0.5", "2.5"]))
    prepared, _ = prepare(content, target=["a", "b"], columns={"plain": "number", "label": "ignore"})
    assert prepared.target.task == "regression"
    labels = np.concatenate([np.load(split.labels) for split in prepared.splits.values()])
    assert labels.sum(0).tolist() == [20, 60]


def test_a_class_with_too_few_rows_is_named_with_its_column():
    with pytest.raises(UserError, match=r"dataset.target = 'plain': the class '.+ 40 of 40 classes have too few"):
        prepare(csv_of(), target="plain", task="classification")


def test_a_row_of_another_length_is_named_with_its_line():
    with pytest.raises(UserError, match=r"1 of its rows does not have the 2 values of its header: line 42 has 1"):
        guess(csv_of() + "Source: the office\n")


def test_a_carriage_return_within_a_line_is_named():
    """pandas ends the row there and fills it with missing values, as it does with the next one."""
    content = csv_of(city=times_of(["Bonn", "Ulm"]))
    with pytest.raises(UserError, match=r"line 3 has 1: 'U', which a carriage return alone \(\\r\) ends"):
        prepare(content.replace("Ulm", "U\rlm", 1), on_broken="skip")


def test_a_late_value_below_no_name_does_not_shift_the_names():
    """R writes row names without a name; where the last column is empty for long, its rows look like `a,1,`."""
    rows = [f"r{row},{row % 7}.5,{LABELS[row % 40]},{'late' if row == 60 else ''}" for row in range(80)]
    with pytest.raises(UserError, match=r"1 of its rows does not have the 3 values of its header: line 62 has 4: 'r60"):
        prepare("\n".join(["x,label,note", *rows]) + "\n", target="label")


def test_spaces_around_names_of_columns_do_not_count():
    dataset, _ = guess(csv_of(city=times_of(["Köln", "Ulm"])).replace(",label", ", label ", 1))
    assert dataset.target == ("label",)


AS_TRAINED = [
    ({"price": times_of(["$1,200.50", "(35)", "7-", "-"])}, {}),
    ({"share": times_of(["45%", "3.5 %", "?", "#DIV/0!"])}, {}),
    ({"size": times_of(["12 345", "6 789", "n.a.", "1 234 567"])}, {}),
    ({"day": times_of(["31/12/2025", "01/02/2024", "15/07/2025", ""])}, {}),
    ({"when": times_of(["2025-12-31 08:15", "2024-02-29", "2025-01-01T23:59:59", "NA"])}, {}),
    (
        {"code": times_of(["007", "07", "12345678901234567890123", "7"])},
        {"columns": {"code": "category", "plain": "number"}},
    ),
    (
        {"city": times_of(["café", "cafe\u0301 ", " Bonn", "None"])},
        {"columns": {"city": "category", "plain": "number"}},
    ),
    (
        {"text": times_of(['said "no"', "two\nlines", "a, b", "plain words"])},
        {"columns": {"text": "text", "plain": "number"}},
    ),
    ({"flag": times_of(["True", "False", "true", "FALSE"])}, {}),
]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("above", ["", "Report 2025,,\n,,\n"])
@pytest.mark.parametrize(("columns", "values"), AS_TRAINED, ids=lambda one: next(iter(one), ""))
def test_a_prediction_reads_each_row_as_the_training_did(columns, values, above, encoding):
    prepared, _ = prepare((above + csv_of(**columns)).encode(encoding), **values)
    compare_readings(prepared)


def compare_readings(prepared, name="own.csv"):
    known = prepared_data.encoder_config(prepared)
    encoder = Encoder(known["features"], known["vocabularies"])
    parts = []
    for read in Reader(Wanted.of(known, prepared.features), Path.cwd(), 7).read([name]):
        encoded, broken = encode_part(read, encoder, {}, "the model")
        assert not broken
        parts.append(encoded)
    for name in prepared.features:
        trained = np.concatenate([np.load(split.features[name]) for split in prepared.splits.values()])
        predicted = np.concatenate([part[name] for part in parts])
        assert sorted(map(bytes, predicted)) == sorted(map(bytes, trained.astype(predicted.dtype)))


SAID = [
    (["1 200", "35", "7 100 000"], "amount (numbers with ' ' between thousands in 27 of 40 rows)"),
    (["1,200", "3,500.25"], "amount (numbers with ',' between thousands)"),
    (["1'200.50", "35.--"], 'amount (numbers with "\'" between thousands in 20 of 40 rows)'),
    (
        ["(35)", "7-", "8", "9.-"],
        "amount (numbers with parentheses or a trailing minus, read as negative in 20 of 40 rows)",
    ),
    (["1.200", "3.525"], "number amount, plain"),
    (
        ["-999", "17", "35", "-999.0"],
        "amount (-999 in 20 of 40 rows is far from all others; if it means that there is no value: --set",
    ),
    (
        ["9", "5.5", "9999", "99"],
        "amount (9999 in 10 of 40 rows is far from all others; if it means that there is no value: --set",
    ),
    (["99", "98", "17", "35"], "number amount, plain"),
    (
        ["12345678", "1.200"],
        "amount (numbers with '.' between thousands in 20 of 40 rows); plain note numbers are written as 3,14",
    ),
]


@pytest.mark.parametrize(("values", "said"), SAID)
def test_it_is_said_how_numbers_are_written(values, said):
    plain = [value.replace(".", ",") for value in PLAIN] if "3,14" in said else PLAIN
    assert said in guess(csv_of(amount=times_of(values), plain=plain))[1]


def in_excel():
    """A table as Excel writes it where numbers have decimal commas."""
    rows = zip(times_of(["1.200,50", "3,5", "", "7,25"]), PLAIN, LABELS, strict=True)
    lines = [f"{price};{plain.replace('.', ',')};{label}" for price, plain, label in rows]
    return "\r\n".join(["sep=;", "price;plain;label", *lines, ""])


def of_r():
    lines = csv_of(city=times_of(["Bonn", "Ulm"])).splitlines()
    return "\n".join(['"city","plain","label"', *(f'"{row}",{line}' for row, line in enumerate(lines[1:], 1))])


def with_gaps():
    lines = csv_of(city=times_of(["Bonn", " ", "Ulm"])).splitlines()
    return "\n\n".join(lines[:9]) + "\n\n" + "\n".join(lines[9:]) + "\n\n"


WHOLE = {
    "Excel": (in_excel(), {}),
    "R": (of_r(), {}),
    "gaps": (with_gaps(), {}),
    "quoting none": (reviews('"'), {"quoting": "none", "delimiter": "\t"}),
    "quotes as characters": (
        csv_of(size=times_of(["L", "S", "M"])).replace("L,", '"L",').replace("S,", '"S,').replace("M,", 'M",'),
        {"quoting": "none"},
    ),
    "another delimiter": (csv_of(city=times_of(["Bonn", "Ulm"])).replace(",", "^"), {"delimiter": "^"}),
    "encoding": (
        csv_of(größe=times_of(["1.5", "2"]), city=times_of(["Köln", "Łódź"])).encode("cp1250"),
        {"encoding": "cp1250"},
    ),
    "units": (csv_of(city=times_of(["Bonn", "Ulm"])).replace("\n", "\n-,mm,-\n", 1), {"header_rows": 2}),
    "CR": (csv_of(city=times_of(["Bonn", "Ulm"])).replace("\n", "\r"), {}),
    "one column": ("text,label\n" + "\n".join(f'"line {row % 9}, and ""more""",{row % 2}' for row in range(40)), {}),
}


@pytest.mark.parametrize("chunk_rows", [7, 100])
@pytest.mark.parametrize("values", [[True, 1], [1, True], [False, 0, "x"], [True, "true", 1.0, 0], [None, 5, "x"]])
def test_a_truth_and_a_number_of_json_are_two_values(values, chunk_rows, monkeypatch):
    """For Python, `True == 1`. Chunks may have values of different types."""
    monkeypatch.setattr(tables, "CHUNK_ROWS", chunk_rows)
    given = [values[row * len(values) // 40] for row in range(40)]
    rows = [{"flag": flag, "x": row / 3, "label": LABELS[row]} for row, flag in enumerate(given)]
    prepared, said = prepare("\n".join(map(json.dumps, rows)), name="own.jsonl")
    expected = sorted({cells.spelled(value) for value in values} - {"None"})
    assert sorted(json.loads(Path(prepared.features["category"].vocabulary).read_text())[0]) == expected
    assert ("of 'flag' may mean the same, and are two values" in said) == (None not in values)
    compare_readings(prepared, "own.jsonl")
    prepared, said = prepare("\n".join(map(json.dumps, rows)), name="own.jsonl", target="flag", on_broken="skip")
    assert sorted(prepared.target.class_names) == expected
    assert ("of 'flag' may mean the same, and are two values" in said) == (None not in values)


@pytest.mark.parametrize("moments", [[time(18, 30), time(7, 5, 30), None], [date(2024, 2, 29), date(2025, 12, 31)]])
def test_a_time_of_parquet_is_read_as_in_csv(moments):
    frame = pd.DataFrame({"at": times_of(moments), "plain": map(float, PLAIN), "label": LABELS})
    expected, _ = prepare(frame.to_csv(index=False))
    frame.to_parquet("own.parquet")
    prepared, _ = prepare(Path("own.parquet").read_bytes(), name="own.parquet")
    assert prepared.features == expected.features
    assert "datetime" in [one.kind for one in prepared.features["number"].columns]
    compare_readings(prepared, "own.parquet")


@pytest.mark.parametrize("name", WHOLE)
def test_a_prediction_reads_a_file_as_the_training_did(name):
    content, values = WHOLE[name]
    prepared, _ = prepare(content, **values)
    compare_readings(prepared)


@pytest.mark.parametrize("target", ["label", "own"])
def test_a_comma_that_only_later_rows_have_is_asked_about(target):
    texts = [str(row * row % 977) for row in range(10_000)] + ["1,234", "2,500"]
    content = csv_of(own=texts, plain=times_of(["1", "2", "4"], 10_002), label=times_of(["tall", "short"], 10_002))
    with pytest.raises(UserError, match=r"'own' has '1,234' in row 10001 below the header. Its comma may be"):
        prepare(content, target=target)
    prepared, _ = prepare(content, decimal=".")
    assert numbers_of(prepared, "own").max() == 2500


def test_what_the_first_rows_lack_is_said_of_these_rows_alone():
    Path("own.jsonl").write_text(
        "".join(f'{{"x": {row % 7}, "label": "{"ab"[row % 2]}"}}\n' for row in range(10_000))
        + '{"x": 1, "label": "a", "extra": 5, "same": 1}\n'
    )
    dataset, lines = table.guess(
        config.describe({"kind": "table", "name": "own", "source": "own.jsonl", "target": "label"}, "test")
    )
    assert dataset.columns["extra"].kind == "ignore"
    assert "no values in the first 10,000 rows" in " ".join(lines)


def test_two_digit_years_are_said_to_be_of_a_century():
    _, said = guess(csv_of(born=times_of(["17/05/45", "30/11/68", "04/01/52"])))
    assert "written as %d/%m/%y; two-digit years are 1969 to 2068" in said


def test_codes_with_leading_zeros_that_all_differ_are_identifiers():
    dataset, said = guess(csv_of(customer=[f"{row:05}" for row in range(40)], zip=times_of(["01067", "01069"])))
    assert (dataset.columns["customer"].kind, dataset.columns["zip"].kind) == ("ignore", "category")
    assert "customer (a different value in each row)" in said


@pytest.mark.parametrize(
    "texts",
    [
        ["12. März 2023", "3. Mai 2022", "30. Juli 2021"],
        ["3 janv. 2023", "12 févr. 2021", "7 avr. 2022"],
        ["03-ene-23", "05-dic-22", "17-ago-21"],
        ["March 3rd, 2021", "June 22nd, 2020", "May 1st, 2021"],
        ["[03/Mar/2024:04:30:00 +0200]", "[04/Mar/2024:05:31:10 +0200]", "[05/Mar/2024:06:30:20 +0200]"],
    ],
)
def test_dates_in_other_words_are_words_and_that_is_said(texts):
    dataset, said = guess(csv_of(own=times_of(texts)))
    assert dataset.columns["own"].kind == "category"
    assert "own (words, because no form of a date fits all values)" in said


def test_a_comma_in_words_asks_nothing_about_numbers():
    own = [*map(str, range(39)), "ask, please"]
    assert guess(csv_of(own=own, plain=times_of(["1", "2"])))[0].decimal is None
    with pytest.raises(UserError, match=r"--set dataset.header_rows=2"):
        guess(csv_of(own=["How old, are you?", *own[:-1]], plain=["How many?", *PLAIN[1:]]))


@pytest.mark.parametrize("texts", [["EUR 12", "12 €"], ["USD 5", "US$ 7", "$ 9"], ["GBP 3", "£ 4"]])
def test_a_currency_in_two_spellings_is_one(texts):
    assert guess(csv_of(own=times_of(texts)))[0].columns["own"].kind == "number"


def test_a_space_before_a_quote_in_any_row_is_skipped():
    lines = [f'{row}, "a, b {row % 3}", {"xy"[row % 2]}' for row in range(40)]
    content = "\n".join(["n,text,label", *lines])
    prepared, _ = prepare(content)
    assert sum(split.num_examples for split in prepared.splits.values()) == 40
    assert read_again("text", "text")[0][:2] == ["a, b 0", "a, b 1"]


def test_the_question_about_a_quote_shows_its_text():
    content = "n,text,label\n" + "".join(f'{row},"good, {row}\n{row},bad",a\n' for row in range(20))
    with pytest.raises(UserError, match=r"line 2 opens a quote that line 3 closes, '0,\"good, 0"):
        guess(content)


def test_the_users_own_words_for_a_missing_value_are_missing_in_training_and_prediction():
    with pytest.raises(UserError, match=r"no value: --set 'dataset.na_values=\[.keine Angabe.\]'"):
        prepare(csv_of(own=[*times_of(["1.5", "2.5"], 39), "keine Angabe"]))
    own = times_of(["1.5", "keine Angabe", "-999", "2.5"])
    content = csv_of(own=own, word=times_of(["red", "keine Angabe", "blue", "-999"]))
    prepared, _ = prepare(content, na_values=[-999, "keine Angabe", "..."])
    assert set(numbers_of(prepared, "own")) == {1.5, 2.0, 2.5}
    vocabulary = json.loads(Path(prepared.features["category"].vocabulary).read_text())
    assert sorted(vocabulary[0]) == ["blue", "red"]
    features = {name: one.model_dump(mode="json") for name, one in prepared.features.items()}
    encoder = Encoder(features, {"category": vocabulary})
    rows = {"own": ["-999", -999.0, "keine Angabe"], "plain": [1, 2, 3], "word": ["keine Angabe", "-999", "red"]}
    found = encoder.encode(rows)
    assert found["number"][:, 0].tolist() == [2.0, 2.0, 2.0]
    assert found["category"][:, 0].tolist() == [0, 0, 2 + vocabulary[0].index("red")]
    assert encoder.encode(rows | {"own": np.array([-999, -999, 7])})["number"][:, 0].tolist() == [2, 2, 7]


@pytest.mark.parametrize("first", ["Apple,Pear,,", "Apple,Pear,,Response"])
def test_a_row_with_the_choices_of_a_survey_is_asked_about(first):
    rows = [f"{'Apple' * (row % 2)},{'Pear' * (row % 3 > 0)},{row},{LABELS[row]}" for row in range(40)]
    content = "\n".join(["Which fruits?,,Age,label", first, *rows]) + "\n"
    with pytest.raises(UserError, match=r"--set dataset.header_rows=2"):
        guess(content)
    prepared, _ = prepare(content, header_rows=2)
    assert sum(split.num_examples for split in prepared.splits.values()) == 40


def test_a_remark_in_the_first_row_of_a_column_without_a_name_asks_nothing():
    content = csv_of(own=times_of(["1", "2", "4"])).replace("\n", ",\n").replace(",tall,\n", ",tall,see below\n", 1)
    assert guess(content)[0].columns["column 4"].kind == "category"
    assert guess(content, target="plain")[0].task == "regression"
    with pytest.raises(UserError, match=r"no row is left|has no rows|no column is left"):
        prepare("a,,label\n,,\n,,\n")


def test_a_table_of_the_target_alone_and_a_json_array_are_named():
    with pytest.raises(UserError, match=r"besides the target, it has no column to learn from$"):
        guess("label\n" + "\n".join(LABELS))
    rows = [{"x": row, "label": label} for row, label in enumerate(LABELS)]
    for array in (json.dumps(rows), json.dumps(rows, indent=2)):
        with pytest.raises(
            UserError, match=r"line 1 is not .* It seems to be a JSON array: write one object per line$"
        ):
            guess(array, name="own.jsonl")


def test_the_kinds_of_columns_that_are_all_ignored_are_told_without_the_breaks_of_lines():
    places = [f"(49.{row:05}, 13.{row:05})" for row in range(100, 140)]
    with pytest.raises(
        UserError, match=r"ignore place \(a different value in each row; words, because '\(49.00100, 13"
    ):
        guess("place,label\n" + "\n".join(f'"{place}",{label}' for place, label in zip(places, LABELS, strict=True)))
