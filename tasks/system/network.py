"""Addresses of servers: whether a server answers, and how passwords stay out of everything that is written."""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from urllib.parse import unquote

# Names of variables that may hold a password, or an address with one.
SECRETS = re.compile(r"(URL|URI|PASSWORD|PASSWD|TOKEN|SECRET|AUTH_STRING|_KEY|_DSN|CONNECTION_STRING)$")
# Shorter texts occur inside ordinary words, and `true` is never a password.
MIN_SECRET_LENGTH = 6
# The shortest part of a notification address that counts as a token; hosts and ports are usually shorter.
MIN_TOKEN_LENGTH = 20
# SQLAlchemy allows any character except `@` in a database's password, which may also be a parameter.
USERINFO = re.compile(r"(?<=://)(?:[^\s/?#'\"]*|(?<!http://)(?<!https://)[^\s/:@]*:[^\s@]*)@")
# A server's host and port without http://, which MLflow treats as a folder.
NO_SCHEME = re.compile(r"[\w.-]+:\d+(/|$)")
NEEDS_SCHEME = "MLFLOW_TRACKING_URI: a server's address begins with http:// or https://. Write http:// before its host"
HTTP = re.compile(r"\bhttps?://$")
PARAMETER = re.compile(r"([?&](?:password|passwd)=)[^\s&]+")
# Prefixes of `_token` that name an entry of a tokenizer's vocabulary.
NO_PASSWORDS = ("bos", "cls", "end", "eos", "mask", "oov", "pad", "padding", "sep", "start", "stop", "unk", "unknown")
# The ends of names whose values are passwords.
PASSWORD_NAME = re.compile(
    r"(?i)(?:passwords?|passwd|secrets?|(?:api|access|private)[_-]?keys?|credentials?"
    rf"|{''.join(f'(?<!{name}_)' for name in NO_PASSWORDS)}token)$"
)


def holds_secret(name: str, text: str) -> bool:
    """Return whether a name or its text looks like a password, or the text like an address with a password.

    >>> holds_secret("api_key", "0123456789"), holds_secret("source", "s3://key:secret@bucket"), holds_secret("to", "x")
    (True, True, False)
    """
    named = PASSWORD_NAME.search(name) is not None and len(text) >= MIN_SECRET_LENGTH
    # `ssh://git@host` names only a user, as addresses of buckets do; with HTTP, that part may be a token.
    users = [one.group() for one in USERINFO.finditer(text) if ":" in one.group() or HTTP.search(text[: one.start()])]
    return named or bool(users) or PARAMETER.search(text) is not None


def without_userinfo(text: str) -> str:
    """Return a text without the user names and passwords in its addresses, including passwords in parameters.

    >>> without_userinfo("postgresql://me:s3cret@db/runs does not answer")
    'postgresql://db/runs does not answer'
    """
    return PARAMETER.sub(r"\1***", USERINFO.sub("", text))


def without_secrets(text: str) -> str:
    """Return a text without userinfo and without the passwords of the environment, quoted or not."""
    text = without_userinfo(text)
    for secret in _secrets(os.environ):
        text = text.replace(secret, "***")
    return text


def _secrets(environment: Mapping[str, str]) -> list[str]:
    found = set()
    for name, value in environment.items():
        if name == "STRATAGEM_NOTIFY":
            found |= _secrets_of_addresses(value)
        if not SECRETS.search(name):
            continue
        if "://" in value or name.endswith(("URL", "URI")):
            userinfo = (value.partition("://")[2] or value).rpartition("@")[0]
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
    """Move the user and password of a server's address into the variables from which its client reads them.

    The clients of MLflow and Prefect write the address unchanged into messages, records and databases.
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
    """If a proxy is set, make this process and its children contact servers on this machine directly."""
    if not any(name.lower().endswith("_proxy") for name in environment):
        return
    given = [one.strip() for one in (environment.get("no_proxy") or environment.get("NO_PROXY", "")).split(",")]
    if "*" not in given:
        direct = ",".join(dict.fromkeys(filter(None, [*given, "127.0.0.1", "localhost"])))
        environment.update(no_proxy=direct, NO_PROXY=direct)  # Some clients read only one of them.


def unreachable_reason(url: str, timeout_seconds: float | tuple[float, float] = 5) -> str | None:
    """Return why no server answers at an address, None if one does.

    A status such as 401 also means that a server answers; from 500 on, the answer may be a proxy's.

    Args:
        url: the address.
        timeout_seconds: for the connection and for the answer; a pair if they differ.
    """
    import requests  # Takes 0.1 s, which `stratagem --help` should not wait for.

    try:
        with requests.get(url, timeout=timeout_seconds, stream=True) as answer:
            return f"HTTP status {answer.status_code}" if answer.status_code >= 500 else None
    except (requests.RequestException, ValueError) as error:
        by_proxy = "the proxy: " if isinstance(error, requests.exceptions.ProxyError) else ""
        cause: BaseException = error  # requests and urllib3 wrap the system's error several times.
        while (inner := cause.__cause__ or cause.__context__) is not None:
            cause = inner
        return without_secrets(by_proxy + (str(cause) or str(error)))


def connection_error(host: str, port: int | str, timeout_seconds: float) -> OSError | OverflowError | None:
    """Return why a host's port accepts no connection: no host, no route, no server or no answer in time; else None."""
    try:
        socket.create_connection((host.strip("[]"), port), timeout_seconds).close()
    except (OSError, OverflowError) as error:
        return error
    return None
