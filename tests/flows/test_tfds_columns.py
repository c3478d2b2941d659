"""Builders of TFDS with columns, as stock ones are, become models that take raw rows: one command each."""

import json
import sys

import numpy as np
import pytest

from tests.tasks.test_tfds_columns import BUILDERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
PREDICT = """
import json, sys
import mlflow, pandas as pd
from tasks import config

mlflow.set_tracking_uri(f"sqlite:///{config.project_root()}/mlruns/mlflow.db")
model = mlflow.pyfunc.load_model(sys.argv[1])
print(json.dumps(model.predict(pd.DataFrame(json.loads(sys.argv[2]))).tolist()))
"""
ROW = {"name": "Doe, Mr. Jo", "age": 30.0, "sibsp": 1, "cabin": "A1", "boat": "2"}
# Each: what its test metric reaches, rows as a person gives them, and the class or the number of each.
CASES = {
    "Titanic": (
        ("test/accuracy", 0.95),
        [
            ROW | {"sex": "male", "crew": False},
            ROW | {"sex": "female", "crew": False},
            ROW | {"sex": "male", "crew": True},
        ],
        [0, 1, 1],
    ),
    "Penguins": (
        ("test/accuracy", 0.95),
        [
            {"island": "Biscoe", "body_mass_g": 3000.0, "sex": "MALE"},
            {"island": "Torgersen", "body_mass_g": None, "sex": "NA"},
        ],
        [0, 2],
    ),
    "Diamonds": (("test/r2", 0.95), [{"carat": 1.0, "cut": "Fair"}, {"carat": 2.0, "cut": "Ideal"}], [1000, 4000]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "Titanic" else pytest.mark.exhaustive) for name in CASES]
)
@pytest.mark.exhaustive
def test_columns_of_a_builder_lead_to_a_model_that_takes_raw_rows(name, project, run):
    (metric, reached), rows, expected = CASES[name]
    (project / "my_builders.py").write_text(BUILDERS)
    added = run(["stratagem", "data", "add", f"my_builders:{name}", "--json"])
    assert added.returncode == 0, added.stderr
    folder = json.loads(added.stdout)["name"]
    assert f"data/{folder}/params.yaml may say otherwise (dataset.columns):" in added.stderr
    trained = run(["stratagem", "run", "--json", "--set", f"dataset.name={folder}", "--set", "train.epochs=60"])
    assert trained.returncode == 0, trained.stderr
    assert " steps (but for what was given: train.epochs)\n" in trained.stderr
    summary = json.loads(trained.stdout)
    assert summary["metrics"][metric] > reached
    used = run([sys.executable, "-c", PREDICT, summary["model_uri"], json.dumps(rows)])
    assert used.returncode == 0, used.stderr
    found = json.loads(used.stdout.splitlines()[-1])
    if metric == "test/accuracy":
        assert np.argmax(found, 1).tolist() == expected
    else:
        assert np.ravel(found).tolist() == pytest.approx(expected, rel=0.25)

    streamed = run(["stratagem", "run", "--set", f"dataset.name={folder}", "--set", "input.source=stream"])
    assert streamed.returncode == 2
    assert f"input.source = 'stream': each example of {folder} has the columns " in streamed.stderr
