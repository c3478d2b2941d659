"""Datasets and DVC: creates data/<name>, brings its stages up to date, and returns its record and data version."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks import config, records
from tasks.data import data_state, dataset_folder, prepared_data, source_files
from tasks.process import stages
from tasks.records import PreparedDataset
from tasks.runs import lineage
from tasks.system.errors import UserError, listed, printable


def prepare_data(settings: config.Settings, stage: str = "prepare", force: bool = False) -> PreparedDataset | None:
    """Bring a dataset up to date through DVC and return its record; None after ``stage`` download.

    A new dataset gets a folder in data/, which this function removes again if it could not fetch anything.

    Raises:
        UserError: the stage refused the dataset, the settings contradict data/<name>/params.yaml, or the user's files
            are in the way.
    """
    root = config.project_root()
    name = settings.dataset.name
    if stage == "download" and dataset_folder.sources_of(name, root):
        print(f"data/{name} needs no download: its source is a local file or folder", file=sys.stderr)
        return None
    made = dataset_folder.add(settings.dataset, root)
    with _hinting_at_own_data():
        return _bring_up_to_date(name, made, root, stage, force, settings.dataset.downloads)


def add(source: str, name: str | None, values: Mapping[str, Any]) -> PreparedDataset:
    """Create the folder data/<name> and prepare the dataset; remove the folder again if that fails.

    Args:
        source: the user's file or folder, a TFDS dataset (NAME, NAME/CONFIG, NAME:VERSION or NAME/CONFIG:VERSION), or
            the user's own TFDS builder (MODULE:CLASS).
        name: the name of the dataset; None derives it from the source.
        values: other entries of data/<name>/params.yaml, by key.

    Raises:
        UserError: no such source, a value is not allowed, the name is taken, or the kind refuses the data.
    """
    described, guessed = describe(source, name, values)
    if isinstance(described, config.Settings):
        check_source(described.dataset, source)
        return prepare_data(described) or load_prepared(described.dataset.name)
    root, name = config.project_root(), described.name
    made = dataset_folder.add_local(described, root)
    prepared = _bring_up_to_date(name, made, root) or load_prepared(name)
    # Only now, because refused data leave no folder with these guesses.
    for line in guessed:
        print(printable(line, keep="\n"), file=sys.stderr)
    return prepared


def describe(
    source: str, name: str | None, values: Mapping[str, Any]
) -> tuple[config.LocalDescription | config.Settings, list[str]]:
    """Return the description that ``add`` writes to data/<name>/params.yaml, or settings for a TFDS dataset; and lines
    for the user about guesses.

    Raises:
        UserError: the source does not exist, a value is not allowed, or the name cannot name a folder.
    """
    root = config.project_root()
    for key, instead in (("name", "--name NAME"), ("source", "another SOURCE")):
        if key in values:
            raise UserError(f"--set dataset.{key}={values[key]}: `data add` takes it as an argument. Use {instead}")
    kind = values.get("kind") or source_files.kind_of(source)
    values = {key: value for key, value in values.items() if key != "kind"}
    section = config.description_kinds().get(kind)
    if "target" in values and section is not None and "target" not in section.model_fields:
        tables = source_files.tables_hint(Path(source)) if Path(source).is_dir() else ""
        raise UserError(
            f"--target {values['target']}: only tables need it; the target of a dataset of kind {kind} is fixed. "
            f"Leave --target out{tables}"
        )
    if kind == "tfds":
        if name is not None:
            raise UserError(f"--name {name}: a TFDS dataset keeps its name in TFDS. Leave --name out")
        wanted, _, version = source.partition(":")
        if not version[:1].isdigit():  # A TFDS version begins with a digit, the class of a user's builder does not.
            wanted, version = source, ""
        values = {"name": wanted, **({"version": version} if version else {}), **values}
        return config.load(None, {f"dataset.{key}": value for key, value in values.items()}), []
    path = Path(os.path.realpath(source))
    if not path.exists():
        raise UserError(f"SOURCE = '{source}': no such file or folder. Check the path")
    place = path.relative_to(root) if path.is_relative_to(root) else path
    name = dataset_folder.check_name(path.stem if name is None else name, asked=name is not None)
    described: config.LocalDescription = config.describe(
        {"kind": kind, "name": name, "source": place.as_posix(), **values}, "data add"
    )
    if not described.is_guessed:
        return described, []
    source_files.refuse_unreadable(described.source, root)
    from tasks.data import kinds  # NumPy, which no other command needs.

    guessed: tuple[config.LocalDescription, list[str]] = kinds.find_kind(kind).guess(described)
    return guessed


def _bring_up_to_date(
    name: str, made: list[Path], root: Path, stage: str = "prepare", force: bool = False, downloads: Path | None = None
) -> PreparedDataset | None:
    """Let DVC run outdated stages; remove ``made``, the files of a new dataset, if nothing was fetched."""
    folder = root / "data" / name
    try:
        prepared_data.set_foreign_aside(name)
        if (source := dataset_folder.missing_source(name, root)) is not None:
            return _without_source(name, source, force)
        dataset_folder.note_reader(folder)
        if not force and data_state.is_known(root, name):
            return load_prepared(name) if stage == "prepare" else None
        from tasks.runs import dvc  # Only now, because most runs find their data up to date.

        for source in dataset_folder.sources_of(name, root):
            source_files.refuse_unreadable(source, root)
        place = str(downloads.absolute()) if downloads is not None else None
        with data_state.remembered(root, name) if stage == "prepare" else contextlib.nullcontext(), dvc.at_work(root):
            stages.reproduce(target=f"data/{name}/dvc.yaml:{stage}", force=force, downloads=place)
    except BaseException:
        # Keep fetched data for the next try.
        if made and not (folder / "raw").exists():
            dataset_folder.take_away(made)
        raise
    if made:
        print(f"added data/{name}: put it under version control with `git add data/{name}`", file=sys.stderr)
    return load_prepared(name) if stage == "prepare" else None


def _without_source(name: str, source: str, force: bool) -> PreparedDataset:
    """Return the prepared data of a missing source, such as data that `dvc pull` fetched; refuse outdated data."""
    if force or lineage.data_version(name) is None:
        raise UserError(
            f"dataset.source = '{source}' does not exist: restore it, or correct its path in data/{name}/params.yaml"
        )
    if different := dataset_folder.changed_since_prepared(config.project_root() / "data" / name):
        raise UserError(
            f"dataset.{different}: data/{name}/params.yaml has changed since the data were prepared, but the source "
            f"'{source}' does not exist to prepare them again: restore it, or undo the change"
        )
    prepared = load_prepared(name)
    print(f"data/{name}: its source '{source}' does not exist; using the data prepared earlier", file=sys.stderr)
    return prepared


def load_prepared(name: str) -> PreparedDataset:
    """Return the record of a prepared dataset, with its data version.

    Raises:
        UserError: the dataset is not prepared, or its manifest cannot be read.
    """
    path = config.project_root() / "data" / name / "prepared" / "manifest.json"
    if not path.exists():
        pull = f", or fetch the pushed data: `stratagem data pull {name}`" if lineage.data_version(name) else ""
        raise UserError(f"dataset {name} is not prepared: `stratagem data prepare --set dataset.name={name}`{pull}")
    try:
        prepared = records.load(PreparedDataset, path)
    except UserError as error:
        raise UserError(f"{error}. {prepared_data.remedy(name)}") from None
    return prepared.model_copy(update={"data_version": lineage.data_version(name)})


def load_up_to_date(name: str) -> PreparedDataset | None:
    """Return the record of a prepared dataset, or None if a run would prepare it first; change nothing."""
    root = config.project_root()
    try:
        prepared = load_prepared(name)
    except UserError:  # Missing or damaged: a run prepares it again.
        return None
    if dataset_folder.missing_source(name, root) is not None:  # Such as after `data pull`.
        different = prepared.data_version is None or dataset_folder.changed_since_prepared(root / "data" / name)
        return None if different else prepared
    if not dataset_folder.is_reader_noted(root / "data" / name):
        return None
    if data_state.is_known(root, name):
        return prepared
    from tasks.runs import dvc

    dvc.configure()
    return prepared if stages.is_up_to_date(target=f"data/{name}/dvc.yaml:prepare") else None


def choose_settings(
    recipe: config.Recipe, overrides: Sequence[str] | Mapping[str, Any], prepared: PreparedDataset
) -> config.Settings:
    """Return the settings of a training on prepared data; print which of them were chosen for the data, and why."""
    settings = config.load(recipe, overrides, prepared=prepared)
    tell_choices(recipe, settings, prepared)
    return settings


def load(recipe: config.Recipe, overrides: Sequence[str]) -> tuple[config.Settings, PreparedDataset]:
    """Return the settings of a training on prepared data, and the data; see ``choose_settings``."""
    prepared = load_prepared(config.load(recipe, overrides).dataset.name)
    return choose_settings(recipe, overrides, prepared), prepared


def settle(recipe: config.Recipe, overrides: Sequence[str]) -> config.Settings:
    """Return the settings of a training that another machine starts later.

    Raises:
        UserError: the settings depend on data that a run would prepare first.
    """
    asked = config.load(recipe, overrides)
    if not config.follows_data(recipe, asked):
        return asked
    name = asked.dataset.name
    if (prepared := load_up_to_date(name)) is None:
        raise UserError(
            f"dataset.name = '{name}': without a recipe, model, batch size, epochs and other settings depend on the "
            "data, which are not prepared or have changed since. First `stratagem data prepare --set dataset.name="
            f"{name}`, or use a recipe"
        )
    return choose_settings(recipe, overrides, prepared)


def tell_choices(recipe: config.Recipe, settings: config.Settings, prepared: PreparedDataset) -> None:
    """Print which settings were chosen for prepared data, why, and which of them the user overrode."""
    for choice in config.choices(recipe, settings, prepared):
        given = ", ".join(config.overruled(choice, settings))
        but = f" (except {given}, which you set)" if given else ""
        print(f"chosen for {prepared.name}: {choice.reason}{but}", file=sys.stderr)


def check_source(dataset: config.Dataset, source: str | None = None) -> None:
    """Refuse a dataset that is neither in data/ nor in TFDS, before a run starts anything.

    Args:
        dataset: what a run trains on.
        source: the SOURCE of `data add`, for the message.

    Raises:
        UserError: the dataset does not exist, or there is no network.
    """
    root = config.project_root()
    fetched = root / "data" / dataset.name / "raw" / "manifest.json"
    built_in = config.split_folder_name(dataset.name)[0] in config.names_of("data/builders")
    if not (dataset_folder.sources_of(dataset.name, root) or built_in or fetched.exists()):
        with _hinting_at_own_data(source):
            stages.check_source(dataset=dataset)


@contextlib.contextmanager
def _hinting_at_own_data(source: str | None = None) -> Iterator[None]:
    """Extend TFDS' error about an unknown dataset: how to add the user's own data, or that SOURCE is no file either."""
    try:
        yield
    except UserError as error:
        if not str(error).startswith("unknown dataset "):
            raise
        if source is not None:
            raise UserError(f"{error}. No file or folder is called '{source}' either") from None
        names = dataset_folder.names(config.project_root())
        known = f"; or one in data/ ({listed(names)})" if names else ""
        raise UserError(f"{error}{known}. `stratagem data add SOURCE` adds your own data to data/") from None
