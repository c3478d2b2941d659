"""Where a trained model lies that somebody names: in the project's registry, in a run's folder, or as a .keras file.

Nothing heavy is imported, so that a wrong name is refused before a framework is.
"""

import hashlib
import json
import os
import re
import sqlite3
import zipfile
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from tasks import config, records, runs
from tasks.data import prepared_data
from tasks.records import ExportedModel, ModelVersion, PreparedDataset, Run, Target, TrainingResult
from tasks.runs import lineage, relocation
from tasks.system import errors, files, machine
from tasks.system.errors import UserError

ADDRESS = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")
SHOWN = 5
TARGET, ENCODING = "target.json", "encoding.json"
"""Beside a model's file: what its outputs stand for, and what makes its input of raw values."""
ENCODER = Path(prepared_data.__file__).with_name("encoding")
"""The encoder's package, found without importing it, because that imports NumPy."""
# MLflow's own tables, read here because MLflow itself takes seconds to import. A test compares what is read with what
# MLflow says; where the tables are others by now, SQLite raises an error, and MLflow is asked.
VERSIONS = """
SELECT v.name, v.version, coalesce(t.value, v.run_id)
FROM model_versions v LEFT JOIN tags t ON t.run_uuid = v.run_id AND t.key = 'local_run_id'
WHERE v.current_stage IS NOT 'Deleted_Internal'
"""
ALIASES = "SELECT name, version, alias FROM registered_model_aliases ORDER BY alias"
TAGS = "SELECT name, version, key, value FROM model_version_tags"
PLACE = "SELECT coalesce(storage_location, source) FROM model_versions WHERE name = ? AND version = ?"


@dataclass(frozen=True)
class TrainedModel:
    """A model that was trained, with what makes its input of raw values."""

    name: str
    """As a person calls it: NAME/VERSION, run ID, or a file."""
    keras_file: Path
    sha256: str | None
    """That its file must have; None of a file that nobody keeps account of."""
    encoding: dict[str, Any] | None
    """What ``encoding.Encoder`` takes; None where the model takes arrays alone."""
    target: Target | None
    """What its outputs stand for; None where nobody knows."""
    module: str | None = None
    """The user's own, which registers its classes."""
    code: Path | None = None
    """The folder where that lies."""

    def check(self) -> None:
        """Refuse a file that is gone, damaged or unpacks to more than the memory has, before Keras opens it.

        Raises:
            UserError: names the file.
        """
        try:
            digest = files.digest(self.keras_file)
        except OSError as error:
            raise UserError(f"{self.name}: {self.keras_file} cannot be read ({error.strerror})") from None
        if self.sha256 not in (None, digest):
            raise UserError(
                f"{self.name}: {self.keras_file} is damaged or was changed, its sha256 is {digest} and must be "
                f"{self.sha256}. Restore it, or name another model"
            )
        check_unpacked(self.name, self.keras_file)


def check_unpacked(what: str, path: Path) -> None:
    """Refuse an archive that unpacks to more than the memory has: of one kilobyte it may hold a gigabyte. Whoever reads
    it takes no more than it says, and judges what is not an archive.

    Args:
        what: names the file, for the message.
        path: of the file.

    Raises:
        UserError: says how much it is.
    """
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        size, free = sum(one.file_size for one in archive.infolist()), machine.free_memory()
        if size > free:
            raise UserError(f"{what}: {path} unpacks to {size:,} bytes, and {free:,} of the memory are free")


def write_meaning(folder: Path, prepared: PreparedDataset) -> None:
    """Write what a model's outputs stand for, and what makes its input of raw values, where something does."""
    (folder / TARGET).write_text(prepared.target.model_dump_json(indent=2), encoding="utf-8")
    if (raw := prepared_data.encoder_config(prepared)) is not None:
        (folder / ENCODING).write_text(json.dumps(raw), encoding="utf-8")


def copy_encoder(folder: Path) -> str:
    """Copy the package that makes a model's input of raw values, and return what it is called there: by its content,
    because a process that loads two models must not take one's code for the other's."""
    sources = {path.name: path.read_bytes() for path in sorted(ENCODER.glob("*.py"))}
    name = f"encoding_{hashlib.sha256(b''.join(sources.values())).hexdigest()[:12]}"
    (folder / name).mkdir()
    for file, source in sources.items():
        (folder / name / file).write_bytes(source)
    return name


def find_trained_model(reference: str) -> TrainedModel | None:
    """Return the model that a person names; None where only MLflow can tell (``models.fetch_model``).

    Args:
        reference: ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``, a run as ``runs.resolve`` takes it, or the path
            of a .keras file.

    Raises:
        UserError: there is none, or its file is damaged.
    """
    if reference.startswith("models:"):
        version = find_version(reference)
        return None if version is None else of_version(version)
    path = Path(os.path.expanduser(reference))
    found = _of_file(path) if path.suffix == ".keras" else of_run(runs.resolve(reference))
    found.check()
    return found


def name_of(settings: config.Settings, dataset: str) -> str:
    """Return the name of the registered model that a run's becomes a version of."""
    return settings.register_.model_name or f"{dataset}-{settings.model.name.replace(':', '.')}"


def own_versions() -> list[ModelVersion] | None:
    """Return all versions in the project's own registry; None where MLflow must be asked."""
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        with suppress(sqlite3.Error):  # Then MLflow itself may know what that is.
            return read_versions(relocation.own_store())
    return None


def read_versions(store: Path) -> list[ModelVersion]:
    """Return all versions of all registered models in a store, by name and number; nothing is written.

    Args:
        store: an SQLite file of MLflow's; one that is not there has none.

    Raises:
        sqlite3.Error: it is no such file, or of another layout.
    """
    if not store.exists():
        return []
    aliases: dict[tuple[str, int], list[str]] = {}
    for name, version, alias in _rows(store, ALIASES):
        aliases.setdefault((name, version), []).append(alias)
    tags: dict[tuple[str, int], dict[str, str]] = {}
    for name, version, key, value in _rows(store, TAGS):
        tags.setdefault((name, version), {})[key] = value
    return [
        ModelVersion(
            name=name,
            version=str(version),
            aliases=tuple(aliases.get((name, version), ())),
            run_id=run_id or None,
            tags=tags.get((name, version), {}),
        )
        for name, version, run_id in sorted(_rows(store, VERSIONS))
    ]


def _rows(store: Path, query: str, *values: object) -> list[Any]:
    """Return what a query finds in an SQLite file, which is only read."""
    with closing(sqlite3.connect(f"{store.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
        return connection.execute(query, values).fetchall()


def check_registered(name: str) -> None:
    """Refuse a name that the project's own registry does not know; where MLflow must be asked, nothing is refused.

    Raises:
        UserError: there is no such model.
    """
    known = own_versions()
    if known is None:
        return
    names = {one.name for one in known}
    if name not in names:
        raise UserError(errors.one_of("registered model", name, names, None if names else "there is none"))


def only_champion() -> str:
    """Return the address of the champion, where one registered model alone has one.

    Raises:
        UserError: none has, or several have: then it names them.
    """
    versions = own_versions()
    if versions is None:
        raise UserError("a model is to be named where MLFLOW_TRACKING_URI says which registry: models:/NAME@champion")
    names = sorted({one.name for one in versions if config.CHAMPION in one.aliases})
    if len(names) == 1:
        return f"models:/{names[0]}@{config.CHAMPION}"
    others = "a run (`stratagem runs`), `latest`, or a file FILE.keras"
    if not names:
        raise UserError(f"no registered model is @{config.CHAMPION}: train one with `stratagem run`, or name {others}")
    raise UserError(
        f"{len(names)} registered models have a @{config.CHAMPION}: name one of "
        f"{errors.listed([f'models:/{name}@{config.CHAMPION}' for name in names])}; or {others}"
    )


def find_version(address: str) -> ModelVersion | None:
    """Return the version at an address in the project's own registry; None where MLflow must be asked.

    Raises:
        UserError: it is written otherwise, or there is none.
    """
    named = ADDRESS.fullmatch(address)
    if named is None:
        raise UserError(
            f"'{errors.cut(address)}' names no model: write it as models:/NAME@ALIAS or models:/NAME/VERSION"
        )
    versions = own_versions()
    if versions is None:
        return None
    name, alias, number = named["name"], named["alias"], named["version"]
    for one in versions:
        if one.name == name and (alias in one.aliases if alias else one.version == str(int(number))):
            return one
    there = [f"models:/{one.name}/{one.version}" for one in versions]
    there += [f"models:/{one.name}@{other}" for one in versions for other in one.aliases]
    see = f"there are: {errors.listed(sorted(there), SHOWN)}" if there else "there is none yet: `stratagem run`"
    raise UserError(errors.one_of("model", address, there, see))


def of_version(version: ModelVersion) -> TrainedModel:
    """Return a version of the project's own registry, verified.

    Raises:
        UserError: its files are gone or damaged, or another program registered it.
    """
    place = _place_of(version)
    folder = Path(unquote(urlsplit(place).path))
    if place.startswith("file:") and not folder.exists():
        relocation.mend()  # The project was moved: the store names the old place.
        place = _place_of(version)
        folder = Path(unquote(urlsplit(place).path))
    return of_folder(folder, f"{version.name}/{version.version}", version.tags)


def _place_of(version: ModelVersion) -> str:
    """Return where the files of a version lie, as MLflow addresses them."""
    ((found,),) = _rows(relocation.own_store(), PLACE, version.name, int(version.version))
    return str(found)


def of_folder(folder: Path, name: str, tags: dict[str, str]) -> TrainedModel:
    """Return the model in a folder of MLflow's, as ``models.log_model`` wrote it, verified.

    Args:
        folder: where its files lie.
        name: NAME/VERSION.
        tags: of the version.

    Raises:
        UserError: its files are gone or damaged, or another program registered it.
    """
    if "keras_file_sha256" not in tags:
        raise UserError(f"{name} was not registered by stratagem: it does not say which file it is")
    module, colon, _ = tags.get("model", "").partition(":")
    found = TrainedModel(
        name=name,
        keras_file=folder / "data" / "model.keras",
        sha256=tags["keras_file_sha256"],
        encoding=_read(folder / "data" / ENCODING),
        target=_read_target(folder / "data" / TARGET),
        module=module if colon else None,
        code=folder / "code" if colon else None,
    )
    found.check()
    return found


def _read_target(path: Path) -> Target | None:
    found = _read(path)
    try:
        return None if found is None else Target.model_validate(found)
    except ValidationError as error:
        raise UserError(
            f"{path} is not a readable Target ({str(error).splitlines()[0]}): restore it, or name another model"
        ) from None


def _read(path: Path) -> Any:
    """Return what a JSON file holds; None where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore it, or name another model") from None


def of_run(run: Run) -> TrainedModel:
    """Return the model of a run: the one that was evaluated, or the final one.

    Raises:
        UserError: it was not trained to its end, or was pruned; or its data are another version by now.
    """
    runs.refuse_pruned(run)
    training = runs.load_training(run)
    best = False
    with suppress(UserError):
        best = runs.load_evaluation(run).checkpoint == training.best_checkpoint != training.checkpoint
    return _of_training(run, training, config.project_root() / (training.best_model if best else training.final_model))


def _of_training(run: Run, training: TrainingResult, keras_file: Path) -> TrainedModel:
    root = config.project_root()
    folder = root / "data" / training.dataset / "prepared" / "manifest.json"
    what = f"the data of run {run.run_id}, data/{training.dataset},"
    other = "Name the model in the registry, models:/NAME/VERSION, which brings what it needs"
    if not folder.exists():
        raise UserError(f"{what} are not prepared here: `stratagem prepare` makes them. {other}")
    if lineage.data_version(training.dataset) != run.lineage.data_version:
        raise UserError(f"{what} are another version by now: words and categories may have other numbers. {other}")
    prepared, module = records.load(PreparedDataset, folder), _own_module(run)
    return TrainedModel(
        name=f"run {run.run_id}",
        keras_file=keras_file,
        sha256=None,
        encoding=prepared_data.encoder_config(prepared),
        target=prepared.target,
        module=module,
        code=root if module else None,
    )


def _own_module(run: Run) -> str | None:
    """Return the user's own module that a run's model is of."""
    module, colon, _ = str(run.settings["model"]["name"]).partition(":")
    return module if colon else None


def _of_file(path: Path) -> TrainedModel:
    """Return the model of a .keras file: of a run's folder, of an export, or of anywhere."""
    if not os.path.isfile(path):  # Nor is one whose name no file can have.
        raise UserError(f"model '{errors.cut(str(path))}': no such file")
    path = path.resolve()
    exported = path.with_name("export.json")
    if exported.is_file():
        return _of_export(path, records.load(ExportedModel, exported))
    run_id = None
    with suppress(ValueError):
        parts = path.relative_to(config.project_root().resolve()).parts
        run_id = parts[2] if parts[:2] == ("mlruns", "runs") and len(parts) > 3 else None
    run = runs.look_up(run_id) if run_id is not None else None
    if run is None:
        return TrainedModel(str(path), path, None, None, None)
    return _of_training(run, runs.load_training(run), path)


def _of_export(path: Path, made: ExportedModel) -> TrainedModel:
    """Return the model of a file of an export, which brings what it needs, wherever it was copied to."""
    run, sha256 = runs.look_up(made.run_id), made.files.get(path.name)
    brought = {name: path.with_name(name) for name in (TARGET, ENCODING) if name in made.files}
    for name, file in brought.items():
        TrainedModel(str(path), file, made.files[name], None, None).check()
    module = None if run is None else _own_module(run)
    return TrainedModel(
        name=str(path),
        keras_file=path,
        sha256=sha256,
        encoding=_read(brought[ENCODING]) if ENCODING in brought else None,
        target=_read_target(brought[TARGET]) if TARGET in brought else None,
        module=module,
        code=config.project_root() if module else None,
    )
