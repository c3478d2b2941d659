"""The keys of data/<name>/params.yaml: a section for each kind of dataset (``tasks/data/kinds/``)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from tasks.config.project import names_of
from tasks.config.section import Count, Pixels, Section, Text, refusal
from tasks.config.sources import read_yaml
from tasks.system.errors import UserError, one_of, shown


class DataCheck(Section):
    """How a check of ``tasks/data/checks/`` treats a dataset."""

    action: Literal["stop", "warn", "off"] = "warn"
    """If the check finds something, `stop` rejects the data and `warn` prints a warning; `off` skips the check."""
    threshold: Annotated[float, Field(ge=0)] | None = None
    """The check reports values above this; null is the check's default."""


def _checks(value: Any) -> Any:
    """Accept an action instead of a mapping; YAML reads the action `off` as false."""
    if not isinstance(value, dict):
        return value
    if unknown := [name for name in value if name not in names_of("data/checks")]:
        raise ValueError(one_of("check", unknown[0], names_of("data/checks")))
    return {
        name: {"action": "off" if own is False else own} if isinstance(own, str | bool) else own
        for name, own in value.items()
    }


class Description(Section):
    """The keys of every dataset."""

    kind: str
    name: Text
    """The name of the folder data/NAME."""
    checks: Annotated[dict[Text, DataCheck], BeforeValidator(_checks)] = Field(
        default={}, exclude_if=lambda checks: not checks
    )
    """Overrides a check's default, by its name: stop, warn or off, or {action, threshold}."""
    is_local: ClassVar[bool] = True
    """Whether its source is the user's file or folder, so nothing is downloaded."""


class TableColumn(Section):
    """How a model uses a column of a table."""

    kind: Literal["number", "datetime", "category", "text", "image", "ignore"]
    """The kind of its values; `ignore` leaves the column out."""
    missing: Literal["fill", "stop", "drop"] = "fill"
    """How to treat missing values: `fill` replaces them with the training split's mean (number, datetime), a category
    of their own or a black image; `stop` fails and prints their number; `drop` leaves these rows out."""
    scale: Annotated[Literal["standardize", "quantiles"], Field(exclude_if=lambda scale: scale == "standardize")] = (
        "standardize"
    )
    """How to scale numbers: `standardize` subtracts the mean and divides by the standard deviation; `quantiles` is the
    share of the training split's values below it, from 0 to 1, which a few very large values do not distort."""

    format: Annotated[Text | None, Field(exclude_if=lambda form: form is None)] = None
    """Format of dates and times in the codes of Python's `strptime`, such as `%d/%m/%Y`; null is ISO 8601. `data add`
    finds it if only one format fits all values."""
    unit: Annotated[Text | None, Field(exclude_if=lambda unit: unit is None)] = None
    """The unit after each number, such as `kg`. `data add` finds it if all numbers have the same."""

    @field_validator("scale")
    @classmethod
    def quantiles_are_of_numbers(cls, scale: str, known: ValidationInfo) -> str:
        if scale == "quantiles" and (kind := known.data.get("kind", "number")) != "number":
            raise PydanticCustomError(
                "scale", "quantiles need a column of kind number, but this one is {kind}", {"kind": kind}
            )
        return scale


def _columns(value: Any) -> Any:
    """Accept a kind instead of a mapping: ``{name: kind}`` means ``{name: {kind: kind}}``."""
    if not isinstance(value, dict):
        return value
    return {name: {"kind": own} if isinstance(own, str) else own for name, own in value.items()}


class Tfds(Description):
    """A dataset of TensorFlow Datasets, a builder in tasks/data/builders/, or your own builder."""

    kind: Literal["tfds"] = "tfds"
    version: Text | None = None
    """TFDS version; null is the builder's newest."""
    builder: Text | None = None
    """MODULE:CLASS of your own builder; null is a builder of TFDS or in tasks/data/builders/."""
    image_size: tuple[Pixels, Pixels] | None = None
    """Height and width to which `prepare` resizes images; null keeps their size, or uses the median if they differ,
    rounded to a multiple of 8, at most 224."""
    columns: Annotated[dict[str, TableColumn], BeforeValidator(_columns)] = Field(
        default={}, exclude_if=lambda columns: not columns
    )
    """If the builder's examples have columns: overrides the kinds that TFDS or the values suggest."""
    is_local = False


class LocalDescription(Description):
    """The user's own file or folder."""

    source: str
    """The file or folder with the examples; a path that does not begin with `/` is relative to the project."""
    test: Annotated[float, Field(gt=0, lt=1)] | Count = 0.2
    """Fraction or number of examples for the test split, if the source has none."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed for drawing the test split."""
    is_guessed: ClassVar[bool] = False
    """Whether `data add` guesses missing keys from the data, with ``guess`` in the kind's file."""

    @property
    def sources(self) -> tuple[str, ...]:
        """All of the user's files and folders that are read."""
        return (self.source,)


class ImageFolder(LocalDescription):
    """A folder of images: FOLDER/CLASS/*, or FOLDER/SPLIT/CLASS/*."""

    kind: Literal["image_folder"]
    is_guessed = True
    image_size: tuple[Pixels, Pixels] | None = None
    """Height and width to which all images are resized; null keeps their size, or uses the median if they differ,
    rounded to a multiple of 8, at most 224."""
    splits: Annotated[
        dict[Text, Literal["train", "validation", "test"]] | None, Field(exclude_if=lambda splits: splits is None)
    ] = None
    """The split of each folder, such as {seg_train: train, seg_test: test}; other folders are left out. {} means that
    all folders are classes; null decides by their names."""
    on_broken: Literal["stop", "skip"] = "stop"
    """How to treat files that are not intact images: `stop` fails and lists them, `skip` leaves them out."""


class Arrays(LocalDescription):
    """A .npz file, or a folder of .npy files."""

    kind: Literal["arrays"]
    task: Literal["auto", "classification", "multilabel", "regression"] = "auto"
    """The task. `auto` chooses classification for integers, words and a few whole numbers such as 0.0 and 1.0;
    regression for fractional numbers; and for several columns of 0 and 1 multilabel, or classification if each example
    has exactly one 1."""


class Table(LocalDescription):
    """A table: CSV, TSV, JSON lines or Parquet."""

    kind: Literal["table"]
    target: Annotated[tuple[str, ...], BeforeValidator(lambda one: [one] if isinstance(one, str) else one)] = ()
    """The column to predict, or a list of several: labels (0 or 1 each) or numbers."""
    task: Literal["auto", "classification", "multilabel", "regression"] = "auto"
    """The task. `auto` chooses classification for texts and for few different whole numbers, regression for other
    numbers, and multilabel for several columns of 0 and 1."""
    separator: Annotated[str, Field(min_length=1, max_length=10)] | None = None
    """The separator between the labels, if one target column contains several per example; brackets and quotes of a
    Python or JSON list are ignored."""
    columns: Annotated[dict[str, TableColumn], BeforeValidator(_columns)] | None = None
    """The kind of each column that has no other role; null lets `data add` guess all of them."""
    split_column: str | None = None
    """The column with train, validation or test. If it never has test, the test split is drawn from the training
    rows."""
    group: str | None = None
    """A column such as a person or device; all rows with the same value go into the same split."""
    time: str | None = None
    """The column that orders the rows: the newest become the test split."""
    metadata: Annotated[
        dict[str, Literal["category", "number", "datetime"]], Field(exclude_if=lambda metadata: not metadata)
    ] = {}
    """Columns that are not inputs of the model, with the kind of their values. The test split keeps them, so a run's
    report, `register.floors` and `register.ceilings` can use them for slices."""
    weight: str | None = None
    """The column with each row's weight in the training loss."""
    validation: Annotated[float, Field(gt=0, lt=1)] | Count | None = None
    """Like `test`, for a validation split that `prepare` makes; null leaves it to `input.validation`, which ignores
    groups and times."""
    max_vocabulary: Count = 20_000
    """Size of the vocabulary of a category or text column: the most frequent values or words."""
    text_length: Annotated[int, Field(gt=0, le=100_000)] | None = None
    """Number of words to keep of a text; null is enough for 95% of the training split's texts, at most 512."""
    images: tuple[str, ...] = ()
    """Files and folders next to the table with the images that the table names. `data add` finds them and makes
    them DVC dependencies; if they change, add the dataset again."""
    image_size: tuple[Pixels, Pixels] | None = None
    """Height and width to which all images are resized; null keeps their size, or uses the median if they differ,
    rounded to a multiple of 8, at most 224."""
    on_broken: Literal["stop", "skip"] = "stop"
    """How to treat rows without a target, group, time or weight, or with a damaged image: `stop` fails and lists them,
    `skip` leaves them out."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """The delimiter of CSV; null is a tab for .tsv, otherwise a comma."""
    decimal: Annotated[Literal[".", ","] | None, Field(exclude_if=lambda decimal: decimal is None)] = None
    """The decimal separator in CSV, TSV and JSON lines; null is a point, unless `data add` finds a comma."""
    header: Annotated[Count | None, Field(exclude_if=lambda header: header == 1)] = 1
    """The line of a CSV file that names the columns, counted from 1; null is a file without a header, whose columns are
    `column_1`, `column_2`, ... `data add` skips a title, comments, blank lines and `sep=;` above it."""
    header_rows: Annotated[Count, Field(exclude_if=lambda rows: rows == 1)] = 1
    """The number of rows of a CSV file's header: the first one names the columns; others, such as units, are left
    out."""
    quoting: Annotated[Literal["minimal", "none"] | None, Field(exclude_if=lambda quoting: quoting is None)] = None
    """`minimal`: quotes surround CSV values that contain a delimiter or a line break. `none`: quotes are ordinary
    characters. Null is minimal, unless a whole row would become one value."""
    not_missing: Annotated[tuple[Text, ...], Field(exclude_if=lambda texts: not texts)] = ()
    """Texts that usually mean a missing value (`None`, `NA`, `null`) but are a class or category in this table."""
    na_values: Annotated[tuple[Text | int | float, ...], Field(exclude_if=lambda values: not values)] = ()
    """Further values that mean a missing value in this table, such as `-999` or `keine Angabe`."""
    encoding: Text = "utf-8"
    """Text encoding of CSV, TSV and JSON lines."""
    is_guessed = True

    @property
    def sources(self) -> tuple[str, ...]:
        folder = Path(self.source).parent
        return (self.source, *((folder / place).as_posix() for place in self.images))


def description_kinds() -> dict[str, type[Description]]:
    """Return the sections by kind; a file of tasks/data/kinds/ without its own section uses LocalDescription."""
    kinds: tuple[type[Description], ...] = (Tfds, ImageFolder, Arrays, Table)
    own = {get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in kinds}
    return own | {name: LocalDescription for name in names_of("data/kinds") if name not in own}


def describe(values: dict[str, Any], where: str) -> Any:
    """Return the section of a dataset.

    Args:
        values: as in data/<name>/params.yaml; without ``kind`` it is a TFDS dataset.
        where: that file, for the message.

    Raises:
        UserError: an unknown key, or a value that is not allowed.
    """
    kinds = description_kinds()
    kind = values.get("kind", "tfds")
    if not isinstance(kind, str) or kind not in kinds:
        raise UserError(f"{where}: {one_of('dataset.kind', str(kind), kinds)}")
    try:
        return kinds[kind].model_validate({"kind": "tfds", **values})
    except ValidationError as error:
        raise UserError(f"{where}: {_refusal(values, kinds[kind], error.errors())}") from None


def _refusal(values: dict[str, Any], kind: type[Description], errors: list[ErrorDetails]) -> str:
    """Return the message about the first wrong key of the description or of one of its columns."""
    unknown = [
        one
        for one in errors
        if one["type"] == "extra_forbidden" and (len(one["loc"]) == 1 or one["loc"][0] == "columns")
    ]
    if not (places := (unknown or errors)[0]["loc"]):  # From a validator of the section, which names the key.
        return f"dataset.{errors[0]['msg'].removeprefix('Value error, ')}"
    # For other keys, pydantic adds the index in a list, or the type in a union.
    places = places if places[0] == "columns" else places[:1]
    *above, own = map(str, places)
    fields: Mapping[str, FieldInfo] = TableColumn.model_fields if len(places) == 3 else kind.model_fields
    if unknown:
        of = ".".join(["dataset", *above]) if above else f"a dataset of kind {values.get('kind', 'tfds')}"
        return one_of(f"key of {of}", own, fields)
    value: Any = values
    for place in places:
        value = value.get(place) if isinstance(value, Mapping) else value  # A column may be only its kind.
    of_value = (one for one in errors if one["loc"][: len(places)] == places)
    return refusal(".".join(["dataset", *above, own]), value, of_value, fields.get(own))


def read_description(folder: Path) -> Any:
    """Return the section in data/<name>/params.yaml.

    Raises:
        UserError: it does not describe a dataset, or describes another one.
    """
    place = f"data/{folder.name}/params.yaml"
    try:
        values = dict(read_yaml(folder / "params.yaml")["dataset"])
    except (UserError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{place} already exists, but does not describe a dataset ({error}): fix it, or move it away, then "
            "run again"
        ) from None
    if values.get("name") != folder.name:
        raise UserError(
            f"{place}: dataset.name = {shown(values.get('name'))}: a dataset has the name of its folder. Write "
            f"{folder.name}"
        )
    return describe(values, place)
