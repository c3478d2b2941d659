"""Changes that are in no commit, as a text that goes with a run: without what looks like a secret, and never long."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks import network

MAX_BYTES = 200_000
"""Of the whole text; what is longer is cut, and says so."""
CODE = (".py", ".yaml", ".yml", ".toml", ".lock", ".md", ".sh", ".gitignore")
"""Of a new file that git does not know yet, only these are read: others may be data, or keys."""
NEW, LARGE, LINK, CUT = "new, and not shown: ", "changed, and too large to be shown: ", "new, and a link: ", "... cut "
"""How a line begins that stands for what is not there."""
# `tokenizer = ...` is none. Each further item of a list in YAML is one; a line that git says is gone is none.
NAMED = re.compile(
    r"""(?i)((?:passwords?|passwd|secrets?|token|(?:api|access|account|private)_?key|credentials?)(?![a-z])\w*["']?\s*[:=]\s*)"""
    r"\S.*(?:(?:\n[+\- ][ \t]*)*\n[+\- ][ \t]*- .*)*"
)


def changes(folder: Path) -> str | None:
    """Return how the files of a checkout differ from its commit, as ``git diff`` writes it; None where they do not, or
    there is no commit.

    A file that is new is there with its text if it may be code, else by its name. Of a binary file only the name is
    there.
    """
    # As in ``lineage``.
    import pygit2

    pygit2.option(pygit2.enums.Option.SET_OWNER_VALIDATION, False)
    try:
        found = pygit2.discover_repository(str(folder))
        if found is None:
            return None
        repository = pygit2.Repository(found)
        if repository.head_is_unborn or repository.workdir is None:
            return None
        untracked = pygit2.enums.DiffOption.INCLUDE_UNTRACKED | pygit2.enums.DiffOption.RECURSE_UNTRACKED_DIRS
        diff = repository.diff("HEAD", flags=untracked)
        text = "".join(_parts(diff, Path(repository.workdir)))
    except pygit2.GitError:
        return None
    return _cut(masked(text)) if text else None


def told_apart(part: str) -> tuple[str, list[str]]:
    """Return a file's part of such a text without the lines that stand for what is not there, and those lines."""
    lines = part.splitlines(keepends=True)
    missing = [line for line in lines if line.startswith((NEW, LARGE, LINK, CUT))]
    return "".join(line for line in lines if line not in missing), [line.strip() for line in missing]


def masked(text: str) -> str:
    """Return a text without passwords: those of the environment, in addresses, and what looks like one.

    >>> masked("+API_KEY = 'abc'")
    '+API_KEY = ***'
    """
    text = network.without_secrets(text)
    return NAMED.sub(r"\1***", network.TOKENS.sub("***", text))


def _parts(diff: Any, root: Path) -> Iterator[str]:
    """Yield each file's part of a diff, until there is more than enough. No large file is read."""
    import pygit2

    total = 0
    for number, delta in enumerate(diff.deltas):
        path = delta.new_file.path
        size = (root / path).lstat().st_size if (root / path).exists() else 0
        if delta.status == pygit2.enums.DeltaStatus.UNTRACKED:
            part = _new(path, root) if path.endswith(CODE) and size <= MAX_BYTES else f"{NEW}{path}\n"
        elif max(size, delta.old_file.size) > MAX_BYTES:
            part = f"{LARGE}{path}\n"
        else:
            part = diff[number].data.decode(errors="replace")
        yield part
        total += len(part)
        if total > MAX_BYTES:
            return


def _new(path: str, root: Path) -> str:
    """Return a new file as git writes one."""
    if (root / path).is_symlink():
        return f"{LINK}{path}\n"
    text = (root / path).read_bytes().decode(errors="replace")
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n"
    if not text:
        return f"{head}index 0000000..e69de29\n"
    lines = text.removesuffix("\n").split("\n")
    head += f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n"
    end = "" if text.endswith("\n") else "\\ No newline at end of file\n"
    return head + "".join(f"+{line}\n" for line in lines) + end


def _cut(text: str) -> str:
    data = text.encode()
    if len(data) <= MAX_BYTES:
        return text
    return data[:MAX_BYTES].decode(errors="ignore") + f"\n{CUT}after {MAX_BYTES:,} bytes\n"
