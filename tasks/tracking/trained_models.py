"""Finds and verifies the files of a trained model: in a run's folder, in an MLflow model folder, or as a .keras file.

Imports nothing heavy, so that a wrong name is refused before a framework is imported.
"""

import hashlib
import json
import os
import re
import shutil
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import config, records
from tasks.data import prepared_data
from tasks.modeling import own_code
from tasks.records import ExportedModel, PreparedDataset, Run, Target
from tasks.runs import entries, outcome
from tasks.system import errors, files, machine, units
from tasks.system.errors import UserError

TARGET, ENCODING = "target.json", "encoding.json"
"""Files next to a model's file: the meaning of its outputs, and the encoding of raw values as its input."""
MANIFEST, EXPORT_MANIFEST = "manifest.json", "export.json"
"""Files in the folder of a model with the sha256 of each of its files, under `files`."""
CODE = "code"
"""The subfolder for a model's user-defined code."""
ADDRESS = re.compile(r"models:/(?P<name>[^/@]+)(@(?P<alias>[^/@]+)|/(?P<version>\d+))")
"""The address of a registered model."""
ENCODER = Path(prepared_data.__file__).with_name("encoding")
"""The encoder's package, found without importing it, because that imports NumPy."""


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, with the encoding of its input."""

    name: str
    """The name in messages: NAME/VERSION, run ID, or a file."""
    keras_file: Path
    encoding: dict[str, Any] | None
    """As ``prepared_data.encoder_config`` returns it; None if the model only takes arrays."""
    target: Target | None
    """The meaning of its outputs; None if unknown."""
    module: str | None = None
    """The user's module that registers the model's classes."""
    code: Path | None = None
    """The folder with that module."""

    @property
    def places(self) -> dict[str, str | None]:
        """The paths and the module for loading the model, as JSON values."""
        code = str(self.code) if self.code is not None else None
        return {"keras_file": str(self.keras_file), "module": self.module, "code": code}


def check_unpacked(what: str, path: Path) -> None:
    """Refuse an archive that unpacks to more than the free memory: one kilobyte can unpack to a gigabyte. Ignores files
    that are not archives.

    Args:
        what: the name of the file in the message.
        path: the path of the file.

    Raises:
        UserError: names the unpacked size.
    """
    with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
        wanted, free = sum(one.file_size for one in archive.infolist()), machine.free_memory()
        if wanted > free:
            needs = f"{what}: {path} unpacks to {units.size(wanted)}"
            raise UserError(f"{needs}, but only {units.size(free)} of memory are free")


def complete(folder: Path, prepared: PreparedDataset, model_name: str) -> None:
    """Write the files that accompany the .keras files of a folder: the meaning of the outputs, the encoding of the
    input, the user-defined code, and the manifest."""
    (folder / TARGET).write_text(prepared.target.model_dump_json(indent=2), encoding="utf-8")
    if (raw := prepared_data.encoder_config(prepared)) is not None:
        (folder / ENCODING).write_text(json.dumps(raw), encoding="utf-8")
    shutil.rmtree(folder / CODE, ignore_errors=True)
    for file in own_code.files(model_name):
        (folder / CODE / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(config.project_root() / file, folder / CODE / file)
    write_manifest(folder)


def copy_meaning(keras_file: Path, folder: Path) -> None:
    """Copy the meaning of a model's outputs and the encoding of its input, if they exist."""
    for name in (TARGET, ENCODING):
        if (source := keras_file.with_name(name)).exists():
            shutil.copyfile(source, folder / name)


def write_manifest(folder: Path) -> None:
    """Write the sha256 of each file of a model into its folder."""
    with files.replacing(folder / MANIFEST) as temporary:
        temporary.write_text(json.dumps({"files": digests(folder)}, indent=2), encoding="utf-8")


def digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file below a folder, except its manifest, hidden files and Python's bytecode caches."""
    left_out = [folder / MANIFEST, folder / EXPORT_MANIFEST, *folder.rglob(".*"), *folder.rglob("__pycache__/*")]
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path not in left_out)
    return {path.relative_to(folder).as_posix(): files.digest(path) for path in paths}


def verify(name: str, keras_file: Path, manifest: Path) -> None:
    """Compare the files of a model with its manifest before anything opens them, without the other models in the same
    folder.

    Args:
        name: the model's name in messages.
        keras_file: the model's file.
        manifest: the manifest that lists the model's files.

    Raises:
        UserError: names the file that is missing, damaged or changed, or that needs more than the free memory.
    """
    remedy = "Restore it from a backup, or name another model"
    try:
        expected = dict(json.loads(manifest.read_text(encoding="utf-8"))["files"])
        expected = {manifest.parent / one: sha256 for one, sha256 in expected.items()}
    except FileNotFoundError:
        raise UserError(f"{name}: {manifest} is missing, which lists the model's files. {remedy}") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{name}: {manifest} cannot be read ({error}). {remedy}") from None
    for path in {keras_file: None} | expected:
        if path.suffix == ".keras" and path != keras_file:
            continue
        try:
            digest = files.digest(path)
        except OSError as error:
            raise UserError(f"{name}: {path} cannot be read ({error.strerror}). {remedy}") from None
        if digest != expected.get(path):
            raise UserError(
                f"{name}: {path} is damaged or was changed: its sha256 is {digest} instead of {expected.get(path)}. "
                f"{remedy}"
            )
    check_unpacked(name, keras_file)


def copy_encoder(folder: Path) -> str:
    """Copy the encoder's package, and return its new name. The name contains a digest of the content, so that a process
    that loads two models does not mix up their code."""
    sources = {path.name: path.read_bytes() for path in sorted(ENCODER.glob("*.py"))}
    name = f"encoding_{hashlib.sha256(b''.join(sources.values())).hexdigest()[:12]}"
    (folder / name).mkdir()
    for file, source in sources.items():
        (folder / name / file).write_bytes(source)
    return name


def find_trained_model(reference: str) -> TrainedModel:
    """Return the verified model of a run or a file. ``models.fetch_model`` returns a registered model.

    Args:
        reference: a run, see ``entries.resolve``, or the path of a .keras file.

    Raises:
        UserError: the model does not exist, or its file is damaged.
    """
    path = Path(os.path.expanduser(reference))
    return _of_file(path) if path.suffix == ".keras" else of_run(entries.resolve(reference))


def is_registered(reference: str | None) -> bool:
    """Return whether a user's reference names a registered model: ``models:/NAME@ALIAS``, ``models:/NAME/VERSION``, or
    None for the only champion."""
    return reference is None or reference.startswith("models:")


def parse_address(text: str) -> re.Match[str]:
    """Return the parts of the address of a registered model.

    Raises:
        UserError: it is not one.
    """
    if (found := ADDRESS.fullmatch(text)) is None:
        shape = "write models:/NAME@ALIAS or models:/NAME/VERSION"
        raise UserError(f"'{errors.cut(text)}' is not the address of a model: {shape}")
    return found


def check_reference(reference: str | None) -> None:
    """Refuse a run or a file that does not exist, before a framework or MLflow is imported.

    Raises:
        UserError: see ``find_trained_model``.
    """
    if not is_registered(reference):
        find_trained_model(str(reference))


def name_of(settings: config.Settings, dataset: str) -> str:
    """Return the name of the registered model for the models of these settings."""
    return settings.register_.model_name or f"{dataset}-{settings.model.name.replace(':', '.')}"


def read_model(name: str, keras_file: Path, manifest: Path, model_name: str, code: Path) -> TrainedModel:
    """Return a model after ``verify``. If its code does not contain the user's module, that module is installed."""
    verify(name, keras_file, manifest)
    beside = [keras_file.with_name(file) for file in (TARGET, ENCODING)]
    target, encoding = (json.loads(path.read_text(encoding="utf-8")) if path.exists() else None for path in beside)
    module, colon, _ = model_name.partition(":")
    return TrainedModel(
        name=name,
        keras_file=keras_file,
        encoding=encoding,
        target=None if target is None else Target.model_validate(target),
        module=module if colon else None,
        code=(code if code.is_dir() else config.project_root()) if colon else None,
    )


def of_run(run: Run) -> TrainedModel:
    """Return the verified model of a run: the evaluated model, or the final one.

    Raises:
        UserError: the training has not finished, the run was pruned, or its files are missing or damaged.
    """
    outcome.refuse_pruned(run)
    training = outcome.load_training(run)
    best = False
    with suppress(UserError):
        best = outcome.load_evaluation(run).checkpoint == training.best_checkpoint != training.checkpoint
    file = config.project_root() / (training.best_model if best else training.final_model)
    return _of_run(run, f"run {run.run_id}", file)


def _of_run(run: Run, name: str, keras_file: Path) -> TrainedModel:
    manifest, code = keras_file.with_name(MANIFEST), keras_file.with_name(CODE)
    return read_model(name, keras_file, manifest, run.model, code)


def _of_file(path: Path) -> TrainedModel:
    """Return the model of a .keras file in a run's folder, an export or any other folder."""
    if not os.path.isfile(path):  # Also False for an invalid name.
        raise UserError(f"model '{errors.cut(str(path))}': no such file")
    path = path.resolve()
    exported = path.with_name(EXPORT_MANIFEST)
    if exported.is_file():
        run = entries.look_up(records.load(ExportedModel, exported).run_id)
        model_name = "" if run is None else run.model
        return read_model(str(path), path, exported, model_name, config.project_root())
    run_id = None
    with suppress(ValueError):
        parts = path.relative_to(config.project_root().resolve()).parts
        run_id = parts[2] if parts[:2] == ("mlruns", "runs") and len(parts) > 3 else None
    run = entries.look_up(run_id) if run_id is not None else None
    if run is not None:
        return _of_run(run, str(path), path)
    if path.with_name(TARGET).exists():
        raise UserError(f"{path} belongs to an export whose {EXPORT_MANIFEST} is missing: copy the whole folder")
    check_unpacked(str(path), path)
    return TrainedModel(str(path), path, None, None)
