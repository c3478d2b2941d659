"""Decides what the columns of a table are: the description says it, or else the first rows."""

import contextlib
import math
import os
import re
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from tasks import config
from tasks.data.encoding import cells
from tasks.data.encoding.cells import BadValue
from tasks.data.table_files import TableFile
from tasks.system.errors import UserError, listed, one_of, shown

LOOKED_AT = 20_000
"""Rows from the first on that say what a column is."""
MISTAKES, SAMPLE = 0.1, 1000
"""If at most this share of a sample is not a number, the column is one of numbers, and `prepare` names the mistakes."""
MAX_CLASSES = 20
"""A target of whole numbers with more values is a regression."""
WORDS_OF_A_TEXT = 3
UNSPACED_CHARACTER = re.compile(f"[{cells.UNSPACED}]")
FEWEST = 10
"""Rows from which on values that are all different say something."""
PICTURES = re.compile(r".+\.(png|jpe?g|bmp|gif|webp)", re.IGNORECASE)
ID_NAMES = re.compile(
    r"(.*[_\W])?(id|index|key|no|nr|uuid|guid|row|column 1)|.*[a-z]I[dD]|unnamed: \d+|__index_level_\d+__",
    re.IGNORECASE,
)
"""What a column is called that numbers the rows or says who a row is of."""
BY_CHANCE = 0.01
"""Whole numbers that are all different, where measured ones would be so in one of a hundred tables, are no measured
ones: n of a range of R are by a chance of exp(-n^2 / 2R)."""
TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p", "T%H:%M:%S")
DATES = (
    "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y/%m/%d", "%Y.%m.%d", "%d/%m/%y", "%m/%d/%y",
    "%d.%m.%y", "%d-%m-%y", "%m-%d-%y", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y", "%b %d %Y", "%B %d %Y",
    "%d-%b-%Y", "%d-%b-%y", "%d %b %y",
)  # fmt: skip
FORMATS = tuple(f"{day}{time}" for day in DATES for time in TIMES)
"""How people write dates, beside ISO 8601."""
MAX_FOLDERS = 20
"""Where the paths of images lead to more places beside the table, its whole folder is looked at."""
ROLES = ("split_column", "group", "time", "weight")


def fill_in(dataset: config.Table, file: TableFile, may_guess: bool) -> tuple[config.Table, list[str]]:
    """Return a dataset with the kinds of its columns and its task, and lines that say what was guessed.

    What the description has is kept, the rest is guessed from the first rows.

    Args:
        may_guess: columns that are not in ``columns`` are guessed even where others are.

    Raises:
        UserError: no target, a column that is not there, or one that ``columns`` does not have.
    """
    dataset = _with_target(dataset, file)
    used = {name for names in _check_roles(dataset, file).values() for name in names if name is not None}
    given = dataset.columns or {}
    others = [name for name in file.names if name not in given and name not in used]
    if others and dataset.columns is not None and not may_guess:
        raise UserError(
            f"dataset.source = '{file.source}': the column '{others[0]}' is not in dataset.columns, as "
            f"{len(others)} of {len(file.names)} are not. Say in data/{dataset.name}/params.yaml what it is: number, "
            "datetime, category, text or ignore"
        )
    wanted = [*others, *dataset.target, *([dataset.time] if dataset.time else [])] if may_guess else others
    looked = _look(file, dict.fromkeys(wanted if may_guess or dataset.task != "auto" else [*others, *dataset.target]))
    notes: list[str] = []
    if may_guess and dataset.decimal is None:
        decimal, notes = _decimal(dataset, looked)
        dataset = dataset.model_copy(update={"decimal": decimal if decimal == "," or notes else None})
    guessed = {name: _kind(name, looked[name], dataset) for name in others}
    if (
        may_guess
        and dataset.separator is None
        and dataset.task in ("auto", "multilabel")
        and _are_lists(dataset, looked)
    ):
        dataset = dataset.model_copy(update={"separator": ","})
        notes.append(f"'{dataset.target[0]}' holds lists of labels")
    task = _task(dataset, looked) if dataset.task == "auto" else dataset.task
    columns = {
        name: given.get(name) or config.TableColumn(kind=guessed[name].kind, format=guessed[name].form)
        for name in file.names
        if name in given or name in guessed
    }
    if may_guess:
        notes += _notes(dataset, task, looked, columns)
    if may_guess and dataset.time is not None and dataset.time not in columns:
        form = _format_of(dataset.time, _present(looked[dataset.time]), dataset)
        if form is not None:
            columns[dataset.time] = config.TableColumn(kind="ignore", format=form)
    update: dict[str, Any] = {"columns": columns, "task": task, "delimiter": dataset.delimiter}
    pictures = [name for name, column in columns.items() if column.kind == "image"]
    if may_guess and pictures and not dataset.images:
        update["images"] = _places(file, pictures)
    if file.suffix == ".csv" and file.delimiter != ",":
        update["delimiter"] = file.delimiter
    if dataset.validation is None and (dataset.group is not None or dataset.time is not None):
        # Drawn of the training rows later, it would share groups with them, and be no newer.
        update["validation"] = VALIDATION if dataset.split_column is None else None
    return dataset.model_copy(update=update), _lines(dataset, task, columns, guessed, notes)


VALIDATION = 0.1


def _check_roles(dataset: config.Table, file: TableFile) -> dict[str, tuple[str | None, ...]]:
    """Return the columns by what they are beside features; refuse those that are not there, and contradictions."""
    keys: dict[str, tuple[str | None, ...]] = {
        "target": dataset.target,
        **{key: (getattr(dataset, key),) for key in ROLES},
        "metadata": tuple(dataset.metadata),
    }
    for key, names in keys.items():
        for name in names:
            if name is not None and name not in file.names:
                raise UserError(
                    f"dataset.{key}: {one_of('column', name, file.names)} (dataset.source = '{file.source}')"
                )
    given = dataset.columns or {}
    if absent := [name for name in given if name not in file.names]:
        raise UserError(
            f"dataset.columns: {one_of('column', absent[0], file.names)}. {len(absent)} of its columns "
            f"{'is' if len(absent) == 1 else 'are'} not in dataset.source = '{file.source}'"
        )
    for name in dataset.metadata:
        kind = given[name].kind if name in given else "ignore"
        if name in dataset.target or kind != "ignore":
            what = "dataset.target" if name in dataset.target else f"of kind {kind} in dataset.columns"
            raise UserError(
                f"dataset.metadata.{name}: the column is {what}, and such a one has slices of its own. Leave it out of "
                "metadata"
            )
    for key in ("target", "split_column", "weight"):
        if twice := [name for name in keys[key] if name and name in given and given[name].kind != "ignore"]:
            raise UserError(
                f"dataset.columns.{twice[0]} = {given[twice[0]].kind}: the column is dataset.{key}, from which a model "
                "must not learn. Leave it out of columns"
            )
    if dataset.time is not None and (dataset.group is not None or dataset.split_column is not None):
        other = "group" if dataset.group is not None else "split_column"
        raise UserError(
            f"dataset.time = '{dataset.time}' and dataset.{other} = '{getattr(dataset, other)}': each says by itself "
            "what the splits are. Give one of them"
        )
    return keys


def top_of(path: str) -> str:
    """Return the file or folder beside the table that a path of an image begins with."""
    return os.path.normpath(path).split(os.sep, 1)[0]


def _places(file: TableFile, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the files and folders beside the table that its paths of images lead into."""
    found: set[str] = set()
    for chunk in file.chunks(dict.fromkeys(columns, "repeated")):
        for values in chunk.values():
            found.update(top_of(cells.spelled(value)) for value in _present(list(cells.rows_of(values))))
    there = sorted(place for place in found if place not in ("", "..") and (file.path.parent / place).exists())
    return tuple(there) if len(there) <= MAX_FOLDERS else (".",)


@dataclass(frozen=True)
class _Guess:
    kind: Any
    why: str = ""
    form: str | None = None


def _with_target(dataset: config.Table, file: TableFile) -> config.Table:
    names = dataset.target
    if not names:
        raise UserError(
            "dataset.target: a table needs the column that a model learns to tell. Give --target COLUMN, or several as "
            f"--target A,B. Allowed: {', '.join(file.names)}"
        )
    if len(names) == 1 and names[0] not in file.names and "," in names[0]:
        names = tuple(name.strip() for name in names[0].split(","))
    if len(set(names)) < len(names):
        raise UserError(f"dataset.target = '{', '.join(names)}': names a column twice")
    return dataset.model_copy(update={"target": names})


def _look(file: TableFile, names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the values of the first rows."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    if not names:
        return found
    for chunk in file.first(dict.fromkeys(names, "text"), LOOKED_AT):
        for name, values in chunk.items():
            found[name] += islice(cells.rows_of(values), LOOKED_AT - len(found[name]))
    return found


def _present(values: list[Any], not_missing: Collection[str] = ()) -> list[Any]:
    missing = cells.is_missing(values, not_missing)
    return [value for value, absent in zip(values, missing.tolist(), strict=True) if not absent]


def _are(values: list[Any], read: Any, mistakes: float = 0.0) -> bool:
    """Return whether all values can be read so; or, of a sample, all but this fraction."""
    try:
        read(values, "")
    except BadValue:
        sample = values[:: math.ceil(len(values) / SAMPLE)] if mistakes else []
        return sum(_are([value], read) for value in sample) >= (1 - mistakes) * len(sample) > 0
    return True


def _is_nested(values: list[Any]) -> bool:
    return any(isinstance(value, list | dict | bytes) for value in values)


def _decimal(dataset: config.Table, looked: dict[str, list[Any]]) -> tuple[str, list[str]]:
    """Return what stands before the fraction of numbers, a point or a comma, and what to say of it.

    Raises:
        UserError: that may be either, or columns contradict each other.
    """
    found: dict[str, dict[str, str]] = {".": {}, ",": {}, "either": {}}
    # 1.234 is a fraction unless another column has commas before it.
    thousands_or_fractions: dict[str, str] = {}
    for name, values in looked.items():
        if name in dataset.target and dataset.separator is not None:
            continue
        texts = [value.strip() for value in _present(values) if isinstance(value, str)]
        marked = [text for text in texts if "," in text or ("." in text and text not in cells.NO_NUMBER)]
        readings = {decimal: _are_written(texts, decimal) for decimal in (".", ",")} if marked else {}
        if not any(readings.values()):
            continue
        if not all(readings.values()):
            found["." if readings["."] else ","][name] = marked[0]
        elif commas := [text for text in marked if "," in text]:
            # Nobody writes a thousandth of a dollar.
            with_currency = any(re.search(cells.CURRENCY, text) for text in commas)
            found["." if with_currency else "either"][name] = commas[0]
        else:
            thousands_or_fractions[name] = marked[0]
    points, commas_there, either = found["."], found[","], found["either"]
    if points and commas_there:
        (point, with_point), (name, with_comma) = next(iter(points.items())), next(iter(commas_there.items()))
        raise UserError(
            f"dataset.source = '{dataset.source}': the column '{name}' has numbers with a decimal comma, such as "
            f"'{with_comma}', and '{point}' some with a decimal point, such as '{with_point}'. Write all alike, or "
            f"say that they are words: --set dataset.columns.{name}=category"
        )
    if either and not points and not commas_there:
        name, one = next(iter(either.items()))
        raise UserError(
            f"dataset.source = '{dataset.source}': the comma in '{one}' of the column '{name}' may stand before a "
            "fraction or between thousands. Say --set \"dataset.decimal=','\" for a fraction, --set "
            f"\"dataset.decimal='.'\" for thousands, or --set dataset.columns.{name}=category for words"
        )
    if commas_there:
        said = ["numbers are written as 3,14"]
        return ",", said + [
            f"the point of '{one}' in '{name}' is between thousands" for name, one in thousands_or_fractions.items()
        ]
    return ".", [f"the comma of '{one}' in '{name}' is between thousands" for name, one in either.items()]


def _are_written(texts: list[str], decimal: str) -> bool:
    """Return whether texts are numbers with a decimal point or comma, but for a few mistakes."""
    sample, numbers = texts[:: math.ceil(len(texts) / SAMPLE)], 0
    for text in sample:
        with contextlib.suppress(ValueError):
            cells.written_number(text, decimal)
            numbers += 1
    return numbers >= (1 - MISTAKES) * len(sample)


def kind_of_texts(name: str, values: list[Any]) -> tuple[config.TableColumn, str]:
    """Return what a column of texts is, as of a table's first rows, and why."""
    guess = _kind(name, values, config.Table(kind="table", name="", source=""))
    return config.TableColumn(kind=guess.kind, format=guess.form), guess.why


def _kind(name: str, values: list[Any], dataset: config.Table) -> _Guess:
    """Return what a column is."""
    present = _present(values, dataset.not_missing)
    if all(map(cells.is_no_number, present)):
        return _Guess("ignore", "without a value")
    if _is_nested(present):
        return _Guess("ignore", "of values in values")
    distinct = len(set(present))
    if distinct == 1 and len(values) > 1 and len(present) == len(values):
        return _Guess("ignore", "the same in all rows")
    if not any(isinstance(value, bool) for value in present):
        if _are(present, partial(cells.numbers, decimal=dataset.decimal or "."), MISTAKES):
            return _kind_of_numbers(name, present, len(values), dataset)
        if (form := _format_of(name, present, dataset)) is not None or _are_iso(present):
            return _Guess("datetime", f"written as {form}" if form else "", form)
    texts = [cells.spelled(value) for value in present]
    if sum(PICTURES.fullmatch(text) is not None for text in texts) >= (1 - MISTAKES) * len(texts):
        return _Guess("image")
    unspaced = [UNSPACED_CHARACTER.sub(" x ", text) for text in texts]
    words = sum(len(text.split()) for text in unspaced) / len(texts)
    if words >= WORDS_OF_A_TEXT and distinct > len(texts) / 2:
        return _Guess("text", "each character is a word, as there are no spaces" if unspaced != texts else "")
    if distinct == len(values) and len(values) >= FEWEST:
        return _Guess("ignore", "another value in each row")
    return _Guess("category")


def _kind_of_numbers(name: str, present: list[Any], count: int, dataset: config.Table) -> _Guess:
    """Return whether numbers say how much, which of several, or only who a row is of."""
    texts = [value.strip() for value in present if isinstance(value, str)]
    # 01234 is a code: a postal code, an article.
    if re.search(r"^0\d+$", "\n".join(texts), re.MULTILINE):
        return _Guess("category")
    # Only a column of whole numbers, written as a program writes them, may say who a row is of.
    if len(present) == count and all(re.fullmatch(r"[+-]?\d+(\.0+)?", str(value).strip()) for value in present):
        numbers = np.array([float(value) for value in present])
        if (len(numbers) >= FEWEST and len(set(np.diff(numbers))) == 1) or name.lower() in ("index", "column 1"):
            return _Guess("ignore", "it numbers the rows")
        by_chance = math.exp(-(count**2) / (2 * float(np.ptp(numbers) + 1)))
        if len(set(numbers)) == count > 1 and (by_chance < BY_CHANCE or ID_NAMES.fullmatch(name)):
            return _Guess("ignore", "another whole number in each row, as an identifier")
    return _Guess("number", "; ".join(_how_written(name, texts, count, dataset)))


def _how_written(name: str, texts: Sequence[str], count: int, dataset: config.Table) -> list[str]:
    """Return what to say of numbers that are not written as a program writes them.

    Raises:
        UserError: they are in several currencies.
    """
    marks = Counter(re.findall(f"{cells.CURRENCY}|%", "\n".join(texts)))
    if len(currencies := [mark for mark in marks if mark != "%"]) > 1:
        raise UserError(
            f"dataset.source = '{dataset.source}': the column '{name}' has numbers in several currencies: "
            f"{listed([repr(one) for one in currencies])}. Bring them to one, or say that they are words: --set "
            f"dataset.columns.{name}=category"
        )
    absent = Counter(text for text in texts if text in cells.NO_NUMBER)
    said = [f"numbers with {mark}" for mark in marks]
    return said + [f"{times:,} of {count:,} are '{text}' and count as missing" for text, times in absent.items()]


def _are_iso(present: list[Any]) -> bool:
    """Return whether values are dates and times of ISO 8601."""
    dashed = sum(not isinstance(value, str) or bool(re.search("[-/]", value)) for value in present)
    return dashed >= (1 - MISTAKES) * len(present) and _are(present, cells.days, MISTAKES)


def _format_of(name: str, present: list[Any], dataset: config.Table) -> str | None:
    """Return how people's dates are written; None where they are none, or those of ISO 8601.

    Raises:
        UserError: they may be read in several ways.
    """
    texts = sorted({value.strip() for value in present if isinstance(value, str)} - cells.NO_NUMBER)
    some = texts[:: math.ceil(len(texts) / SAMPLE)] if texts else []
    if not any(re.search(r"\d", text) for text in some[:1]) or _are(some, cells.days):
        return None
    fitting = [form for form in FORMATS if _are(some[:1], partial(cells.days, form=form))]
    fitting = [form for form in fitting if _are(texts, partial(cells.days, form=form))]
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    kind = "ignore" if name == dataset.time else "datetime"  # Rows are ordered by it, and a model need not see it.
    ways = " or ".join(f"--set \"dataset.columns.{name}={{kind: {kind}, format: '{form}'}}\"" for form in fitting)
    raise UserError(
        f"dataset.source = '{dataset.source}': the dates of the column '{name}', such as {', '.join(some[:3])}, may be "
        f"read in {len(fitting)} ways. Say {ways}"
    )


def _are_lists(dataset: config.Table, looked: Mapping[str, list[Any]]) -> bool:
    """Return whether the only target holds lists: of JSON, or texts of them."""
    if len(dataset.target) != 1:
        return False
    present = _present(looked[dataset.target[0]])
    return bool(present) and all(cells.LIST.fullmatch(cells.spelled(value)) for value in present)


def _notes(
    dataset: config.Table, task: str, looked: Mapping[str, list[Any]], columns: Mapping[str, config.TableColumn]
) -> list[str]:
    """Return what to say of words that are read as missing, and of those that differ in small and capital letters."""
    notes = []
    classes = dataset.target if task == "classification" else ()
    if task == "regression":
        for name in dataset.target:
            written = [value.strip() for value in looked[name] if isinstance(value, str)]
            notes += [f"'{name}': {said}" for said in _how_written(name, written, len(looked[name]), dataset)]
    for name in (*classes, *(name for name, column in columns.items() if column.kind == "category" and name in looked)):
        texts = Counter(cells.spelled(value) for value in looked[name] if isinstance(value, str))
        notes += [
            f"{texts[text]:,} of {len(looked[name]):,} rows of '{name}' are '{text}', read as missing; to keep it "
            f"as a value: --set \"dataset.not_missing=['{text}']\""
            for text in sorted(cells.MISSING_TEXTS - {""} - set(dataset.not_missing))
            if texts[text]
        ]
        alike: dict[str, str] = {}
        for text in texts:
            if (other := alike.setdefault(text.casefold(), text)) != text:
                notes.append(f"'{other}' and '{text}' of '{name}' differ in capital letters alone, and are two values")
                break
    return notes


def _task(dataset: config.Table, looked: dict[str, list[Any]]) -> str:
    """Return what is learnt.

    Raises:
        UserError: several columns that are not numbers.
    """
    if dataset.separator is not None:
        return "multilabel"
    found = {name: _present(looked[name], dataset.not_missing) for name in dataset.target}
    for name, values in found.items():
        if _is_nested(values):
            raise UserError(
                f"dataset.target = '{name}': has values in values, such as {shown(values[0])}. Give a column of texts "
                "or numbers"
            )
    numbers = partial(cells.numbers, decimal=dataset.decimal or ".")
    found = {name: [value for value in values if not cells.is_no_number(value)] for name, values in found.items()}
    numeric = {name: bool(values) and _are(values, numbers) for name, values in found.items()}
    if len(found) > 1:
        if words := [name for name, are in numeric.items() if not are]:
            raise UserError(
                f"dataset.target = '{', '.join(dataset.target)}': the column '{words[0]}' has values that are not "
                "numbers. Several targets are labels of 0 and 1, or numbers of a regression. Give one of them"
            )
        every = np.concatenate([numbers(values, "") for values in found.values()])
        return "multilabel" if np.isin(every, (0, 1)).all() else "regression"
    (values,) = found.values()
    if not values or any(isinstance(value, bool) for value in values):
        return "classification"
    if not numeric[dataset.target[0]]:
        mistaken = len(set(values)) > MAX_CLASSES and _are(values, numbers, MISTAKES)
        return "regression" if mistaken else "classification"
    every = numbers(values, "")
    few = len(np.unique(every)) <= min(MAX_CLASSES, len(every) / 2)
    return "classification" if few and (every == np.rint(every)).all() else "regression"


def _lines(
    dataset: config.Table,
    task: str,
    columns: dict[str, config.TableColumn],
    guessed: dict[str, _Guess],
    notes: Sequence[str],
) -> list[str]:
    """Return what was guessed, as lines of 80 characters."""
    if not guessed and dataset.task != "auto":
        return []
    rows = {"task": [f"{task} of {', '.join(dataset.target)}"]}
    for name, column in columns.items():
        why = guessed[name].why if name in guessed else ""
        rows.setdefault(column.kind, []).append(f"{name} ({why})" if why else name)
    first = f"guessed from the first rows; edit data/{dataset.name}/params.yaml if wrong:"
    return [first, *lines_of_kinds(rows), *(line for note in notes for line in lines_of_kinds({"note": [note]}))]


def lines_of_kinds(rows: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of columns behind what they are, as lines of 80 characters."""
    lines = []
    for kind, names in rows.items():
        text = textwrap.wrap(", ".join(names), 80 - 12, break_on_hyphens=False) if names else []
        lines += [f"  {title:<10}{line}" for title, line in zip([kind, *[""] * len(text)], text, strict=False)]
    return lines
