"""Every block of README.md, CONTRIBUTING.md and docs/, as it stands there.

The language of a block says how it is checked. Those of commands are read from the top in one clone of the project, as
a reader would: a new one needs nothing here, unless this machine cannot run it.
"""

import ast
import contextlib
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from flows.cli import main
from flows.pairs import plan
from tasks import config, sweeps
from tasks.strategies.engines import isolation
from tests.processes import test_faults

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
# What is not run, and why not. What of it is `make` or `stratagem` must still be something that those take.
NOT_RUN = {
    "make setup": "installs 3 GB of packages; tests/test_setup.py has its parts",
    "make lint": "the tests' own caller runs it",
    "make test": "these tests",
    "make test-slow": "these tests",
    "make test-exhaustive": "more of these tests",
    "make bench": "takes 20 minutes",
    "python -m benchmarks recipes best": "takes longer",
    "make docs": "test_website.py builds the site, and says which page is stale",
    ".ci/run": "these tests",
    ".venv/bin/pip install xprof": "downloads a package",
    "pip wheel --no-deps .": "test_library.py: a wheel is made",
    "pip install stratagem-0.1.0-py3-none-any.whl": "test_library.py: it is installed",
    "stratagem data add photos/": "docs/data.md: a folder that its script makes",
    "stratagem --show-completion": "test_completion.py: the script of each shell",
    "stratagem status --json": "test_operation.py: what it tells while everything runs",
    "ray start --head": "tests/flows/ray_nodes.py: nodes at addresses of the loopback",
    "ray start --address=HOST:6379": "the same",
    "stratagem run mnist --set strategy.kind=multi_worker --set strategy.launcher=ray --set strategy.workers=3": (
        "test_ray.py: needs three nodes"
    ),
    "stratagem up": "test_operation.py: it says that all runs already",
}
# What serves until it is ended, and what it says when it does.
SERVERS = {
    "stratagem ui": "Press Ctrl-C to stop everything.",
    "stratagem models serve": "Press Ctrl-C to stop it.",
    "tensorboard": "(Press CTRL+C to quit)",
}
# So short is a training here, where the command or its recipe says nothing else: an epoch of digits each.
SHORT = {"epochs": 3, "steps_per_epoch": 41}
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
EXPORTS = re.compile(r"^export \w+=", re.MULTILINE)
FENCE = re.compile(r"^ *(```+|~~~+)(.*)\n((?:.*\n)*?) *\1 *$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    place: str
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a block, each with its comment."""
        if self.language == "console":
            return [self.text.splitlines()[0].removeprefix("$ ")]
        if self.language != "sh":
            return []
        return [self.text] if EXPORTS.search(self.text) else re.split(r"(?<!\\)\n+", self.text.strip())


def blocks_of(document: Path) -> list[Block]:
    """Return the blocks of a document, from the top."""
    text = document.read_text(encoding="utf-8")
    return [
        Block(f"{document.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}", found[2].strip(), found[3])
        for found in FENCE.finditer(text)
    ]


def bare(command: str) -> str:
    """Return a command without its comment, by which it is the same elsewhere."""
    return command if EXPORTS.search(command) else " ".join(re.sub(r" +# .*| *\\\n", " ", command).split())


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
COMMANDS = {bare(command): block.place for block in reversed(BLOCKS) for command in block.commands}
SCHEDULE = next(command for command in COMMANDS if "prefect server start" in command)  # It has a test of its own.
# Somebody who is new reads these: what stands there is run by `make test-slow` already.
FIRST_PAGES = ("README.md",)
# But for these, each of which has slow tests of its own.
LONG = re.compile(
    r"stratagem (compare|sweep|ui|up|status|down|models serve|runs reproduce|\w+ mnist)|deployment run"
    r"|run --set (strategy\.kind|train\.loop)="
)
# What a reader does, from the top; the same command once. test_own_data.py does what the tutorials say.
STEPS = {
    f"{block.place} {(bare(command) or block.text).splitlines()[0]}": (block, command)
    for block in BLOCKS
    if not block.place.startswith("docs/tutorials/")
    for command in (block.commands or [""] * (block.language == "python"))
    if block.language != "sh" or (COMMANDS[bare(command)] == block.place and bare(command) not in {*NOT_RUN, SCHEDULE})
}


def test_every_block_says_how_it_is_checked():
    """sh: each command is run; a block that exports variables is one script. console: its command's output has the
    lines of the block, whatever the figures, ids and times in them. python: written to the file that its first line
    names, or run. diff: test_contributing.py applies it. yaml: its settings are accepted. mermaid: `make picture`."""
    languages = {"sh", "console", "python", "diff", "text", "yaml", "mermaid"}
    assert [block.place for block in BLOCKS if block.language not in languages] == []


def test_every_fence_is_of_a_block():
    for document in DOCUMENTS:
        assert not re.search(r"^[ >]*(```|~~~)", FENCE.sub("", document.read_text(encoding="utf-8")), re.MULTILINE)


def test_what_is_not_run_is_still_there():
    assert [command for command in NOT_RUN if command not in COMMANDS] == []
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("command", [command for command in COMMANDS if re.match(r"stratagem \w", command)])
def test_settings_and_options_of_a_command_are_accepted(monkeypatch, command):
    monkeypatch.chdir(ROOT)
    _, name, *arguments = shlex.split(command)
    called = get_command(main.app).commands[name]
    if arguments and (below := getattr(called, "commands", {}).get(arguments[0])):
        called, arguments = below, arguments[1:]
    given = called.make_context(name, arguments).params
    if name == "compare":
        pairs, overrides = given["strategies"].split(","), config.read_overrides(given["overrides"])
        planned = plan(pairs, given["loops"].split(","), given["recipes"], overrides)
        assert [pair.reason for pair in planned.pairs if pair.reason] == []
    elif "recipes" in given:
        config.load(given["recipes"], given["overrides"])


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "yaml"], ids=lambda block: block.place
)
def test_the_settings_of_a_recipe_are_accepted(monkeypatch, tmp_path, block):
    monkeypatch.chdir(ROOT)
    (tmp_path / "recipe.yaml").write_text(block.text)
    if "space" in yaml.safe_load(block.text):
        sweeps.load(str(tmp_path / "recipe.yaml"))
    else:
        config.load(str(tmp_path / "recipe.yaml"), {})


def test_make_knows_its_targets(run):
    targets = [command.removeprefix("make ") for command in COMMANDS if command.startswith("make ")]
    done = run(["make", "--dry-run", *targets], cwd=ROOT)
    assert done.returncode == 0, done.stderr


LINKS = sorted({(document, *link) for document in DOCUMENTS for link in LINK.findall(document.read_text("utf-8"))})


@pytest.mark.parametrize(
    ("document", "text", "file", "heading"), LINKS, ids=lambda value: getattr(value, "name", value) or "-"
)
def test_a_link_leads_to_what_it_names(document, text, file, heading):
    target = (document.parent / file).resolve() if file else document
    assert target.exists(), f"{document.name}: no {file}"
    if heading:
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert heading in [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings]
    if target.suffix == ".py" and "/" not in text:
        # `train.train` is `train` in train.py, `datasets.find` is `find` in datasets/__init__.py.
        module, *names = text.strip("`").split(".")
        assert module == (target.parent.name if target.stem == "__init__" else target.stem)
        body = ast.parse(target.read_text(encoding="utf-8")).body
        for name in names:
            found = [part for part in body if name in names_in(part)]
            assert found, f"{document.name}: {file} has no {text}"
            body = getattr(found[0], "body", [])


def names_in(statement: ast.stmt) -> set[str]:
    """Return what a statement defines."""
    targets = [*getattr(statement, "targets", ()), getattr(statement, "target", None)]
    return {getattr(statement, "name", ""), *(part.id for part in targets if isinstance(part, ast.Name))}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_a_file_that_is_named_is_there(document):
    named = re.findall(r"`((?:tasks|flows|tests|benchmarks|recipes)/[\w./]+)`", document.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_picture_is_of_the_layers_as_they_are():
    layers = runpy.run_path(str(ROOT / "tests" / "layers.py"))
    drawn = [block.text for document in DOCUMENTS for block in blocks_of(document) if block.language == "mermaid"]
    assert drawn == [layers["picture"]()], "docs/architecture.md shows other layers: run make picture"


@dataclass
class Reader:
    """Somebody who reads the documents and types what stands there, in a clone of the project."""

    folder: Path
    upstream: Path
    start: Callable
    said: dict[str, str] = field(default_factory=dict)
    """What each command said; none is run twice."""

    def do(self, command: str) -> str:
        """Run a command as it stands, in a shell; return its output."""
        if bare(command) not in self.said:
            folder = self.folder if self.folder.exists() else self.folder.parent
            typed = command.replace("<this repository>", shlex.quote(str(self.upstream)))
            typed = re.sub("<run_id>", lambda found: self.newest_run(), typed)
            shell = ["bash", "-euo", "pipefail", "-c", f"exec 2>&1\n{typed}"]  # As in a terminal.
            process = self.start(*shell, cwd=folder, PYTHONPATH=str(self.folder))
            serves = next((said for program, said in SERVERS.items() if bare(command).startswith(program)), None)
            if serves:
                process.wait_until(serves, of=process.out)
                os.killpg(process.process.pid, signal.SIGINT)
            code = process.process.wait(1200)
            said = process.out.read_text()
            assert code in ((0, 130) if serves else (0,)), f"{typed}\n{said}"
            self.said[bare(command)] = said
        return self.said[bare(command)]

    def newest_run(self) -> str:
        """Return the id of the run that began last."""
        return max((self.folder / "mlruns" / "runs").iterdir(), key=lambda run: run.stat().st_ctime).name


@pytest.fixture(scope="module")
def reader(project_template, tmp_path_factory, start, request) -> Iterator[Reader]:
    """A reader who has done README's first line, where params.yaml has short trainings and MNIST's archives."""
    folder = tmp_path_factory.mktemp("reader")
    upstream = folder / "upstream" / "stratagem"
    subprocess.run(["git", "clone", "--quiet", project_template, upstream], check=True)
    values = yaml.safe_load((upstream / "params.yaml").read_text())
    values["train"] |= SHORT
    with contextlib.suppress(pytest.skip.Exception):  # Then the commands on MNIST are skipped, too.
        values["dataset"]["downloads"] = str(request.getfixturevalue("archives"))
    (upstream / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    git = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "commit", "--quiet", "--all", "-m", "short trainings"], cwd=upstream, check=True)
    reader = Reader(folder / "stratagem", upstream, start)
    reader.do(BLOCKS[0].commands[0])
    # As `make setup` leaves it.
    environment = reader.folder / ".venv"
    environment.mkdir()
    (environment / "bin").symlink_to(Path(sys.prefix) / "bin")
    (environment / ".installed").touch()
    yield reader
    reader.do("stratagem down")  # A command between `up` and `down` may have failed.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "command"),
    # What the settings and options of the others are, is tested above; what they do, by a test of each.
    [
        pytest.param(
            *step,
            id=name,
            marks=() if name.startswith(FIRST_PAGES) and not LONG.search(name) else pytest.mark.exhaustive,
        )
        for name, step in STEPS.items()
    ],
)
def test_what_a_reader_types_works(reader, block, command, request):
    if "mnist" in command:
        request.getfixturevalue("archives")
    if block.language == "console":
        assert_like(reader.do(command), block.text.partition("\n")[2])
    elif block.language == "sh":
        reader.do(command)
    elif named := re.match(r"# (\w+\.py)\n", block.text):
        (reader.folder / named[1]).write_text(block.text)
    else:
        reader.do(f"python - <<'END'\n{block.text}END")


def assert_like(said: str, sample: str) -> None:
    """Find the words of a sample in an output: one after the other, except where the sample has dots.

    Line breaks do not count: a line of longer times is wrapped at another word.
    """
    words = shape(said).split()
    place = 0
    for part in re.split(r"^ +\.\.\.\n", sample, flags=re.MULTILINE):
        wanted = shape(part).split()
        starts = range(place, len(words) - len(wanted) + 1)
        found = next((start for start in starts if words[start : start + len(wanted)] == wanted), None)
        assert found is not None, f"not in the output:\n{part}\n{said}"
        place = found + len(wanted)


def shape(text: str) -> str:
    """Return a text without what differs in each run: ids, figures and times."""
    text = re.sub(r"\b(?=[a-f]*\d)[0-9a-f]{12,}\b", "#", text)
    return re.sub(r"(?<![a-z])\d[\d.,:T+e-]*", "#", text)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_schedule_that_is_started_by_hand_runs_as_it_stands(reader, tmp_path):
    try:
        network = isolation.make()  # Another test's `stratagem up` may have port 4200, which the block names.
    except OSError as error:
        pytest.skip(f"no network of its own, where port 4200 is free: {error}")
    before = len(list(reader.folder.glob("mlruns/runs/*/summary.json")))
    log = (tmp_path / "log").open("w+")
    asking = f"{SCHEDULE}\ncurl --silent $PREFECT_API_URL/deployments/filter --json '{{}}'\n"
    shell = subprocess.Popen(
        network.command(["bash", "-euo", "pipefail", "-c", asking]),
        pass_fds=network.descriptors,
        cwd=reader.folder,
        env=os.environ | {"PREFECT_HOME": str(tmp_path / "home"), "PYTHONPATH": str(reader.folder)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = shell.wait(1200)
    finally:
        # The server and the worker, which stay in the background: a worker whose server went first outlived a SIGTERM.
        os.killpg(shell.pid, signal.SIGKILL)
        network.close()
    log.seek(0)
    said = log.read()
    log.close()
    assert code == 0, said
    assert "Completed" in said
    assert '{"exception_message":"Unauthorized"}' in said, f"who has no password: {said}"
    assert len(list(reader.folder.glob("mlruns/runs/*/summary.json"))) == before + 1


def test_every_fault_has_a_test_that_ci_runs():
    """A row of docs/reliability.md names a file, a test or a case of test_faults.py that CI runs."""
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    tables = page.split("| fault | promise | test |\n|---|---|---|\n")[1:]
    table = [row for rows in tables for row in rows.partition("\n\n")[0].splitlines()]
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    tests = {name for text in sources for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    named = re.findall(r"`(test_\w+?)(?:\.\.\.)?`", page)
    assert [one for one in named if not any(test.startswith(one) for test in tests)] == []
    weekly = re.compile(r"^@pytest\.mark\.exhaustive.*\n(?:@.*\n|[ )\]].*\n)*def (test_\w+)", re.MULTILINE)
    tests -= {name for text in sources for name in weekly.findall(text)}
    cases = {fault.name for fault in test_faults.FAULTS if fault.name not in test_faults.MORE}

    def is_in_ci(named: str) -> bool:
        begin = named.removesuffix("...").strip()
        return named.endswith(".py") or any(one.startswith(begin) for one in tests | cases)

    assert len(table) > 40
    for row in table:
        assert any(is_in_ci(named) for named in re.findall(r"`([^`]+)`", row.rsplit("|", 2)[1])), row
