"""Notices of what happened, which Apprise sends to the addresses that the variable STRATAGEM_NOTIFY names.

What there is to tell lies in mlruns/notifications/waiting/ until each address has taken it, and then in told/, where
its name says for ever that it was told: a run that is resumed, or two processes that see the same, tell it once. An
address that does not answer is tried again by the next notice, and by `stratagem up` every few seconds.

A receiver cannot be asked what it has. So if this process is killed between its answer and the rename, or the answer is
lost, that notice comes twice, with the same id in its last line.
"""

import contextlib
import hashlib
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from tasks import config, records
from tasks.records import Record, Run, RunSummary
from tasks.system import clock, files
from tasks.system.errors import UserError
from tasks.system.network import without_secrets

VARIABLE = "STRATAGEM_NOTIFY"
MAX_BODY = 3000
# An address that takes nothing for so long is given up, with what it was to be told.
GIVE_UP_SECONDS = 7 * 86400.0
# So long another process may be at it: each address has a few seconds to answer.
LOCK_SECONDS = 30.0

_warned: set[str] = set()

Kind = Literal["failure", "gate", "drift", "restart"]
TYPES = {"failure": "failure", "gate": "success", "drift": "warning", "restart": "warning"}
"""What Apprise calls them."""


class Notice(Record):
    """One thing that is told once."""

    key: str
    """What happened: two notices with one key are the same."""
    kind: Kind
    title: str
    body: str
    at: float
    """When, in seconds since 1970."""
    taken_by: tuple[str, ...] = ()
    """The addresses that have it, as digests: an address is a secret."""


def addresses() -> list[str]:
    """Return who is told: what STRATAGEM_NOTIFY has, between blanks."""
    return os.environ.get(VARIABLE, "").split()


def check() -> None:
    """Refuse an address that Apprise does not know, before any work.

    Raises:
        UserError: names its place, not the address, which is a secret.
    """
    if not addresses():
        return
    apprise = _apprise()
    for place, address in enumerate(addresses(), start=1):
        with _silent():
            known = apprise.Apprise.instantiate(address) is not None
        if not known:
            raise UserError(
                f"{VARIABLE}: address {place} of {len(addresses())}, {address.partition(':')[0]}:..., is none that "
                "Apprise knows: give addresses as https://appriseit.com/services/ has them, with blanks between them, "
                "such as 'json://127.0.0.1:8000/notify mailtos://me:password@example.org', or unset the variable"
            )


def tell(kind: Kind, key: str, title: str, body: str) -> None:
    """Tell something once, now or later; nothing where nobody is to be told. No run waits long for it or fails with it.

    Args:
        kind: which of the things that are told.
        key: what happened, with the ids of what it happened to.
        title: one line.
        body: some lines. Secrets are left out of both.
    """
    if not addresses():
        return
    notice = Notice(
        key=f"{kind} {key}",
        kind=kind,
        title=without_secrets(" ".join(title.split())),
        body=without_secrets(body.strip())[:MAX_BODY],
        at=time.time(),
    )
    with _best_effort():
        if _keep(notice):
            deliver()


def tell_failure(what: str, flow_run_id: str | None, try_number: int, reason: str) -> None:
    """Tell that a flow run failed or its process died."""
    again = f"\ntry {try_number}" if try_number > 1 else ""
    tell("failure", f"{flow_run_id} {try_number}", f"{what} failed", f"{reason}\n\nflow run {flow_run_id}{again}")


def tell_restarts(run: Run, sitting: str, reasons: Sequence[str]) -> None:
    """Tell each restart of a training's workers.

    Args:
        run: of the training.
        sitting: from a start or a resume of the run to its end; a run that is resumed may lose a worker once more.
        reasons: of each restart in that sitting.
    """
    for number, reason in enumerate(reasons, start=1):
        tell("restart", f"{run.run_id} {sitting} {number}", f"{run.name}: its workers were started again", reason)


def tell_result(summary: RunSummary, name: str) -> None:
    """Tell what the gate says of a run's model."""
    model = summary.model_version or "its model"
    verdict = "is no version" if summary.model_version is None else "is a version"
    if "champion" in summary.aliases:
        verdict = "is the champion"
    elif summary.model_version is not None:
        verdict = "is not the champion"
    lines = [
        *([summary.judgement.told] if summary.judgement else []),
        *([summary.reason] if summary.reason else []),
        *(f"{metric} {value:.4f}" for metric, value in summary.metrics.items() if metric.startswith("test/")),
        f"run {summary.run_id}, data version {summary.data_version}",
    ]
    tell("gate", summary.run_id, f"{name}: {model} {verdict}", "\n".join(lines))


def deliver() -> int:
    """Tell each address what it was not told yet, the oldest first; return how many notices still wait."""
    wanted = {hashlib.sha256(address.encode()).hexdigest()[:16]: address for address in addresses()}
    if not wanted or not _folder("waiting").is_dir():
        return num_waiting()
    with contextlib.suppress(Timeout), FileLock(_folder(".") / "lock", timeout=LOCK_SECONDS):
        silent: set[str] = set()
        for path, notice in _waiting():
            for digest in wanted.keys() - silent - set(notice.taken_by):
                if why_not := _send(wanted[digest], notice):
                    silent.add(digest)
                    _warn(digest, why_not)
                    continue
                notice = notice.model_copy(update={"taken_by": (*notice.taken_by, digest)})
                records.save(notice, path)
            if wanted.keys() <= set(notice.taken_by) or time.time() - notice.at > GIVE_UP_SECONDS:
                _folder("told").mkdir(exist_ok=True)
                path.rename(_folder("told") / path.name)
    return num_waiting()


def _warn(digest: str, why_not: str) -> None:
    """Tell once of each address that it does not answer."""
    if digest not in _warned:
        _warned.add(digest)
        print(f"warning: {VARIABLE}: {why_not}; it is tried again later", file=sys.stderr)


def num_waiting() -> int:
    """Return how many notices were not taken by all yet."""
    return len(list(_folder("waiting").glob("*.json")))


def _keep(notice: Notice) -> bool:
    """Write a notice down; return False if it was before."""
    for name in ("waiting", "told"):
        _folder(name).mkdir(parents=True, exist_ok=True)
    name = _id(notice) + ".json"
    with FileLock(_folder(".") / "keeping.lock", timeout=LOCK_SECONDS):
        if any((_folder(place) / name).exists() for place in ("waiting", "told")):
            return False
        records.save(notice, _folder("waiting") / name)
    return True


def _waiting() -> list[tuple[Path, Notice]]:
    found = []
    for path in _folder("waiting").glob("*.json"):
        with contextlib.suppress(UserError):  # Half of a file, or somebody else's.
            found.append((path, records.load(Notice, path)))
    return sorted(found, key=lambda one: one[1].at)


def _send(address: str, notice: Notice) -> str | None:
    """Send a notice; return why it was not taken, None where it was."""
    apprise = _apprise()
    sender = apprise.Apprise()
    when = clock.at(notice.at)
    with _silent():
        if not sender.add(address):
            return "an address is none that Apprise knows"
        with apprise.LogCapture(fmt="%(message)s") as said:
            taken = sender.notify(
                title=f"stratagem: {notice.title}",
                body=f"{notice.body}\n\n{when}, notice {_id(notice)}",
                notify_type=TYPES[notice.kind],
            )
            why = (said.getvalue().strip().splitlines() or ["it was not taken"])[-1]
    return None if taken else f"{address.partition(':')[0]}:... does not take it ({without_secrets(why)})"


def _apprise() -> Any:
    """Return the library, imported here: that takes 0.3 s, which only a process that sends a message need spend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # It looks for imghdr, and does without it.
        import apprise
        import apprise.utils.pgp  # Which it would import with the first address.
    return apprise


def _id(notice: Notice) -> str:
    return hashlib.sha256(notice.key.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Let Apprise say nothing on the terminal: its lines may hold an address."""
    import logging

    logger = logging.getLogger("apprise")
    before = logger.propagate
    logger.propagate = False
    handler = logging.NullHandler()  # Without any, Python prints warnings by itself.
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


@contextlib.contextmanager
def _best_effort() -> Iterator[None]:
    try:
        yield
    except (OSError, Timeout, UserError) as error:
        why = files.unwritable(_folder("."), error) if isinstance(error, OSError) else error
        print(f"warning: {VARIABLE}: a notice cannot be kept: {why}", file=sys.stderr)


def _folder(name: str) -> Path:
    return config.project_root() / "mlruns" / "notifications" / name
