"""download: a dataset's name -> a TFDS dataset in data/<name>/raw, made from archives that were hashed before use."""

import contextlib
import io
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import requests
import tensorflow_datasets as tfds
from filelock import FileLock

from tasks import config, records
from tasks.data import builders, dataset_folder
from tasks.records import DatasetManifest, SourceFile
from tasks.records.record import load_or_none
from tasks.system import errors, files, network, upstream
from tasks.system.errors import UserError

checksums, resource, tree, NonMatchingChecksumError = upstream.archive_modules()
upstream.serialize_the_same_everywhere()


def download(dataset: config.Dataset) -> DatasetManifest:
    """Download, verify and prepare a TFDS dataset in data/<name>/raw, or find that this is done.

    An archive comes from TFDS' cache in raw/downloads, else from ``dataset.downloads``, else from its URL; it must have
    the size and sha256 that TFDS registers. Two calls at once are safe: the second waits for the first.

    Returns:
        The manifest, which is also in raw/manifest.json: written last, and the same on every machine.

    Raises:
        UserError: unknown dataset, damaged archive, no network, or a folder that cannot be written.
        DownloadError: a download broke off; another try may succeed.
    """
    root = config.project_root()
    folder = root / "data" / dataset.name
    raw = folder / "raw"
    import tensorflow as tf  # Not above: what is refused early needs none of it.

    # Before anything is written: a wrong name or version leaves nothing behind.
    builders.build(dataset.name, dataset.version, raw, dataset.builder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".download.lock"):
            manifest = _complete(dataset, raw)
            if manifest is None:
                archives = _make(dataset, folder)
                manifest = _describe(dataset, archives, raw)
                records.save(manifest, raw / "manifest.json")
            return manifest
    except NonMatchingChecksumError as error:
        raise UserError(f"dataset {dataset.name}: {' '.join(str(error).split())}") from None
    except (requests.RequestException, tfds.download.DownloadError) as error:
        raise errors.DownloadError(f"dataset {dataset.name}: the download broke off ({error}). Run it again") from None
    except tf.errors.ResourceExhaustedError:  # As TensorFlow says that a disk is full.
        raise files.full_disk_error(folder.relative_to(root)) from None
    except ImportError as error:
        raise UserError(f"dataset {dataset.name} needs a package that is not installed: {error}") from None
    except OSError as error:
        raise files.unwritable(folder.relative_to(root), error) from None


def refuse_early(dataset: config.Dataset) -> None:
    """Refuse what `download` would refuse for its name or for want of a network, but before TensorFlow is imported.

    Raises:
        UserError: unknown dataset; or none of its archives is here and its server does not answer.
    """
    raw = config.project_root() / "data" / dataset.name / "raw"
    builder = builders.build(dataset.name, dataset.version, raw, dataset.builder)
    if builder.builder_config is not None:
        return  # TFDS registers the archives of all configurations together; `download` asks for those of this one.
    names = _names(builder.url_infos or {})
    here = (raw / "downloads" / builder.name).exists() or (raw / "manifest.json").exists()
    if not here and not any(_find_brought(own, dataset) for own in names.values()):
        _require_server(list(names), names, dataset)


def _complete(dataset: config.Dataset, raw: Path) -> DatasetManifest | None:
    """Return the manifest of a dataset that is on disk, whole and in this version; else None."""
    manifest = load_or_none(DatasetManifest, raw / "manifest.json")
    if manifest is None:
        return None
    builder = builders.build(dataset.name, dataset.version, raw, dataset.builder)
    whole = manifest.version == str(builder.version) and builder.is_prepared() and not builders.damaged_shard(builder)
    return manifest if whole else None


def _make(dataset: config.Dataset, folder: Path) -> dict[str, Any]:
    """Let TFDS make raw/<name> anew, beside it first; return the ``UrlInfo`` of every archive that it used, by URL."""
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
            archives = _check_archives(builder, dataset, downloads, scratch)
            settings = tfds.download.DownloadConfig(
                # A new folder each time: Fashion-MNIST after MNIST in one extract_dir holds MNIST's images.
                extract_dir=scratch / "extracted",
                manual_dir=_fetched_by_hand(builder, dataset),
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
    """Remove another version or a damaged one of what TFDS makes; a folder with other files in it is moved aside."""
    root = config.project_root()
    if not made.exists():
        return
    names = [path.name for path in made.rglob("*") if not path.is_dir()]
    if files.is_inside(made, root) and all(dataset_folder.MADE_BY_TFDS.fullmatch(name) for name in names):
        shutil.rmtree(made)
        return
    aside = files.set_aside(made, folder / "set_aside")
    print(
        f"{made.relative_to(root)} held what TFDS did not make: it now lies at {aside.relative_to(root)}",
        file=sys.stderr,
    )


def _fetched_by_hand(builder: Any, dataset: config.Dataset) -> Path | None:
    """Return TFDS' manual folder, for datasets whose archives stand behind a login."""
    if not builder.MANUAL_DOWNLOAD_INSTRUCTIONS:
        return None
    folder = _brought(dataset)
    if folder is None or not folder.is_dir():
        raise UserError(
            f"dataset {dataset.name}: TFDS cannot fetch its archives. Put them into FOLDER/{builder.name} and give "
            f"--set dataset.downloads=FOLDER (it is {dataset.downloads}). TFDS says: "
            + " ".join(builder.MANUAL_DOWNLOAD_INSTRUCTIONS.split())
        )
    return folder


def _check_archives(builder: Any, dataset: config.Dataset, downloads: Path, scratch: Path) -> dict[str, Any]:
    """Provide and hash each archive at the moment the builder asks for it, because TFDS trusts what lies in its cache.

    Only the builder knows what it needs: some register more URLs than they use. What is returned fills as it asks.
    """
    own = builder.url_infos or {}
    registered = {**checksums.get_all_url_infos(), **own}
    names = _names(own)
    used: dict[str, Any] = {}

    def provide(url_or_urls: Any) -> None:
        missing = []
        for item in tree.flatten(url_or_urls):
            archive = item if isinstance(item, resource.Resource) else resource.Resource(url=item)
            if archive.url not in registered:
                raise UserError(
                    f"dataset {dataset.name}: no checksum is registered for {archive.url}, so damage would go unseen. "
                    "Register it beside the builder: tfds build --register_checksums"
                )
            used[archive.url] = expected = registered[archive.url]
            name = resource.get_dl_fname(archive.url, expected.checksum)
            cached = downloads / builder.name / archive.relative_download_dir / name
            # TFDS also takes what lies where its older versions put it.
            for parent in (cached.parent, downloads):
                for file in (name, resource.get_dl_fname(archive.url)):
                    _set_aside_if_damaged(parent / file, archive.url, expected, scratch.parent)
            if archive.url not in names:
                names.update(_names({archive.url: expected}))
            if not cached.exists() and not _place(archive.url, names[archive.url], expected, cached, dataset, scratch):
                missing.append(archive.url)
            elif not resource.is_locally_cached(cached):
                original = expected.filename or _url_parts(archive.url)[-1]
                resource.write_info_file(archive.url, cached, builder.name, original, expected)
        _require_server(missing, names, dataset)

    upstream.before_each_fetch(builder, provide)
    return used


def _set_aside_if_damaged(path: Path, url: str, expected: Any, folder: Path) -> None:
    if not path.exists() or not (difference := _difference(path, expected)):
        return
    aside = files.set_aside(path, folder, f"{path.name}.bad")
    resource.get_info_path(path).unlink(missing_ok=True)
    root = config.project_root()
    raise UserError(
        f"{path.relative_to(root)}: damaged archive of {url} ({difference}). It now lies at {aside.relative_to(root)}; "
        "run again to fetch a whole one"
    )


def _place(url: str, names: list[str], expected: Any, cached: Path, dataset: config.Dataset, scratch: Path) -> bool:
    """Copy an archive that the user brought into TFDS' cache; False when there is none."""
    found = _find_brought(names, dataset)
    if found is None:
        return False
    copy = scratch / cached.name
    shutil.copyfile(found, copy)
    if difference := _difference(copy, expected):
        raise UserError(f"{found}: damaged archive of {url} ({difference}). Fetch it again")
    cached.parent.mkdir(parents=True, exist_ok=True)
    copy.replace(cached)
    return True


def _find_brought(names: list[str], dataset: config.Dataset) -> Path | None:
    """Return the archive that the user brought under one of its names, or None."""
    if (folder := _brought(dataset)) is None:
        return None
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _brought(dataset: config.Dataset) -> Path | None:
    """Return the folder of archives that the user brought: that of all configurations, as in TFDS' own cache."""
    if dataset.downloads is None:
        return None
    return config.project_root() / dataset.downloads / config.split_folder_name(dataset.name)[0]


def _names(registered: dict[str, Any]) -> dict[str, list[str]]:
    """Return by URL the names that its archive may be brought under, the shortest first; no name is two archives'.

    Three archives of cmaterdb end in `testing-images.npz`, in `bangla-numerals/`, `devanagari-numerals/` and so on.
    """
    possible: dict[str, list[str]] = {}
    checksums_of: dict[str, set[str]] = {}
    for url, expected in registered.items():
        parts = _url_parts(url)
        own = resource.get_dl_fname(url, expected.checksum)  # TFDS' own, with the checksum in it.
        possible[url] = [parts[-1], "/".join(parts[-2:]), expected.filename or parts[-1], own]
        for name in possible[url]:
            checksums_of.setdefault(name, set()).add(expected.checksum)
    return {url: [name for name in names if len(checksums_of[name]) == 1] for url, names in possible.items()}


def _difference(path: Path, expected: Any) -> str | None:
    """Return how a file differs from the size and sha256 that TFDS registers; None when it does not."""
    got = checksums.compute_url_info(path)
    if got.size != expected.size:
        return f"{int(got.size)} bytes, must be {int(expected.size)}"
    return None if got == expected else f"sha256 {got.checksum}, must be {expected.checksum}"


def _url_parts(url: str) -> list[str]:
    return unquote(urlparse(url).path).strip("/").split("/")


def _require_server(urls: list[str], names: dict[str, list[str]], dataset: config.Dataset) -> None:
    """Raise at once when archives are missing and a server does not answer: TFDS would try for 205 seconds."""
    for url in {urlparse(url).netloc: url for url in urls if url.startswith("http")}.values():
        if problem := _no_answer(url):
            folder = Path(dataset.downloads or "FOLDER") / config.split_folder_name(dataset.name)[0]
            wanted = ", ".join(f"{url} as {folder / names[url][0]}" for url in urls[:4])
            more = f" and {len(urls) - 4} more" if len(urls) > 4 else ""
            raise UserError(
                f"dataset {dataset.name}: missing archives ({len(urls)}), and {urlparse(url).netloc} cannot be reached "
                f"({problem}). Connect to the network and run again; or give --set dataset.downloads={folder.parent} "
                f"and bring {wanted}{more}"
            )


def _no_answer(url: str) -> str | None:
    """Return why a server does not deliver, asked through the library and proxy settings that TFDS uses; else None."""

    def ask() -> str | None:
        try:
            with requests.get(url, stream=True, timeout=(3, 3)) as response:
                return f"HTTP status {response.status_code}" if response.status_code >= 400 else None
        except requests.ReadTimeout:
            return None  # It is there, and slow.
        except requests.RequestException as error:
            return type(error).__name__

    return network.with_timeout(4, ask, "no answer within 4 seconds")


def _describe(dataset: config.Dataset, archives: dict[str, Any], raw: Path) -> DatasetManifest:
    builder = builders.build(dataset.name, dataset.version, raw, dataset.builder)
    found = builders.supervised(builder)
    names = found.class_names
    return DatasetManifest(
        name=dataset.name,
        version=str(builder.version),
        tfds_version=tfds.__version__,
        folder=raw.relative_to(config.project_root()).as_posix(),
        image_shape=next(iter(found.given.values())).shape if found.kinds[0] == "image" else None,
        num_classes=len(names),
        class_names=names,
        num_examples={name: split.num_examples for name, split in sorted(builder.info.splits.items())},
        sources=tuple(
            SourceFile(url=url, sha256=archive.checksum, num_bytes=int(archive.size))
            for url, archive in sorted(archives.items())
        ),
        licence=builder.info.redistribution_info.license or None,
    )
