"""Notices of what happened, which Apprise sends to the addresses that the variable STRATAGEM_NOTIFY names.

Each address is tried three times, two seconds apart; then a warning says that the notice is lost, and so does
`stratagem status` until a later notice arrives. A run that is killed and resumed may send the same notice again.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tasks import config
from tasks.records import DataQuality, PreparedDataset, Run, RunSummary
from tasks.system import clock
from tasks.system.errors import UserError
from tasks.system.network import without_secrets

VARIABLE = "STRATAGEM_NOTIFY"
MAX_BODY = 3000
RETRIES, PAUSE_SECONDS = 2, 2.0

Kind = Literal["failure", "gate", "drift", "restart"]
TYPES = {"failure": "failure", "gate": "success", "drift": "warning", "restart": "warning"}
"""What Apprise calls them."""


def addresses() -> list[str]:
    """Return the addresses in STRATAGEM_NOTIFY, which blanks separate."""
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
        if apprise.Apprise.instantiate(address) is None:
            raise UserError(
                f"{VARIABLE}: address {place} of {len(addresses())}, {address.partition(':')[0]}:..., is none that "
                "Apprise knows: give addresses as https://appriseit.com/services/ has them, with blanks between them, "
                "such as 'json://127.0.0.1:8000/notify mailtos://me:password@example.org', or unset the variable"
            )


def tell(kind: Kind, title: str, body: str) -> None:
    """Send a notice to each address of STRATAGEM_NOTIFY; one that does not take it costs a warning, and no run.

    Args:
        kind: of the event.
        title: one line.
        body: some lines. Secrets are left out of both.
    """
    if not addresses():
        return
    title = without_secrets(" ".join(title.split()))
    body = f"{without_secrets(body.strip())[:MAX_BODY]}\n\n{clock.now()}"
    failed = [why for address in addresses() if (why := _send(address, kind, title, body))]
    for why in failed:
        print(f"warning: {VARIABLE}: {why}", file=sys.stderr)
    with contextlib.suppress(OSError):  # Of a full disk the run itself tells.
        _folder().mkdir(parents=True, exist_ok=True)
        (_folder() / "lost").write_text("".join(f"{clock.now()} {title}: {why}\n" for why in failed), encoding="utf-8")


def last_lost() -> str | None:
    """Return which notice an address did not take, if that is true of the last one."""
    with contextlib.suppress(OSError):
        return (_folder() / "lost").read_text(encoding="utf-8").strip() or None
    return None


def tell_failure(what: str, flow_run_id: str | None, try_number: int, reason: str) -> None:
    """Tell that a flow run failed or its process died."""
    again = f"\ntry {try_number}" if try_number > 1 else ""
    tell("failure", f"{what} failed", f"{reason}\n\nflow run {flow_run_id}{again}")


def tell_restarts(run: Run, reasons: Sequence[str]) -> None:
    """Tell each restart of a training's workers, with its reason."""
    for reason in reasons:
        tell("restart", f"{run.name}: its workers restarted", reason)


def tell_drift(prepared: PreparedDataset, quality: DataQuality) -> None:
    """Tell that the data are unlike the version before, once for each data version."""
    told, version = _folder() / f"drift-{prepared.name}", str(prepared.data_version)
    drift = quality.findings.get("drift")
    if drift is None or (told.exists() and told.read_text(encoding="utf-8") == version):
        return
    body = f"{drift.text}\n\ndata version {version}; `stratagem data show {prepared.name}` tells more"
    tell("drift", f"the data of {prepared.name} have changed", body)
    with contextlib.suppress(OSError):
        told.write_text(version, encoding="utf-8")


def tell_result(summary: RunSummary, name: str) -> None:
    """Tell what the gate says of a run's model."""
    model = summary.model_version or "its model"
    verdict = "is not a version" if summary.model_version is None else "is a version"
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
    tell("gate", f"{name}: {model} {verdict}", "\n".join(lines))


def _send(address: str, kind: Kind, title: str, body: str) -> str | None:
    """Send a notice; return why it was not taken, None where it was."""
    apprise = _apprise()
    asset = apprise.AppriseAsset(default_service_retry=RETRIES, default_service_wait=PAUSE_SECONDS)
    sender = apprise.Apprise(asset=asset)
    if not sender.add(address):
        return "an address is none that Apprise knows"
    with apprise.LogCapture(fmt="%(message)s") as said:
        taken = sender.notify(title=f"stratagem: {title}", body=body, notify_type=TYPES[kind])
        why = (said.getvalue().strip().splitlines() or ["it was not taken"])[-1]
    return None if taken else f"{address.partition(':')[0]}:... does not take it ({without_secrets(why)})"


def _apprise() -> Any:
    """Return the library, imported here: that takes 0.3 s, which only a process that sends a message need spend."""
    import logging

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # It looks for imghdr, and does without it.
        import apprise
        import apprise.utils.pgp  # Which it would import with the first address.
    # It says nothing on the terminal: its lines may hold an address. Without any handler Python prints warnings itself.
    logger = logging.getLogger("apprise")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    return apprise


def _folder() -> Path:
    return config.project_root() / "mlruns" / "notifications"
