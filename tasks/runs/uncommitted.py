"""Changes that are in no commit, as a text that goes with a run: without what looks like a secret, and never long."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.runs import masking
from tasks.system import network

MAX_BYTES = 200_000
"""Of the whole text; what is longer is cut, and says so."""
CODE = (".py", ".yaml", ".yml", ".toml", ".lock", ".md", ".sh", ".gitignore")
"""Of a new file that git does not know yet, only these are read: others may be data, or keys."""
NEW, LARGE, LINK, CUT = "new, and not shown: ", "changed, and too large to be shown: ", "new, and a link: ", "... cut "
"""How a line begins that stands for what is not there."""
HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")


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
        text = "".join(_parts(diff, repository))
    except pygit2.GitError:
        return None
    return _cut(network.without_secrets(text)) if text else None


def told_apart(part: str) -> tuple[str, list[str]]:
    """Return a file's part of such a text without the lines that stand for what is not there, and those lines."""
    lines = part.splitlines(keepends=True)
    missing = [line for line in lines if line.startswith((NEW, LARGE, LINK, CUT))]
    return "".join(line for line in lines if line not in missing), [line.strip() for line in missing]


def _parts(diff: Any, repository: Any) -> Iterator[str]:
    """Yield each file's part of a diff, until there is more than enough. No large file is read."""
    import pygit2

    root = Path(repository.workdir)
    total = 0
    for number, delta in enumerate(diff.deltas):
        path = delta.new_file.path
        size = (root / path).lstat().st_size if (root / path).exists() else 0
        if delta.status == pygit2.enums.DeltaStatus.UNTRACKED:
            shown = path.endswith(CODE) and size <= MAX_BYTES
            part = _masked(_new(path, root), "", _text_of(root / path)) if shown else f"{NEW}{path}\n"
        elif max(size, delta.old_file.size) > MAX_BYTES:
            part = f"{LARGE}{path}\n"
        else:
            old = repository.get(delta.old_file.id)
            before = old.data.decode(errors="replace") if isinstance(old, pygit2.Blob) else ""
            part = _masked(diff[number].data.decode(errors="replace"), before, _text_of(root / path))
        yield part
        total += len(part)
        if total > MAX_BYTES:
            return


def _text_of(path: Path) -> str:
    """Return the text of a file; an empty one where there is none, but a link or a folder."""
    return path.read_bytes().decode(errors="replace") if path.is_file() and not path.is_symlink() else ""


def _masked(part: str, before: str, after: str) -> str:
    """Return a file's part of a diff with the lines of both files masked.

    The whole files are looked at: what a list's line is shows in the list's name alone, and that may stand where the
    part does not reach. What git says of the place behind `@@` is left out, as it may be a secret as well.
    """
    numbers = {"-": 0, "+": 0}
    known = {"-": _shown(before), "+": _shown(after)}
    lines = []
    for line in part.split("\n"):
        sign, text = line[:1], line[1:]
        if hunk := HUNK.match(line):
            numbers = {"-": int(hunk[1]), "+": int(hunk[2])}
            line = hunk.group()
        elif sign in ("-", "+", " ") and any(numbers.values()):
            side = "-" if sign == "-" else "+"
            shown = known[side].get(numbers[side], (None, ""))
            # Where git writes a line in another way than it stands in the file, it is masked by itself.
            line = sign + (shown[1] if shown[0] == text.rstrip("\r") else masking.masked_lines(text)[0])
            for one in ("-", "+") if sign == " " else (sign,):
                numbers[one] += 1
        lines.append(line)
    return "\n".join(lines)


def _shown(text: str) -> dict[int, tuple[str, str]]:
    """Return each line of a text by its number: as it is, and masked."""
    lines = (line.rstrip("\r") for line in text.split("\n"))
    return dict(enumerate(zip(lines, masking.masked_lines(text), strict=True), start=1))


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
