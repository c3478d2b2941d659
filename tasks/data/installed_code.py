"""A dataset's pipeline in a project without code of its own, whose stages are those of the installed package.

No path in a project leads to that code, so DVC cannot depend on its files. It depends on what
``data/<name>/code.json`` holds: a digest of the files of each stage, so that another version of the package prepares
anew what it makes otherwise.
"""

import hashlib
import json
import re

import yaml

from tasks import config

PINS = "code.json"
COMMAND = "python -m stratagem stage"
"""In place of `python -m tasks`: the package is no top-level name `tasks` (``stratagem.py``)."""
DEPENDENCY = re.compile(r"^      - (tasks/[\w/]+\.py)\n", re.MULTILINE)
EMPTY = "    deps:\n    params:\n"
STAGE = re.compile(rf"^    cmd: {COMMAND} (\w+) .*\n(?:.*\n)*?    params:\n", re.MULTILINE)


def pipeline(text: str) -> str:
    """Return the dvc.yaml of a dataset of a project with code of its own, as it is in one without."""
    text = DEPENDENCY.sub(lambda found: "" if _is_ours(found[1]) else found[0], text)
    text = text.replace("python -m tasks", COMMAND).replace(EMPTY, "    params:\n")
    return STAGE.sub(rf"\g<0>      - data/${{dataset.name}}/{PINS}:\n          - \g<1>\n", text)


def pins(text: str) -> str:
    """Return what code.json holds for such a dvc.yaml: of each stage, the sha256 over its files."""
    digests = {}
    for stage, described in yaml.safe_load(text)["stages"].items():
        digest = hashlib.sha256()
        for file in sorted(path for path in described["deps"] if path.startswith("tasks/") and _is_ours(path)):
            digest.update(f"{file}\0".encode() + (config.code_root() / file).read_bytes())
        digests[stage] = digest.hexdigest()
    return json.dumps(digests, indent=2) + "\n"


def _is_ours(file: str) -> bool:
    return (config.code_root() / file).is_file()
