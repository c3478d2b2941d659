"""download: creates a TFDS dataset in data/<name>/raw from archives whose hashes it verifies before use."""

import contextlib
import io
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import requests
import tensorflow_datasets as tfds

from tasks import config, records
from tasks.data import builders, dataset_folder
from tasks.modeling import own_code
from tasks.records import DatasetManifest, SourceFile, load_or_none
from tasks.system import errors, files, upstream
from tasks.system.errors import UserError, listed

checksums, resource, tree, NonMatchingChecksumError = upstream.archive_modules()
upstream.serialize_the_same_everywhere()


def download(dataset: config.Dataset) -> DatasetManifest:
    """Download, verify and prepare a TFDS dataset in data/<name>/raw, unless this is already done.

    An archive comes from ``dataset.downloads``, else from TFDS' cache in raw/downloads, else from its URL; it must have
    the size and sha256 that TFDS registers. Return the manifest, which is also in raw/manifest.json: written last, and
    equal on all machines.

    Raises:
        UserError: unknown dataset, damaged archive, no network, or a folder that cannot be written.
        DownloadError: a download was interrupted; another attempt may succeed.
    """
    root = config.project_root()
    folder = root / "data" / dataset.name
    raw = folder / "raw"
    import tensorflow as tf  # Here, because `refuse_early` does not need it.

    # Before any write, so that a wrong name or version leaves no files.
    builders.build(dataset.name, dataset.version, raw, dataset.builder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (manifest := _complete(dataset, raw)) is None:
            manifest = _describe(dataset, _make(dataset, folder), raw)
            records.save(manifest, raw / "manifest.json")
        return manifest
    except NonMatchingChecksumError as error:
        raise UserError(f"dataset {dataset.name}: {' '.join(str(error).split())}") from None
    except (requests.RequestException, tfds.download.DownloadError) as error:
        raise errors.DownloadError(
            f"dataset {dataset.name}: the download was interrupted ({error}). Run it again"
        ) from None
    except tf.errors.ResourceExhaustedError:  # TensorFlow's error for a full disk.
        raise files.full_disk_error(folder.relative_to(root)) from None
    except ImportError as error:
        raise UserError(f"dataset {dataset.name} needs a package that is not installed: {error}") from None
    except Exception as error:
        said = own_code.described(error)  # With a place in the user's code, if the error comes from there.
        is_theirs = dataset.builder is not None and not isinstance(error, errors.StratagemError)
        if is_theirs and (said != errors.one_line(error) or not isinstance(error, OSError)):
            raise UserError(f"dataset.name = '{dataset.builder}': fails ({said})") from error
        if isinstance(error, OSError):
            raise files.unwritable(folder.relative_to(root), error) from None
        raise


def refuse_early(dataset: config.Dataset) -> None:
    """Refuse an unknown name or version as `download` does, but before TensorFlow is imported.

    Raises:
        UserError: unknown dataset.
    """
    builders.build(
        dataset.name, dataset.version, config.project_root() / "data" / dataset.name / "raw", dataset.builder
    )


def _complete(dataset: config.Dataset, raw: Path) -> DatasetManifest | None:
    """Return the manifest of a dataset if it is on disk, complete and in this version; else None."""
    manifest = load_or_none(DatasetManifest, raw / "manifest.json")
    if manifest is None:
        return None
    builder = builders.build(dataset.name, dataset.version, raw, dataset.builder)
    whole = manifest.version == str(builder.version) and builder.is_prepared() and not builders.damaged_shard(builder)
    return manifest if whole else None


def _make(dataset: config.Dataset, folder: Path) -> dict[str, Any]:
    """Let TFDS rebuild raw/<name> in a temporary folder; return the ``UrlInfo`` of each used archive, by URL."""
    raw = folder / "raw"
    downloads = raw / "downloads"
    root = config.project_root()
    files.remove_scratch(folder.glob(".scratch.*"), root)  # of killed runs
    for leftover in downloads.glob("**/*.tmp.*/"):  # as TFDS names a download in progress
        if files.is_inside(leftover, root):
            shutil.rmtree(leftover)
    tfds.display_progress_bar(sys.stderr.isatty())
    try:
        with (
            files.scratch(folder, ".scratch.") as scratch,
            contextlib.redirect_stdout(io.StringIO()),  # TFDS prints; standard output belongs to the command's result.
        ):
            builder = builders.build(dataset.name, dataset.version, scratch, dataset.builder)
            brought = _brought(dataset)
            if builder.MANUAL_DOWNLOAD_INSTRUCTIONS and (brought is None or not brought.is_dir()):
                raise UserError(
                    f"dataset {dataset.name}: TFDS cannot fetch its archives. Put them into FOLDER/{builder.name} and "
                    f"add --set dataset.downloads=FOLDER (now it is {dataset.downloads}). TFDS says: "
                    + " ".join(builder.MANUAL_DOWNLOAD_INSTRUCTIONS.split())
                )
            archives = _check_archives(builder, dataset, downloads)
            settings = tfds.download.DownloadConfig(
                # A new folder each time: Fashion-MNIST after MNIST in one extract_dir holds MNIST's images.
                extract_dir=scratch / "extracted",
                manual_dir=brought,  # TFDS checks the sha256 of the archives that it uses from there.
                try_download_gcs=False,
            )
            builder.download_and_prepare(download_dir=downloads, download_config=settings)
            (raw / "manifest.json").unlink(missing_ok=True)
            _make_room(raw / builder.name, folder)
            (scratch / builder.name).rename(raw / builder.name)
    finally:
        for empty in (downloads / config.split_folder_name(dataset.name)[0], downloads, raw):
            with contextlib.suppress(OSError):  # Not empty.
                empty.rmdir()
    return archives


def _make_room(made: Path, folder: Path) -> None:
    """Remove another or a damaged version of the TFDS dataset; move a folder with other files aside."""
    root = config.project_root()
    if not made.exists():
        return
    names = [path.name for path in made.rglob("*") if not path.is_dir()]
    if files.is_inside(made, root) and all(dataset_folder.MADE_BY_TFDS.fullmatch(name) for name in names):
        shutil.rmtree(made)
        return
    aside = files.set_aside(made, folder / "set_aside")
    print(
        f"{made.relative_to(root)} contained files that TFDS did not create: it is now {aside.relative_to(root)}",
        file=sys.stderr,
    )


def _check_archives(builder: Any, dataset: config.Dataset, downloads: Path) -> dict[str, Any]:
    """Hash each archive in TFDS' cache when the builder requests it, because TFDS does not verify cached files.

    Only the builder knows which archives it needs: some register more URLs than they use. The returned dict is filled
    as the builder requests archives.
    """
    registered = {**checksums.get_all_url_infos(), **(builder.url_infos or {})}
    used: dict[str, Any] = {}
    brought = _brought(dataset)

    def check(url_or_urls: Any) -> None:
        missing = {}
        for item in tree.flatten(url_or_urls):
            archive = item if isinstance(item, resource.Resource) else resource.Resource(url=item)
            if archive.url not in registered:
                raise UserError(
                    f"dataset {dataset.name}: no checksum is registered for {archive.url}, so damage would not "
                    "be detected. Register it next to the builder: tfds build --register_checksums"
                )
            used[archive.url] = expected = registered[archive.url]
            name = resource.get_dl_fname(archive.url, expected.checksum)
            cached = downloads / builder.name / archive.relative_download_dir / name
            if cached.exists() and (got := checksums.compute_url_info(cached)) != expected:
                difference = f"{int(got.size)} bytes, must be {int(expected.size)}"
                if got.size == expected.size:
                    difference = f"sha256 {got.checksum}, must be {expected.checksum}"
                aside = files.set_aside(cached, downloads.parents[1], f"{name}.bad")
                print(
                    f"damaged archive of {archive.url} ({difference}): it is now "
                    f"{aside.relative_to(config.project_root())}, and is downloaded again",
                    file=sys.stderr,
                )
            if not cached.exists() and not (brought and expected.filename and (brought / expected.filename).is_file()):
                missing[archive.url] = expected
        _require_server(missing, dataset)

    upstream.before_each_fetch(builder, check)
    return used


def _brought(dataset: config.Dataset) -> Path | None:
    """Return the folder of archives that the user provided, shared by all configurations, as in TFDS' cache."""
    if dataset.downloads is None:
        return None
    return config.project_root() / dataset.downloads / config.split_folder_name(dataset.name)[0]


def _require_server(missing: Mapping[str, Any], dataset: config.Dataset) -> None:
    """Raise at once if archives are missing and a server does not answer: TFDS would retry for 205 seconds."""
    for url in {urlparse(url).netloc: url for url in missing if url.startswith("http")}.values():
        if problem := _no_answer(url):
            folder = Path(dataset.downloads or "FOLDER")
            place = folder / config.split_folder_name(dataset.name)[0]
            wanted = [f"{url} as {place / archive.filename}" for url, archive in missing.items() if archive.filename]
            raise UserError(
                f"dataset {dataset.name}: missing archives ({len(missing)}), and {urlparse(url).netloc} cannot be "
                f"reached ({problem}). Connect to the network and run again; or use --set dataset.downloads={folder} "
                f"and put there {listed(wanted, 4)}"
            )


def _no_answer(url: str) -> str | None:
    """Return why a server does not answer, with the library and proxy settings of TFDS; None if it does."""
    try:
        with requests.get(url, stream=True, timeout=(3, 3)) as response:
            return f"HTTP status {response.status_code}" if response.status_code >= 400 else None
    except requests.ReadTimeout:
        return None  # The server exists, but is slow.
    except requests.RequestException as error:
        return type(error).__name__


def _describe(dataset: config.Dataset, archives: dict[str, Any], raw: Path) -> DatasetManifest:
    builder = builders.build(dataset.name, dataset.version, raw, dataset.builder)
    found = builders.supervised(builder)
    names = found.class_names
    return DatasetManifest(
        name=dataset.name,
        version=str(builder.version),
        tfds_version=tfds.__version__,
        folder=raw.relative_to(config.project_root()).as_posix(),
        image_shape=next(iter(found.given.values())).shape if found.is_of_images else None,
        num_classes=len(names),
        class_names=names,
        num_examples={name: split.num_examples for name, split in sorted(builder.info.splits.items())},
        sources=tuple(
            SourceFile(url=url, sha256=archive.checksum, num_bytes=int(archive.size))
            for url, archive in sorted(archives.items())
        ),
        licence=builder.info.redistribution_info.license or None,
    )
