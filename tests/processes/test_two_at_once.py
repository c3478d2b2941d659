import contextlib
import json
import os
import sqlite3
import subprocess

import pytest


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_first_runs_at_the_same_moment_both_finish(project, tmp_path):
    """Neither data, nor an MLflow store, nor Prefect's database is there: each is made once, the other waits."""
    home = tmp_path / "prefect"
    environment = os.environ | {"PREFECT_HOME": str(home)}
    runs = [
        subprocess.Popen(
            ["stratagem", "run", "--json", "--set", "train.epochs=2", "--set", f"train.seed={seed}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    try:
        said = [process.communicate(timeout=1200) for process in runs]
    finally:
        for process in runs:
            process.kill()
            process.wait()
    assert [process.returncode for process in runs] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    assert first["run_id"] != second["run_id"]
    assert first["weights_digest"] != second["weights_digest"], "each trained with its own seed"
    assert first["data_version"] == second["data_version"] is not None
    assert {first["model_version"], second["model_version"]} == {"digits-convnet2/1", "digits-convnet2/2"}
    by_version = {one["model_version"][-1]: one["judgement"] for one in (first, second)}
    assert by_version["1"]["reason"] == "the first model that passes the gate"
    assert (by_version["2"]["against"], by_version["2"]["num_examples"]) == ("1", 360), "one after the other"
    with contextlib.closing(sqlite3.connect(project / "mlruns/mlflow.db")) as database:
        given = database.execute("SELECT alias, version FROM registered_model_aliases ORDER BY alias").fetchall()
    assert given == [("challenger", 2), ("champion", 2 if by_version["2"]["promoted"] else 1)]
    for name, query, expected in (
        (project / "mlruns/mlflow.db", "SELECT run_uuid, status FROM runs", "FINISHED"),
        (home / "prefect.db", "SELECT id, state_type FROM flow_run", "COMPLETED"),
    ):
        with contextlib.closing(sqlite3.connect(name)) as database:
            states = dict(database.execute(query).fetchall())
        assert list(states.values()) == [expected, expected]
    for _, err in said:
        assert "Traceback" not in err
