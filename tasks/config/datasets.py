"""What data/<name>/params.yaml says of a dataset: a section for each kind (``tasks/data/kinds/``)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

import yaml
from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from tasks.config.project import names_of
from tasks.config.section import Count, Pixels, Section, Text, refusal
from tasks.system import files
from tasks.system.errors import UserError, one_of, shown


class DataCheck(Section):
    """What a check of ``tasks/data/checks/`` does of a dataset."""

    action: Literal["stop", "warn", "off"] = "warn"
    """Refuse the data where it finds something, say so, or do not look."""
    threshold: Annotated[float, Field(ge=0)] | None = None
    """A finding is above it; null is the check's own."""


def _checks(value: Any) -> Any:
    """A check may be its action alone, of which YAML reads `off` as false."""
    if not isinstance(value, dict):
        return value
    if unknown := [name for name in value if name not in names_of("data/checks")]:
        raise ValueError(one_of("check", unknown[0], names_of("data/checks")))
    return {
        name: {"action": "off" if own is False else own} if isinstance(own, str | bool) else own
        for name, own in value.items()
    }


class Description(Section):
    """What every dataset has."""

    kind: str
    name: Text
    """That of the folder data/NAME."""
    checks: Annotated[dict[Text, DataCheck], BeforeValidator(_checks)] = Field(
        default={}, exclude_if=lambda checks: not checks
    )
    """By name, what a check does where the default does not suit: stop, warn or off, or {action, threshold}."""
    is_local: ClassVar[bool] = True
    """Whether its source is a file or folder of the user's, and nothing is downloaded."""


class TableColumn(Section):
    """What a column of a table is to a model."""

    kind: Literal["number", "datetime", "category", "text", "image", "ignore"]
    """What its values are; `ignore` leaves the column out."""
    missing: Literal["fill", "stop", "drop"] = "fill"
    """What becomes of a missing value: the mean of the training split (a number, a datetime), a place of its own or a
    black image; the end, with the count; or no example of that row."""
    scale: Annotated[Literal["standardize", "quantiles"], Field(exclude_if=lambda scale: scale == "standardize")] = (
        "standardize"
    )
    """What becomes of a number: it is as it is, less the mean and divided by the deviation; or the share of the
    training split's values below it, from 0 to 1, which a few very large ones do not press together."""

    format: Annotated[Text | None, Field(exclude_if=lambda form: form is None)] = None
    """How dates and times are written, such as `%d/%m/%Y`, in the codes of Python's `strptime`; null is ISO 8601.
    `data add` finds it where one way of reading alone fits all values."""

    @field_validator("scale")
    @classmethod
    def quantiles_are_of_numbers(cls, scale: str, known: ValidationInfo) -> str:
        if scale == "quantiles" and (kind := known.data.get("kind", "number")) != "number":
            raise PydanticCustomError(
                "scale", "quantiles are of columns of kind number, and this one is {kind}", {"kind": kind}
            )
        return scale


Metadata: TypeAlias = Annotated[
    dict[str, Literal["category", "number", "datetime"]], Field(exclude_if=lambda metadata: not metadata)
]
"""What the values are that are kept beside the examples, by name."""


def _columns(value: Any) -> Any:
    """Write ``{name: kind}`` out as ``{name: {kind: kind}}``: a user may give a column its kind alone."""
    if not isinstance(value, dict):
        return value
    return {name: {"kind": own} if isinstance(own, str) else own for name, own in value.items()}


class Tfds(Description):
    """A dataset of TensorFlow Datasets, one of tasks/data/builders/, or a builder of your own."""

    kind: Literal["tfds"] = "tfds"
    version: Text | None = None
    """TFDS version; null is the builder's newest."""
    builder: Text | None = None
    """MODULE:CLASS of a builder of the user's own; null is one of TFDS or of tasks/data/builders/."""
    image_size: tuple[Pixels, Pixels] | None = None
    """Height and width that `prepare` resizes to; null keeps the images' own size, or takes the median where sizes
    differ, rounded to a multiple of 8, at most 224."""
    columns: Annotated[dict[str, TableColumn], BeforeValidator(_columns)] = Field(
        default={}, exclude_if=lambda columns: not columns
    )
    """What a column is, if not what TFDS or its values say, where the builder's examples have columns."""
    is_local = False


class LocalDescription(Description):
    """A file or folder of the user's."""

    source: str
    """The file or folder that the examples are read from; a path that does not begin with `/` is one of the project."""
    test: Annotated[float, Field(gt=0, lt=1)] | Count = 0.2
    """The fraction or the number of the examples that become the test split, where the source has none."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Chooses them."""
    is_guessed: ClassVar[bool] = False
    """Whether `data add` looks at the data for what the description leaves open: ``guess`` of the kind's file."""

    @property
    def sources(self) -> tuple[str, ...]:
        """All files and folders of the user's that are read."""
        return (self.source,)


class ImageFolder(LocalDescription):
    """A folder of images: FOLDER/CLASS/*, or FOLDER/SPLIT/CLASS/*."""

    kind: Literal["image_folder"]
    is_guessed = True
    image_size: tuple[Pixels, Pixels] | None = None
    """Height and width that all images are resized to; null keeps their own, or where these differ takes the median,
    rounded to a multiple of 8, at most 224."""
    splits: Annotated[
        dict[Text, Literal["train", "validation", "test"]] | None, Field(exclude_if=lambda splits: splits is None)
    ] = None
    """Which split each folder is, such as {seg_train: train, seg_test: test}; other folders are left out. {} says that
    all are classes; null goes by their names."""
    on_broken: Literal["stop", "skip"] = "stop"
    """What becomes of files that are not whole images: the end, with their names, or no example."""
    folders: Annotated[tuple[str, ...], Field(max_length=8, exclude_if=lambda folders: not folders)] = ()
    """What the folders between a class and its images tell, from the class down: `[camera]` for CLASS/CAMERA/*. No
    model learns from them. Those of the test split are kept, as of a table's `metadata`."""

    @field_validator("folders")
    @classmethod
    def each_has_a_name_of_its_own(cls, folders: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(folders)) < len(folders):
            raise PydanticCustomError("folders", "two of them have one name: give each folder a name of its own")
        return folders


class Arrays(LocalDescription):
    """A .npz file, or a folder of .npy files."""

    kind: Literal["arrays"]
    task: Literal["auto", "classification", "multilabel", "regression"] = "auto"
    """What is learnt; auto takes whole numbers and words for classes, fractions for a regression (but 0.0, 1.0 and few
    others that are whole for classes), and several columns of 0 and 1 for labels, or for one class where each example
    has a single 1."""
    metadata: Metadata = {}
    """Arrays beside `x` and `y` that no model learns from, and what their values are: `site`, or `site_test` beside
    `x_test`, is one value an example. Those of the test split are kept, as of a table's columns."""


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Table(LocalDescription):
    """A table: CSV, TSV, JSON lines or Parquet."""

    kind: Literal["table"]
    target: Annotated[tuple[str, ...], BeforeValidator(_texts)] = ()
    """The column that a model learns to tell, or a list of several: of labels (0 or 1 each) or of numbers."""
    task: Literal["auto", "classification", "multilabel", "regression"] = "auto"
    """What is learnt; auto takes texts and few whole numbers for classes, other numbers for a regression, and several
    columns of 0 and 1 for labels."""
    separator: Annotated[str, Field(min_length=1, max_length=10)] | None = None
    """What stands between the labels of an example where one target column holds several; brackets and quotes around
    them, as of a list of Python or JSON, do not count."""
    columns: Annotated[dict[str, TableColumn], BeforeValidator(_columns)] | None = None
    """What each other column is; null guesses all of them."""
    split_column: str | None = None
    """The column that says train, validation or test; where it says no test, the training rows give it."""
    group: str | None = None
    """The column of which all rows of one value (a person, a device) are to be in one split."""
    time: str | None = None
    """The column by which rows are ordered: the newest become the test split."""
    metadata: Metadata = {}
    """Columns that no model learns from, and what their values are: those of the test split are kept, so that a run's
    report has slices by them, and `register.floors` and `register.ceilings` take these."""
    weight: str | None = None
    """The column of how much a row counts in the training loss."""
    validation: Annotated[float, Field(gt=0, lt=1)] | Count | None = None
    """As `test`, of a validation split that `prepare` makes; null leaves it to `input.validation`, which knows neither
    groups nor times."""
    max_vocabulary: Count = 20_000
    """The most values of a category, or words of a text column, that have a place of their own: the most frequent."""
    text_length: Annotated[int, Field(gt=0, le=100_000)] | None = None
    """How many words of a text are taken; null takes what 95 of 100 texts of the training split have, at most 512."""
    images: tuple[str, ...] = ()
    """The files and folders beside the table that its paths of images lead into. `data add` finds them, as DVC looks at
    them, too; add a dataset anew where they are others."""
    image_size: tuple[Pixels, Pixels] | None = None
    """Height and width that all images are resized to; null keeps their own, or where these differ takes the median,
    rounded to a multiple of 8, at most 224."""
    on_broken: Literal["stop", "skip"] = "stop"
    """What becomes of rows without a target, a group, a time or a weight, and of those whose image is not whole: the
    end, with their names, or no example."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """What stands between the values of a row of CSV; null is a tab for .tsv, else a comma."""
    decimal: Annotated[Literal[".", ","] | None, Field(exclude_if=lambda decimal: decimal is None)] = None
    """What stands before the fraction of a number in CSV, TSV and JSON lines; null is a point, unless `data add` finds
    that it is a comma."""
    header: Annotated[Count | None, Field(exclude_if=lambda header: header == 1)] = 1
    """The line of CSV that names the columns, from 1; null is a file without names: `column_1`, `column_2`, ... `data
    add` skips a title, comments, blank lines and `sep=;` above it."""
    quoting: Annotated[Literal["minimal", "none"], Field(exclude_if=lambda quoting: quoting == "minimal")] = "minimal"
    """Whether quotes surround values of CSV in which the delimiter or the end of a line stands; none takes a quote for
    a character like any other."""
    not_missing: Annotated[tuple[Text, ...], Field(exclude_if=lambda texts: not texts)] = ()
    """Texts that usually mean a missing value (`None`, `NA`, `null`) and are a class or a category here."""
    encoding: Text = "utf-8"
    """Of the text of CSV, TSV and JSON lines."""
    is_guessed = True

    @property
    def sources(self) -> tuple[str, ...]:
        folder = Path(self.source).parent
        return (self.source, *((folder / place).as_posix() for place in self.images))


AnyDescription: TypeAlias = Tfds | ImageFolder | Arrays | Table


def description_kinds() -> dict[str, type[Description]]:
    """Return the sections by kind; a file of tasks/data/kinds/ that needs none has that of all that is local."""
    own = {get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(AnyDescription)}
    return own | {name: LocalDescription for name in names_of("data/kinds") if name not in own}


def describe(values: dict[str, Any], where: str) -> Any:
    """Return the section of a dataset.

    Args:
        values: as in data/<name>/params.yaml; without ``kind`` it is a TFDS dataset, as all were once.
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
    """Return what is wrong with the first wrong key, of the description or of one of its columns."""
    unknown = [
        one
        for one in errors
        if one["type"] == "extra_forbidden" and (len(one["loc"]) == 1 or one["loc"][0] == "columns")
    ]
    if not (places := (unknown or errors)[0]["loc"]):  # Of the section: it names its key.
        return f"dataset.{errors[0]['msg'].removeprefix('Value error, ')}"
    # Of other keys, pydantic says which place of a list is meant, or which type of several.
    places = places if places[0] == "columns" else places[:1]
    *above, own = map(str, places)
    fields: Mapping[str, FieldInfo] = TableColumn.model_fields if len(places) == 3 else kind.model_fields
    if unknown:
        of = ".".join(["dataset", *above]) if above else f"a dataset of kind {values.get('kind', 'tfds')}"
        return one_of(f"key of {of}", own, fields)
    value: Any = values
    for place in places:
        value = value.get(place) if isinstance(value, Mapping) else value  # A column may be its kind alone.
    of_value = (one for one in errors if one["loc"][: len(places)] == places)
    return refusal(".".join(["dataset", *above, own]), value, of_value, fields.get(own))


def read_description(folder: Path) -> Any:
    """Return what data/<name>/params.yaml says of its dataset.

    Raises:
        UserError: it does not say what dataset it is.
    """
    place = f"data/{folder.name}/params.yaml"
    try:
        values = dict(yaml.safe_load(files.read_text(folder / "params.yaml"))["dataset"])
    except OSError as error:
        raise UserError(f"{place}: cannot be read ({error})") from None
    except (RecursionError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{place} is there already, and does not say what dataset it is ({type(error).__name__}): mend it, or move "
            "it away, then run again"
        ) from None
    if values.get("name") != folder.name:
        raise UserError(
            f"{place}: dataset.name = {shown(values.get('name'))}: a dataset has the name of its folder. Write "
            f"{folder.name}"
        )
    return describe(values, place)
