"""A dataset through DVC: its folder data/<name> made, its stages brought up to date, and its data version."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks import config, records
from tasks.data import data_state, dataset_folder, prepared_data, source_files
from tasks.process import dvc
from tasks.process.child import run_stage
from tasks.records import PreparedDataset
from tasks.runs import lineage
from tasks.system.errors import UserError, listed, printable


def prepare_data(settings: config.Settings, stage: str = "prepare", force: bool = False) -> PreparedDataset | None:
    """Bring a dataset up to date through DVC and return its record; None after ``stage`` download.

    A new dataset gets a folder in data/, which is removed again if nothing could be fetched.

    Raises:
        UserError: the stage refused the dataset, the settings contradict data/<name>/params.yaml, or the user's files
            are in the way.
    """
    root = config.project_root()
    name = settings.dataset.name
    if stage == "download" and dataset_folder.is_local(name, root):
        print(f"data/{name} has nothing to download: it is read from a file or folder of yours", file=sys.stderr)
        return None
    locks = _missing_locks(name, root)
    made = dataset_folder.add(settings.dataset, root)
    with _hinting_at_own_data():
        return _bring_up_to_date(name, [*made, *locks] if made else [], root, stage, force, settings.dataset.downloads)


def add(source: str, name: str | None, values: Mapping[str, Any]) -> PreparedDataset:
    """Make the folder data/<name> of a dataset and prepare it; the folder is removed again if that fails.

    Args:
        source: the user's file or folder, what TFDS has (NAME, NAME/CONFIG, NAME:VERSION or NAME/CONFIG:VERSION), or a
            TFDS builder of the user's own (MODULE:CLASS).
        name: of the dataset; None takes one from the source's.
        values: other entries of data/<name>/params.yaml, by key.

    Raises:
        UserError: no such source, a value is not allowed, the name is taken, or the kind refuses the data.
    """
    described, guessed = describe(source, name, values)
    if isinstance(described, config.Settings):
        _ask_tfds(described.dataset)
        return prepare_data(described) or load_prepared(described.dataset.name)
    root, name = config.project_root(), described.name
    locks = _missing_locks(name, root)
    made = dataset_folder.add_local(described, root)
    prepared = _bring_up_to_date(name, [*made, *locks] if made else [], root) or load_prepared(name)
    # Only now: if the data were refused, no folder would have what was guessed.
    for line in guessed:
        print(printable(line, keep="\n"), file=sys.stderr)
    return prepared


def describe(
    source: str, name: str | None, values: Mapping[str, Any]
) -> tuple[config.LocalDescription | config.Settings, list[str]]:
    """Return the description that ``add`` would write to data/<name>/params.yaml, or settings for a dataset of TFDS.

    Also return lines that say what was guessed about a table.

    Raises:
        UserError: no such source, a value is not allowed, or the name cannot be a folder's.
    """
    root = config.project_root()
    for key, instead in (("name", "--name NAME"), ("source", "another SOURCE")):
        if key in values:
            raise UserError(f"--set dataset.{key}={values[key]}: `data add` takes it elsewhere. Give {instead}")
    kind = values.get("kind") or source_files.kind_of(source)
    values = {key: value for key, value in values.items() if key != "kind"}
    section = config.description_kinds().get(kind)
    if "target" in values and section is not None and "target" not in section.model_fields:
        tables = source_files.tables_hint(Path(source)) if Path(source).is_dir() else ""
        raise UserError(
            f"--target {values['target']}: it is of a table alone; a dataset of kind {kind} says by itself what is to "
            f"be learnt. Leave --target out{tables}"
        )
    if kind == "tfds":
        if name is not None:
            raise UserError(f"--name {name}: a dataset of TFDS has the name that TFDS gives it. Leave --name out")
        if later := [key for key in ("checks", "columns") if key in values]:
            raise UserError(
                f"--set dataset.{later[0]}: of a dataset of TFDS data/NAME/params.yaml alone says it. Add the dataset "
                "without it, write it there under `dataset`, and prepare it again: stratagem prepare --set "
                "dataset.name=NAME"
            )
        wanted, _, version = source.partition(":")
        if not version[:1].isdigit():  # A version of TFDS begins with a digit, a builder of the user's own does not.
            wanted, version = source, ""
        values = {"name": wanted, **({"version": version} if version else {}), **values}
        return config.load(None, {f"dataset.{key}": value for key, value in values.items()}), []
    path = Path(os.path.realpath(source))
    if not path.exists():
        raise UserError(f"SOURCE = '{source}': no such file or folder. Give one that is there")
    place = path.relative_to(root) if path.is_relative_to(root) else path
    name = dataset_folder.check_name(path.stem if name is None else name, asked=name is not None)
    described: config.LocalDescription = config.describe(
        {"kind": kind, "name": name, "source": place.as_posix(), **values}, "data add"
    )
    if not described.is_guessed:
        return described, []
    from tasks.data import kinds  # NumPy, which no other command needs.

    guessed: tuple[config.LocalDescription, list[str]] = kinds.find_kind(kind).guess(described)
    return guessed


def _bring_up_to_date(
    name: str, made: list[Path], root: Path, stage: str = "prepare", force: bool = False, downloads: Path | None = None
) -> PreparedDataset | None:
    """Let DVC make what is not up to date; remove ``made``, the files of a new dataset, if nothing was fetched."""
    folder = root / "data" / name
    try:
        prepared_data.set_foreign_aside(name)
        if (source := dataset_folder.missing_source(name, root)) is not None:
            return _without_source(name, source, force)
        dataset_folder.note_reader(folder)
        if not force and data_state.is_known(root, name):
            return load_prepared(name) if stage == "prepare" else None
        for source in dataset_folder.sources_of(name, root):
            source_files.refuse_unreadable(source, root)
        with data_state.remembered(root, name) if stage == "prepare" else contextlib.nullcontext():
            environment = {"STRATAGEM_DOWNLOADS": str(downloads.absolute())} if downloads is not None else {}
            dvc.let("repro", [f"data/{name}/dvc.yaml:{stage}"], root, ["--force"] if force else [], environment)
    except BaseException:
        # Fetched data stay for the next try.
        if made and not (folder / "raw").exists():
            dataset_folder.take_away(made)
        raise
    if made:
        print(f"added data/{name}: put it under version control with `git add data/{name}`", file=sys.stderr)
    return load_prepared(name) if stage == "prepare" else None


def _without_source(name: str, source: str, force: bool) -> PreparedDataset:
    """Return the prepared data of a source that is not here, such as data that `dvc pull` fetched.

    Raises:
        UserError: the prepared data are missing, too, or damaged.
    """
    if force or lineage.data_version(name) is None or not (config.project_root() / "data" / name / "prepared").exists():
        raise UserError(
            f"dataset.source = '{source}' is not here, and neither is what was prepared of it: bring it back, say in "
            f"data/{name}/params.yaml where it is, or fetch the prepared data: dvc pull data/{name}/dvc.yaml"
        )
    folder = config.project_root() / "data" / name
    if different := dataset_folder.changed_since_prepared(folder):
        raise UserError(
            f"dataset.{different}: data/{name}/params.yaml says another value than `prepared` was made with, and the "
            f"source '{source}' is not here to make it again: bring the source back, or undo the change"
        )
    prepared = load_prepared(name)
    prepared_data.verify(prepared)
    print(f"data/{name}: its source '{source}' is not here; what was prepared of it is used", file=sys.stderr)
    return prepared


def _missing_locks(name: str, root: Path) -> list[Path]:
    """Return the lock files that a first preparation would leave in data/<name>."""
    locks = [root / "data" / name / lock for lock in (".download.lock", ".prepare.lock")]
    return [lock for lock in locks if not lock.exists()]


def load_prepared(name: str) -> PreparedDataset:
    """Return the record of a prepared dataset, with its data version.

    Raises:
        UserError: it is not prepared, or its manifest cannot be read.
    """
    path = config.project_root() / "data" / name / "prepared" / "manifest.json"
    if not path.exists():
        pull = f", or fetch what was pushed: `stratagem data pull {name}`" if lineage.data_version(name) else ""
        raise UserError(f"dataset {name} is not prepared: `stratagem prepare --set dataset.name={name}`{pull}")
    try:
        prepared = records.load(PreparedDataset, path)
    except UserError as error:
        raise UserError(f"{error}. {prepared_data.remedy(name)}") from None
    return prepared.model_copy(update={"data_version": lineage.data_version(name)})


def load_up_to_date(name: str) -> PreparedDataset | None:
    """Return the record of a prepared dataset; None where a run would prepare it first. Nothing is made."""
    root = config.project_root()
    try:
        prepared = load_prepared(name)
    except UserError:  # Missing or damaged; a run makes it again.
        return None
    if dataset_folder.missing_source(name, root) is not None:  # As where `data pull` has brought the data.
        different = prepared.data_version is None or dataset_folder.changed_since_prepared(root / "data" / name)
        return None if different else prepared
    if not dataset_folder.is_reader_noted(root / "data" / name):
        return None
    same = data_state.is_known(root, name) or dvc.is_up_to_date(f"data/{name}/dvc.yaml:prepare", root)
    return prepared if same else None


def choose_settings(
    recipe: str | None, overrides: Sequence[str] | Mapping[str, Any], prepared: PreparedDataset
) -> config.Settings:
    """Return the settings to train on prepared data with; say what is chosen for these, and why.

    Args:
        recipe: as ``config.load`` takes it.
        overrides: as ``config.load`` takes them.
        prepared: the data of this run, after all that has changed was prepared.
    """
    settings = config.load(recipe, overrides, prepared=prepared)
    tell_choices(recipe, settings, prepared)
    return settings


def load(recipe: str | None, overrides: Sequence[str]) -> tuple[config.Settings, PreparedDataset]:
    """Return the settings to train with on data that are prepared already, and these; see ``choose_settings``."""
    prepared = load_prepared(config.load(recipe, overrides).dataset.name)
    return choose_settings(recipe, overrides, prepared), prepared


def settle(recipe: str | None, overrides: Sequence[str]) -> config.Settings:
    """Return the settings to train with on data as they are now, for what another machine does later.

    Raises:
        UserError: they are chosen for data which a run would prepare first.
    """
    asked = config.load(recipe, overrides)
    if not config.follows_data(recipe, asked):
        return asked
    name = asked.dataset.name
    if (prepared := load_up_to_date(name)) is None:
        raise UserError(
            f"dataset.name = '{name}': model, batch size, epochs and what else no recipe says are chosen for its data, "
            "and these are not prepared, or have changed since. First `stratagem prepare --set dataset.name="
            f"{name}`, or give a recipe"
        )
    return choose_settings(recipe, overrides, prepared)


def tell_choices(recipe: str | None, settings: config.Settings, prepared: PreparedDataset) -> None:
    """Print what is chosen for prepared data, and why; and which of it was given otherwise."""
    for choice in config.choices(recipe, settings, prepared):
        given = ", ".join(config.overruled(choice, settings))
        but = f" (but for what was given: {given})" if given else ""
        print(f"chosen for {prepared.name}: {choice.reason}{but}", file=sys.stderr)


def check_source(dataset: config.Dataset) -> None:
    """Refuse a dataset that is neither here nor can be fetched, before a run starts anything.

    Raises:
        UserError: no such dataset, or no network.
    """
    with _hinting_at_own_data():
        _ask_tfds(dataset)


@contextlib.contextmanager
def _hinting_at_own_data() -> Iterator[None]:
    """If TFDS has no such dataset, also say how to add the user's own data."""
    try:
        yield
    except UserError as error:
        if not str(error).startswith("unknown dataset "):
            raise
        names = dataset_folder.names(config.project_root())
        known = f"; or one of data/ ({listed(names)})" if names else ""
        raise UserError(f"{error}{known}. `stratagem data add SOURCE` puts data of your own into data/") from None


def _ask_tfds(dataset: config.Dataset) -> None:
    """Refuse a dataset that is neither in data/ nor in TFDS.

    Raises:
        UserError: no such dataset, or no network.
    """
    root = config.project_root()
    fetched = root / "data" / dataset.name / "raw" / "manifest.json"
    if dataset_folder.is_local(dataset.name, root):
        return
    if config.split_folder_name(dataset.name)[0] in config.names_of("data/builders") or fetched.exists():
        return
    values = dataset.model_dump(mode="json", exclude={"image_size"})
    settings = [part for key, value in values.items() for part in ("--set", f"dataset.{key}={json.dumps(value)}")]
    run_stage("check", *settings)
