import subprocess
import sys
from pathlib import Path

from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.operate import reconciliation
from tasks import records
from tasks.runs import locks, outcome

DYING = """
import os
from tasks.runs import locks
with locks.lock("k", "a training", "no id of Prefect"):
    os._exit(1)
"""


def test_what_names_no_flow_run_stops_no_start(project):
    subprocess.run([sys.executable, "-c", DYING], check=False)
    outcome.keep_unreported(records.FlowEnd(flow_run_id="no id of Prefect", state="COMPLETED", message=""))
    Path("mlruns/unreported/half.json").write_text("{")
    assert len(locks.crashed_holders()) == 1
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert reconciliation.end_crashed_flow_runs() == []
