"""Notices, which Apprise sends to the addresses in the environment variable STRATAGEM_NOTIFY.

Each address is tried three times, two seconds apart; then a warning reports that the notice is lost, and `stratagem
status` repeats this until a later notice arrives. A run that is killed and resumed may send the same notice again.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

from tasks import config, records
from tasks.records import DataQuality, PreparedDataset, RunSummary
from tasks.system import units
from tasks.system.errors import UserError
from tasks.system.network import without_secrets

VARIABLE = "STRATAGEM_NOTIFY"
MAX_BODY = 3000
RETRIES, PAUSE_SECONDS = 2, 2.0

Kind = Literal["failure", "gate", "drift", "restart"]
TYPES = {"failure": "failure", "gate": "success", "drift": "warning", "restart": "warning"}
"""Apprise's type of each kind."""


def addresses() -> list[str]:
    """Return the addresses in STRATAGEM_NOTIFY, which are separated by blanks."""
    return os.environ.get(VARIABLE, "").split()


def check() -> None:
    """Refuse an address that Apprise does not support, before any work.

    Raises:
        UserError: an address is wrong; the message gives its position only, because the address is a secret.
    """
    if not addresses():
        return
    apprise = _apprise()
    for place, address in enumerate(addresses(), start=1):
        if apprise.Apprise.instantiate(address) is None:
            raise UserError(
                f"{VARIABLE}: Apprise does not know address {place} of {len(addresses())}, "
                f"{address.partition(':')[0]}:...: use a format of https://appriseit.com/services/, separate addresses "
                "with spaces, such as 'json://127.0.0.1:8000/notify mailtos://me:password@example.org', or unset the "
                "variable"
            )


def tell(kind: Kind, title: str, body: str) -> None:
    """Send a notice, without secrets, to each address of STRATAGEM_NOTIFY; if an address does not accept it, print a
    warning."""
    if not addresses():
        return
    title = without_secrets(" ".join(title.split()))
    body = f"{without_secrets(body.strip())[:MAX_BODY]}\n\n{records.now()}"
    apprise, failed = _apprise(), []
    asset = apprise.AppriseAsset(default_service_retry=RETRIES, default_service_wait=PAUSE_SECONDS)
    for address in addresses():
        sender = apprise.Apprise(address, asset=asset)
        with apprise.LogCapture(fmt="%(message)s") as said:
            if sender.notify(title=f"stratagem: {title}", body=body, notify_type=TYPES[kind]):
                continue
            why = (said.getvalue().strip().splitlines() or ["no reason given"])[-1]
        failed.append(f"{address.partition(':')[0]}:... rejected it ({without_secrets(why)})")
        print(f"warning: {VARIABLE}: {failed[-1]}", file=sys.stderr)
    lost = _folder() / "lost"
    if failed:
        lost.parent.mkdir(parents=True, exist_ok=True)
        lost.write_text("".join(f"{records.now()} {title}: {why}\n" for why in failed), encoding="utf-8")
    else:
        lost.unlink(missing_ok=True)


def last_lost() -> str | None:
    """Return the last notice if an address did not accept it, else None."""
    path = _folder() / "lost"
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def tell_failure(what: str, flow_run_id: str | None, try_number: int, reason: str) -> None:
    """Send a notice that a flow run failed or its process died."""
    again = f"\ntry {try_number}" if try_number > 1 else ""
    tell("failure", f"{what} failed", f"{reason}\n\nflow run {flow_run_id}{again}")


def tell_drift(prepared: PreparedDataset, quality: DataQuality) -> None:
    """Send a notice that the data have drifted from the previous version, once per data version."""
    told = _folder() / f"drift-{prepared.name}"
    version = str(prepared.data_version)
    drift = quality.findings.get("drift")
    if drift is None or (told.exists() and told.read_text(encoding="utf-8") == version):
        return
    body = f"{drift.text}\n\ndata version {version}; `stratagem data show {prepared.name}` has details"
    tell("drift", f"the data of {prepared.name} have changed", body)
    told.parent.mkdir(parents=True, exist_ok=True)
    told.write_text(version, encoding="utf-8")


def tell_result(summary: RunSummary, name: str) -> None:
    """Send a notice of the gate's decision about a run's model."""
    model = summary.model_version or "its model"
    verdict = "is the champion" if "champion" in summary.aliases else "is not the champion"
    if summary.model_version is None:
        verdict = "is not a version"
    lines = [
        *([summary.judgement.told] if summary.judgement else []),
        *([summary.reason] if summary.reason else []),
        *(f"{metric} {units.metric(value)}" for metric, value in summary.metrics.items() if metric.startswith("test/")),
        f"run {summary.run_id}, data version {summary.data_version}",
    ]
    tell("gate", f"{name}: {model} {verdict}", "\n".join(lines))


def _apprise() -> Any:
    """Import Apprise, which takes 0.3 s, only in a process that sends a notice; return the module."""
    import logging

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # It looks for imghdr, but does not need it.
        import apprise
        import apprise.utils.pgp  # Otherwise it would import it later.
    # Its log may contain an address, so nothing of it may reach the terminal.
    logger = logging.getLogger("apprise")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    return apprise


def _folder() -> Path:
    return config.project_root() / "mlruns" / "notifications"
