"""Addresses: whether a server answers at one, and no password of one in anything that is written or printed."""

import os
import queue
import re
import socket
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import TypeVar
from urllib.parse import unquote

T = TypeVar("T")
U = TypeVar("U")

# What may hold a password, or an address with one.
SECRETS = re.compile(r"(URL|URI|PASSWORD|PASSWD|TOKEN|SECRET|AUTH_STRING|_KEY|_DSN|CONNECTION_STRING)$")
# A shorter one would be found inside of ordinary words; and `true` is no password, whatever the variable is called.
MIN_SECRET_LENGTH = 6
# Of a part of an address that a service is told by; a host and a port are shorter, as a rule.
MIN_TOKEN_LENGTH = 20
# A database's password may hold any sign but `@`, as SQLAlchemy reads it, or be a parameter.
USERINFO = re.compile(r"(?<=://)(?:[^\s/?#'\"]*|(?<!http://)(?<!https://)[^\s/:@]*:[^\s@]*)@")
HTTP = re.compile(r"\bhttps?://$")
PARAMETER = re.compile(r"([?&](?:password|passwd)=)[^\s&]+")
# As AWS, Google, GitHub, GitLab, Slack, OpenAI, Hugging Face, npm and PyPI write theirs; JSON Web Tokens; private keys.
TOKENS = re.compile(
    r"\b(?:A[KS]IA[0-9A-Z]{16}|AIza[\w-]{35}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}"
    r"|https://hooks\.slack\.com/services/[\w/]{10,}|sk-(?=[\w-]*[A-Z])(?=[\w-]*\d)[\w-]{20,}|sk_live_\w{16,}|hf_\w{20,}"
    r"|npm_\w{36}|pypi-[\w-]{20,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
# Of a text's vocabulary, as tokenizers call them.
NO_PASSWORDS = ("bos", "cls", "end", "eos", "mask", "oov", "pad", "padding", "sep", "start", "stop", "unk", "unknown")
# How the name ends of what is a password.
PASSWORD_NAME = re.compile(
    r"(?i)(?:passwords?|passwd|secrets?|(?:api|access|private)[_-]?keys?|credentials?"
    rf"|{''.join(f'(?<!{name}_)' for name in NO_PASSWORDS)}token)$"
)


def holds_secret(name: str, text: str) -> bool:
    """Return whether a text under a name seems to hold a password, or is an address with one.

    >>> holds_secret("api_key", "0123456789"), holds_secret("source", "s3://key:secret@bucket"), holds_secret("to", "x")
    (True, True, False)
    """
    named = PASSWORD_NAME.search(name) is not None and len(text) >= MIN_SECRET_LENGTH
    # `ssh://git@host` names a user alone, as buckets' addresses do; with HTTP a token may stand there.
    users = [one.group() for one in USERINFO.finditer(text) if ":" in one.group() or HTTP.search(text[: one.start()])]
    return named or bool(users) or TOKENS.search(text) is not None or PARAMETER.search(text) is not None


def without_userinfo(text: str) -> str:
    """Return a text with the user's name and password left out of each address in it; without a password that is a
    parameter of one.

    >>> without_userinfo("postgresql://me:s3cret@db/runs does not answer")
    'postgresql://db/runs does not answer'
    """
    return PARAMETER.sub(r"\1***", USERINFO.sub("", text))


def without_secrets(text: str) -> str:
    """Return a text without userinfo, and without the passwords that the environment holds, however they are quoted."""
    text = without_userinfo(text)
    for secret in _secrets(os.environ):
        text = text.replace(secret, "***")
    return text


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """Return the passwords in an environment, the longest first."""
    found = set()
    for name, value in environment.items():
        if name == "STRATAGEM_NOTIFY":
            found |= _secrets_of_addresses(value)
        if not SECRETS.search(name):
            continue
        if "://" in value:
            userinfo = value.partition("://")[2].rpartition("@")[0]
            value = userinfo.partition(":")[2]
        elif name.endswith("AUTH_STRING"):
            value = value.partition(":")[2] or value
        elif name.endswith("CONNECTION_STRING"):  # Azure's: AccountName=me;AccountKey=abc==;EndpointSuffix=...
            parts = (part.partition("=") for part in value.split(";"))
            found |= {part[2] for part in parts if part[0] in ("AccountKey", "SharedAccessSignature")}
        found |= {value, unquote(value)}
    return sorted((secret for secret in found if len(secret) >= MIN_SECRET_LENGTH), key=len, reverse=True)


def _secrets_of_addresses(text: str) -> set[str]:
    """Return what must not be read of addresses as Apprise has them: each whole, its password, and whatever is long
    enough to be a token, also in the place of a host."""
    found = set()
    for address in text.split():
        rest = address.partition("://")[2]
        userinfo, _, place = rest.rpartition("@")
        parts = [part for part in re.split(r"[/?&=]", place) if len(part) >= MIN_TOKEN_LENGTH]
        passwords = userinfo.split(":")[1:]
        found |= {address, rest, *passwords, *parts, *(unquote(one) for one in (*passwords, *parts))}
    return found


def separate_credentials(environment: MutableMapping[str, str]) -> None:
    """Put the user and password of a server's address into the variables that its client reads them from.

    MLflow's client and Prefect's write the address into messages, records and databases as it is.
    """
    for name, split in (("MLFLOW_TRACKING_URI", _to_mlflow), ("PREFECT_API_URL", _to_prefect)):
        url = environment.get(name, "")
        scheme, _, rest = url.partition("://")
        userinfo, at, _ = re.split("[/?#]", rest, maxsplit=1)[0].rpartition("@")
        if at and scheme.lower() in ("http", "https"):
            user, _, password = userinfo.partition(":")
            environment.update(split(unquote(user), unquote(password)))
            environment[name] = f"{scheme}://{rest.removeprefix(userinfo + at)}"


def _to_mlflow(user: str, password: str) -> dict[str, str]:
    return {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}


def _to_prefect(user: str, password: str) -> dict[str, str]:
    return {"PREFECT_API_AUTH_STRING": f"{user}:{password}"}


def unreachable_reason(url: str, timeout_seconds: float | tuple[float, float] = 5) -> str | None:
    """Return why no server answers at an address, None where one does.

    Whether one that answers lets us in shows at the first request; 502 and its like are a proxy's answers.

    Args:
        url: what is asked for.
        timeout_seconds: how long a connection, and then an answer, may take; two where they differ.
    """
    import requests  # Here and not above: 0.1 s that `stratagem --help` need not wait for.

    try:
        with requests.get(url, timeout=timeout_seconds, stream=True) as answer:
            return f"HTTP status {answer.status_code}" if answer.status_code >= 500 else None
    except (requests.RequestException, ValueError) as error:
        return without_secrets(str(error))


def connection_error(host: str, port: int | str, timeout_seconds: float) -> OSError | OverflowError | None:
    """Return why no connection is accepted at a host's port, None where one is: no such host, no route, nobody listens,
    no such port, or no answer in time."""
    try:
        socket.create_connection((host.strip("[]"), port), timeout_seconds).close()
    except (OSError, OverflowError) as error:
        return error
    return None


def with_timeout(seconds: float, ask: Callable[[], T], otherwise: U) -> T | U:
    """Return the answer to a question that a server is asked, or something else where none comes in time.

    It is asked in a thread, because no time-out covers the look-up of a name, which may take 20 seconds and more.
    """
    answers: queue.SimpleQueue[T] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(ask()), daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return otherwise
