"""Version control: what a run's commit is known from."""

import shutil
from collections.abc import Iterator

from tasks.operations.doctor import Here, Remark
from tasks.runs import lineage


def look(here: Here) -> Iterator[Remark]:
    """Yield whether the project is in a repository with a commit."""
    commit, dirty = lineage.git_state(here.root)
    if commit is None and dirty is None:
        text = "the project is under no version control: its runs name no commit"
        yield Remark("warning", text, "git init && git add --all && git commit -m 'The project'")
    elif commit is None:
        yield Remark("warning", "the repository has no commit yet", "git add --all && git commit -m 'The project'")
    else:
        changed = ", with changes that are in no commit" if dirty else ""
        yield Remark("ok", f"commit {commit[:12]}{changed}")
    if shutil.which("git") is None:  # We read repositories by a library; DVC and the user want the command.
        yield Remark("warning", "the command git is not there", "apt install git, or what installs it here")
