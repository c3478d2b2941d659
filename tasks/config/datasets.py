"""What data/<name>/params.yaml says of a dataset: a section for each kind (``tasks/dataset_kinds/``)."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

import yaml
from pydantic import Field, ValidationError

from tasks.config.section import Count, Pixels, Section, Text, refusal
from tasks.errors import UserError, one_of, shown


class Description(Section):
    """What every dataset has."""

    kind: str
    name: Text
    is_local: ClassVar[bool] = True
    """Whether its source is a file or folder of the user's, and nothing is downloaded."""


class Tfds(Description):
    kind: Literal["tfds"] = "tfds"
    version: Text | None = None
    """TFDS version; null is the builder's newest."""
    image_size: tuple[Pixels, Pixels] | None = None
    """Height and width that `prepare` resizes to; null keeps the dataset's own."""
    is_local = False


class LocalDescription(Description):
    source: Text
    """The file or folder that the examples are read from; a path that does not begin with `/` is one of the project."""
    test: Annotated[float, Field(gt=0, lt=1)] | Count = 0.2
    """The fraction or the number of the examples that become the test split, where the source has none."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Chooses them."""


class ImageFolder(LocalDescription):
    kind: Literal["image_folder"]
    image_size: tuple[Pixels, Pixels] | None = None
    """Height and width that all images are resized to; null keeps their own (needed where sizes differ)."""
    on_broken: Literal["stop", "skip"] = "stop"
    """What becomes of files that are no whole image: the end, with their names, or no example."""


class Arrays(LocalDescription):
    kind: Literal["arrays"]


AnyDescription: TypeAlias = Tfds | ImageFolder | Arrays


def description_kinds() -> dict[str, type[Description]]:
    """Return the sections by kind."""
    return {get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(AnyDescription)}


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
        unknown = [first for first in error.errors() if first["type"] == "extra_forbidden"]
        first = (unknown or error.errors())[0]
        key = str(first["loc"][0]) if first["loc"] else "kind"
        if unknown:
            raise UserError(
                f"{where}: {one_of(f'key of a dataset of kind {kind}', key, kinds[kind].model_fields)}"
            ) from None
        of_value = (one for one in error.errors() if one["loc"][:1] == (key,))
        said = refusal(f"dataset.{key}", values.get(key), of_value, kinds[kind].model_fields.get(key))
        raise UserError(f"{where}: {said}") from None


def read_description(folder: Path) -> Any:
    """Return what data/<name>/params.yaml says of its dataset.

    Raises:
        UserError: it does not say what dataset it is.
    """
    place = f"data/{folder.name}/params.yaml"
    try:
        values = dict(yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))["dataset"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
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
