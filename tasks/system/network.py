"""Addresses of servers: whether one answers, and no password of one in anything that is written or printed."""

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

# Names of variables that may hold a password, or an address with one.
SECRETS = re.compile(r"(URL|URI|PASSWORD|PASSWD|TOKEN|SECRET|AUTH_STRING|_KEY|_DSN|CONNECTION_STRING)$")
# A shorter one would be found inside ordinary words, and `true` is never a password.
MIN_SECRET_LENGTH = 6
# Of a part of a notification address; hosts and ports are usually shorter.
MIN_TOKEN_LENGTH = 20
# SQLAlchemy allows any character but `@` in a database's password, and a parameter that holds it.
USERINFO = re.compile(r"(?<=://)(?:[^\s/?#'\"]*|(?<!http://)(?<!https://)[^\s/:@]*:[^\s@]*)@")
# A server's host and port without http://, which MLflow takes for a folder.
NO_SCHEME = re.compile(r"[\w.-]+:\d+(/|$)")
NEEDS_SCHEME = "MLFLOW_TRACKING_URI: a server's address begins with http:// or https://. Write http:// before its host"
HTTP = re.compile(r"\bhttps?://$")
PARAMETER = re.compile(r"([?&](?:password|passwd)=)[^\s&]+")
# As AWS, Google, GitHub, GitLab, Slack, OpenAI, Hugging Face, npm and PyPI write theirs; JSON Web Tokens; private keys.
TOKENS = re.compile(
    r"\b(?:A[KS]IA[0-9A-Z]{16}|AIza[\w-]{35}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}"
    r"|https://hooks\.slack\.com/services/[\w/]{10,}|sk-(?=[\w-]*[A-Z])(?=[\w-]*\d)[\w-]{20,}|sk_live_\w{16,}|hf_\w{20,}"
    r"|npm_\w{36}|pypi-[\w-]{20,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
# Names of tokens in a tokenizer's vocabulary.
NO_PASSWORDS = ("bos", "cls", "end", "eos", "mask", "oov", "pad", "padding", "sep", "start", "stop", "unk", "unknown")
# The end of a name whose value is a password.
PASSWORD_NAME = re.compile(
    r"(?i)(?:passwords?|passwd|secrets?|(?:api|access|private)[_-]?keys?|credentials?"
    rf"|{''.join(f'(?<!{name}_)' for name in NO_PASSWORDS)}token)$"
)


def holds_secret(name: str, text: str) -> bool:
    """Return whether a named text seems to be or to hold a password, or an address with one.

    >>> holds_secret("api_key", "0123456789"), holds_secret("source", "s3://key:secret@bucket"), holds_secret("to", "x")
    (True, True, False)
    """
    named = PASSWORD_NAME.search(name) is not None and len(text) >= MIN_SECRET_LENGTH
    # `ssh://git@host` names a user alone, as buckets' addresses do; with HTTP a token may stand there.
    users = [one.group() for one in USERINFO.finditer(text) if ":" in one.group() or HTTP.search(text[: one.start()])]
    return named or bool(users) or TOKENS.search(text) is not None or PARAMETER.search(text) is not None


def without_userinfo(text: str) -> str:
    """Return a text without the user's name and password in each address, also where the password is a parameter.

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
    """Return the secrets in Apprise's addresses: each address itself, its password, and each part that is long enough
    to be a token, even in the place of a host."""
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
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        url = environment.get(name, "")
        scheme, _, rest = url.partition("://")
        userinfo, at, _ = re.split("[/?#]", rest, maxsplit=1)[0].rpartition("@")
        if at and scheme.lower() in ("http", "https"):
            user, _, password = map(unquote, userinfo.partition(":"))
            if name == "MLFLOW_TRACKING_URI":
                environment.update(MLFLOW_TRACKING_USERNAME=user, MLFLOW_TRACKING_PASSWORD=password)
            else:
                environment["PREFECT_API_AUTH_STRING"] = f"{user}:{password}"
            environment[name] = f"{scheme}://{rest.removeprefix(userinfo + at)}"


def keep_proxies_out(environment: MutableMapping[str, str]) -> None:
    """Let this process and those that it starts reach servers on this machine directly, where a proxy is set."""
    if not any(name.lower().endswith("_proxy") for name in environment):
        return
    given = [one.strip() for one in (environment.get("no_proxy") or environment.get("NO_PROXY", "")).split(",")]
    if "*" not in given:
        direct = ",".join(dict.fromkeys(filter(None, [*given, "127.0.0.1", "localhost"])))
        environment.update(no_proxy=direct, NO_PROXY=direct)  # Some clients read one of them alone.


def unreachable_reason(url: str, timeout_seconds: float | tuple[float, float] = 5) -> str | None:
    """Return why no server answers at an address, None where one does.

    The first request shows whether it lets us in; 502 and the like are a proxy's answers.

    Args:
        url: the address.
        timeout_seconds: for the connection and for the answer; a pair if they differ.
    """
    import requests  # Takes 0.1 s, which `stratagem --help` need not wait for.

    try:
        with requests.get(url, timeout=timeout_seconds, stream=True) as answer:
            return f"HTTP status {answer.status_code}" if answer.status_code >= 500 else None
    except (requests.RequestException, ValueError) as error:
        by_proxy = "the proxy: " if isinstance(error, requests.exceptions.ProxyError) else ""
        cause: BaseException = error  # requests and urllib3 wrap what the system says several times.
        while (inner := cause.__cause__ or cause.__context__) is not None:
            cause = inner
        return without_secrets(by_proxy + (str(cause) or str(error)))


def connection_error(host: str, port: int | str, timeout_seconds: float) -> OSError | OverflowError | None:
    """Return why a host's port accepts no connection (no host, no route, no server, no answer in time), or None."""
    try:
        socket.create_connection((host.strip("[]"), port), timeout_seconds).close()
    except (OSError, OverflowError) as error:
        return error
    return None


def with_timeout(seconds: float, ask: Callable[[], T], otherwise: U) -> T | U:
    """Return what ``ask`` returns, or ``otherwise`` if that takes too long.

    ``ask`` runs in a thread, because no time-out covers the look-up of a host's name, which can take 20 s and more.
    """
    answers: queue.SimpleQueue[T] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(ask()), daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except queue.Empty:
        return otherwise
