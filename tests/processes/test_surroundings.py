"""Where a command is given: odd paths, locales and limits, which a run must not notice."""

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    # JAX, which another file of this worker has imported, warns of each fork; the child runs a new program at once.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
]

# All at once: none of them is to change anything, and a run for each would take minutes.
ODD = {
    "COLUMNS": "20",
    "LC_ALL": "C",
    "PYTHONHASHSEED": "7",
    "PYTHONOPTIMIZE": "2",
    "PYTHONUTF8": "0",
    "PYTHONWARNINGS": "error",
    "TERM": "dumb",
    "TZ": "Pacific/Kiritimati",
}
STRATAGEM = [sys.executable, "-c", "from flows.cli.main import main; main()"]


def _in_odd_process():
    os.umask(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


@pytest.fixture
def odd(project, digits_folder, tmp_path, monkeypatch):
    """A project with an odd path of more than 200 characters, reached by a link, and a long temporary folder."""
    shutil.copytree(digits_folder, project / "data" / "digits", dirs_exist_ok=True)
    place = tmp_path / "ä ö 日本" / ("long " * 40).strip() / "a project #'\U0001f600"
    place.parent.mkdir(parents=True)
    project.rename(place)
    link = tmp_path / "link"
    link.symlink_to(place)
    temporary = tmp_path / ("t" * 150)
    temporary.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(link))
    return link, {**{key: value for key, value in os.environ.items() if key != "HOME"}, **ODD, "TMPDIR": str(temporary)}


@pytest.mark.exhaustive
def test_a_run_notices_nothing_of_where_it_is(odd):
    place, environment = odd
    small = ("train.epochs=1", "model.name=mlp", "input.augmentation.crop_padding=0", "tracking.system_metrics=false")
    settings = [part for one in (*small, "register.minimum=0.0") for part in ("--set", one)]
    ran = subprocess.run(
        [*STRATAGEM, "run", "--json", *settings],
        cwd=place, env=environment, capture_output=True, preexec_fn=_in_odd_process, check=False, timeout=500,
    )  # fmt: skip
    said = ran.stderr.decode()
    assert ran.returncode == 0, said
    summary = json.loads(ran.stdout)
    assert summary["finished_at"].endswith("+00:00")
    assert "champion" in summary["aliases"]
    written = [path for path in (place / "mlruns").rglob("*") if path.is_file() and path.name not in (".gitkeep",)]
    assert [path for path in written if stat.S_IMODE(path.stat().st_mode) & 0o077] == []
    assert list(os.scandir(environment["TMPDIR"])) == []
    # What it says of the run fits nowhere here, and the reader of it leaves after a line.
    read, write = os.pipe()
    os.close(read)
    listed = subprocess.run(
        [*STRATAGEM, "runs"], cwd=place, env=environment, stdout=write, stderr=subprocess.PIPE, check=False,
        preexec_fn=_in_odd_process,
    )  # fmt: skip
    os.close(write)
    assert (listed.returncode, listed.stderr) == (128 + signal.SIGPIPE, b"")
