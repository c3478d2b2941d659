"""What looks like a secret in a text of code or settings: in Python, YAML, TOML, JSON, shell, whatever a project holds.

It errs on the side of hiding: whole values, and whole lines of those that go over several. The number of lines stays.
"""

import re
from collections.abc import Iterator

from tasks.system import network

HIDDEN = "***"
KEYS = "access|account|api|auth|deploy|encryption|master|private|secret|service|shared|signing|ssh|subscription"
# What the name of a secret has in it, in any spelling (`apiKeys`, `db-password`). `tokens` is also what a text has: it
# needs what it is for before it, or a string or a list behind it. `tokenizer` and `author` are none.
NAME = (
    r"(?i:(?:pass(?:word|wd|phrase)s?|(?<=[_;.])pwd|secrets?|credentials?|connection[_-]?strings?|authorization"
    rf"|(?:{KEYS})[_-]?(?:access[_-]?)?(?:keys?|tokens|signature)|(?<![a-z-])auth"
    rf"|{''.join(f'(?<!{name}[_-])' for name in network.NO_PASSWORDS)}token"
    r"|tokens(?=[\\\"']*\s*(?:[:=]\s*(?:[\\\"']|[\[({]\s*(?:[\\\"']|$)|$)|:\s*[\[{&])))(?![a-z])[\w-]*)"
)
# A name and what stands between it and its value: `TOKEN=`, `"token": `, `["token"] = `, `put("token", `.
NAMED = re.compile(rf"{NAME}[\\\"'\]]*\s*[:=]\s*|(?:\(\s*[\\\"']+|[\"']--?)[\w-]*{NAME}[\\\"']+\s*,\s*(?=\w?[\\\"'])")
# A shell's `export STRIPE_KEY=abc` and YAML's `STRIPE_KEY: abc`; Python's constants have spaces around their `=`.
ENVIRONMENT = re.compile(r"(?:^|(?<=[\s\"']))[A-Z][A-Z0-9_]*_(?:KEYS?|PAT|DSN)\b[\"']?(?:=(?=\S)|:(?:\s+|$))")
# A name of a secret whose value has its own name beside it or in the next line, as Kubernetes writes variables.
NAMED_BESIDE = re.compile(
    rf"((?:name|key)[\"']?\s*[:=]\s*[\"']?[\w.-]*{NAME}[\"']?[\s,]*[\"']?value[\"']?\s*[:=][ \t]*)[^\r\n]+"
)
# Where what comes before the value stays, and nothing goes over several lines.
WITHIN_A_LINE = [
    re.compile(rf"(--?[\w-]*{NAME}[ \t]+)[^\s-]\S*"),  # --password abc
    re.compile(r"((?:^|\s)(?:-u|--user)[ =]+[\"']?[^\s:]+:)\S+", re.MULTILINE),  # curl -u me:abc
    re.compile(r"(?i)(\blogin\s+\S+\s+password\s+)\S+"),  # .netrc
    re.compile(rf"((?:ENV|ARG)[ \t]+\w*{NAME}[ \t]+)\S.*"),  # Dockerfile
    re.compile(rf"(<[\w:-]*{NAME}>)[^<\r\n]+"),  # XML
    re.compile(r"(?i)(\b(?:bearer|basic)\s+)(?=\S*[\d=])[\w.~+/=-]{8,}"),
    re.compile(r"(?i)([?&](?:sig|key|(?:x-(?:amz|goog)-)?(?:signature|credential))=)[^\s&\"']+"),
]
# The head of a table of TOML, or of a section of an INI file.
SECTION = re.compile(r"\s*\[+[\w.\- \"']+\]+\s*(?:#.*)?$")
SECRET_SECTION = re.compile(rf"\s*\[+[\w.\- \"']*{NAME}[\w.\- \"']*\]+\s*(?:#.*)?$")
OF_A_SECTION = re.compile(r"\s*[\w.\-\"' ]+[=:]\s*")
# What may stand before a name at the start of a line, and before its value where that is a list of YAML.
LINE_START = re.compile(r"(\s*(?:-\s+)*)(?:export\s+)?[\w.\[\"'\\-]*")
NO_VALUE = re.compile(r"\s*(?:[&!]\S*\s*)*(?:#.*)?$")
CLOSERS = re.compile(r"[\s\])},;]*$")
QUOTED = re.compile(r"[BFRUbfru]{0,2}(\"\"\"|'''|\"|')")
# Strings and comments: brackets in them are none.
NO_BRACKETS = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|(?:^|(?<=\s))#.*")


def masked_lines(text: str) -> list[str]:
    """Return the lines of a text, without their ends, as they may be shown.

    >>> masked_lines("api_keys: [\\n  abc,\\n]\\nunits: 64")
    ['api_keys: ***', '  ***', ']', 'units: 64']
    """
    text = network.TOKENS.sub(lambda found: "\n".join([HIDDEN] * len(found.group().split("\n"))), text)
    for pattern in (NAMED_BESIDE, *WITHIN_A_LINE):
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return list(_masked(text.split("\n")))


def _masked(lines: list[str]) -> Iterator[str]:
    """Yield each line, masked by its own names and by the value that it may be a part of."""
    value, in_section = None, False
    for line in lines:
        if value is not None and value.goes_on(line):
            yield _hidden(line)
            continue
        if SECTION.match(line):
            in_section = SECRET_SECTION.match(line) is not None
        found = NAMED.search(line) or ENVIRONMENT.search(line) or (OF_A_SECTION.match(line) if in_section else None)
        value = _Value(line, found) if found else None
        if found is None or NO_VALUE.match(line, found.end()):
            yield line
        else:
            yield line[: found.end()] + HIDDEN + ("\r" if line.endswith("\r") else "")


def _hidden(line: str) -> str:
    """Return a line of a value: that it is there, and how far in."""
    if CLOSERS.match(line):
        return line
    return line[: len(line) - len(line.lstrip())] + HIDDEN + ("\r" if line.endswith("\r") else "")


class _Value:
    """What a line says about how far the value goes that begins in it."""

    def __init__(self, line: str, name: re.Match[str]) -> None:
        value = line[name.end() :].rstrip()
        start = LINE_START.fullmatch(line, 0, name.start())
        # Further in than the name: the rest of a value in YAML or an INI file, or the values of a mapping.
        self._column = len(start[1]) if start else None
        self._may_be_items = NO_VALUE.match(value) is not None
        self._continued = value.endswith("\\")
        self._quote, self._depth = None, 0
        if (quoted := QUOTED.match(value)) and quoted[1] not in value[quoted.end() :]:
            self._quote = quoted[1]
            return
        code = NO_BRACKETS.sub("", value).rstrip()
        # A password may have a bracket in it: only what a line begins or ends with opens a list.
        if code[:1] in tuple("[{(") or code.endswith(("[", "{", "(", ",")):
            self._depth = max(_depth(code), 0)

    def goes_on(self, line: str) -> bool:
        """Return whether the next line is a part of the value."""
        if self._quote is not None:
            if self._quote in line:
                self._quote = None
            return True
        if self._depth > 0:
            self._depth += _depth(NO_BRACKETS.sub("", line))
            return True
        if self._continued:
            self._continued = line.rstrip().endswith("\\")
            return True
        if self._column is None or not line.strip():
            return self._column is not None
        indent = len(line) - len(line.lstrip())
        item = self._may_be_items and indent == self._column and line.lstrip().startswith("-")
        return indent > self._column or item


def _depth(code: str) -> int:
    return sum(code.count(one) for one in "[{(") - sum(code.count(one) for one in "]})")
