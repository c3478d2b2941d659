"""How good a run without settings is: on tables that ship with scikit-learn and statsmodels, next to boosting and a
linear model on the same rows."""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import sklearn.datasets
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegressionCV, RidgeCV
from sklearn.metrics import accuracy_score, mean_absolute_error, r2_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from benchmarks import measure

HEADING = "## Defaults on real tables\n"
SEEDS = (0, 1, 2)
TEST = 0.2
Figures = dict[str, float]


def _sklearn(load: Callable[..., Any], names: bool = False) -> pandas.DataFrame:
    loaded = load(as_frame=True)
    frame: pandas.DataFrame = loaded.frame
    if names:
        frame["target"] = frame["target"].map(dict(enumerate(map(str, loaded.target_names))))
    return frame


def _statsmodels(name: str) -> pandas.DataFrame:
    import statsmodels.api

    frame: pandas.DataFrame = getattr(statsmodels.api.datasets, name).load_pandas().data
    return frame


@dataclass(frozen=True)
class Table:
    """A table, what is learnt of it, and where it comes from."""

    load: Callable[[], pandas.DataFrame]
    target: str
    task: str
    source: str


def _anes96() -> pandas.DataFrame:
    frame = _statsmodels("anes96").drop(columns="logpopul")
    return frame.assign(vote=frame["vote"].map({0.0: "Clinton", 1.0: "Dole"}))


SKLEARN, STATSMODELS = "scikit-learn", "statsmodels"
CLASSIFICATION, REGRESSION = "classification", "regression"
TABLES = {
    "wine": Table(lambda: _sklearn(sklearn.datasets.load_wine, names=True), "target", CLASSIFICATION, SKLEARN),
    "cells": Table(
        lambda: _sklearn(sklearn.datasets.load_breast_cancer, names=True), "target", CLASSIFICATION, SKLEARN
    ),
    "anes96": Table(_anes96, "vote", CLASSIFICATION, STATSMODELS),
    "diabetes": Table(lambda: _sklearn(sklearn.datasets.load_diabetes), "target", REGRESSION, SKLEARN),
    "engel": Table(lambda: _statsmodels("engel"), "foodexp", REGRESSION, STATSMODELS),
    "grunfeld": Table(lambda: _statsmodels("grunfeld"), "invest", REGRESSION, STATSMODELS),
    "fair": Table(lambda: _statsmodels("fair"), "affairs", REGRESSION, STATSMODELS),
    "randhie": Table(lambda: _statsmodels("randhie"), "mdvis", REGRESSION, STATSMODELS),
}
METRICS = {CLASSIFICATION: ("accuracy",), REGRESSION: ("r2", "mae")}


def split(table: Table, seed: int) -> pandas.DataFrame:
    """Return the table with a column `split` that says train or test."""
    frame = table.load()
    classes = frame[table.target] if table.task == CLASSIFICATION else None
    _, test = train_test_split(np.arange(len(frame)), test_size=TEST, random_state=seed, stratify=classes)
    return frame.assign(split=np.where(np.isin(np.arange(len(frame)), test), "test", "train"))


def ours(name: str, table: Table, frame: pandas.DataFrame, seed: int, project: Path) -> Figures:
    """Add the table and run, as a user does: nothing is set but the seed and what the data are."""
    own = f"{name}{seed}"
    frame.to_csv(project / f"{own}.csv", index=False)
    described = {"dataset.split_column": "split", "dataset.task": table.task}
    add = measure.stratagem("data", "add", f"{own}.csv", "--target", table.target, settings=described)
    measure.watch(add, measure.without_server(), project)
    run = measure.stratagem("run", "--json", settings={"dataset.name": own, "train.seed": seed})
    metrics = json.loads(measure.watch(run, measure.without_server(), project).output)["metrics"]
    return {metric: metrics[f"test/{metric}"] for metric in METRICS[table.task]}


def peers(table: Table, frame: pandas.DataFrame, seed: int) -> dict[str, Figures]:
    """Train scikit-learn's boosting and a linear model on the same rows."""
    of_split = {name: rows.drop(columns="split") for name, rows in frame.groupby("split")}
    (x, y), (x_test, y_test) = (
        (rows.drop(columns=table.target), rows[table.target]) for rows in (of_split["train"], of_split["test"])
    )
    texts = [column for column in x if not pandas.api.types.is_numeric_dtype(x[column])]
    for column in texts:
        x[column] = x[column].astype("category")
        x_test[column] = x_test[column].astype(x[column].dtype)
    scaled = make_column_transformer(
        (OneHotEncoder(handle_unknown="ignore"), texts), remainder=StandardScaler(), sparse_threshold=0
    )
    if table.task == CLASSIFICATION:
        boosting: Any = HistGradientBoostingClassifier(random_state=seed, categorical_features="from_dtype")
        linear: Any = LogisticRegressionCV(
            use_legacy_attributes=False, l1_ratios=(0,), max_iter=5000, scoring="neg_log_loss"
        )
    else:
        boosting = HistGradientBoostingRegressor(random_state=seed, categorical_features="from_dtype")
        linear = RidgeCV(np.logspace(-3, 3, 13))
    found = {}
    for name, model in (("boosting", boosting), ("linear", make_pipeline(scaled, linear))):
        told = model.fit(x, y).predict(x_test)
        if table.task == CLASSIFICATION:
            found[name] = {"accuracy": float(accuracy_score(y_test, told))}
        else:
            found[name] = {"r2": float(r2_score(y_test, told)), "mae": float(mean_absolute_error(y_test, told))}
    return found


def lags(metric: str, mine: list[float], peer: list[float]) -> bool:
    """Return whether ours is worse than a peer by more than the spread: the mean of the differences on the same rows
    is larger than their deviation over the seeds."""
    differences = [(b - a) * (-1 if metric == "mae" else 1) for a, b in zip(mine, peer, strict=True)]
    return statistics.mean(differences) > statistics.stdev(differences)


def lines(name: str, table: Table, found: list[dict[str, Figures]], rows: int) -> list[str]:
    """Return the lines of one table: a line for each metric, the mean and the deviation over the seeds."""
    made = []
    for metric in METRICS[table.task]:
        values = {who: [one[who][metric] for one in found] for who in found[0]}
        shown = [f"{statistics.mean(of):.3f} ± {statistics.stdev(of):.3f}" for of in values.values()]
        behind = [who for who in values if who != "ours" and lags(metric, values["ours"], values[who])]
        told = " and ".join(behind) or "-"
        made.append(f"| {name} ({table.source}) | {rows:,} | {table.task} | {metric} | {' | '.join(shown)} | {told} |")
    return made


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure on all tables; return the page's section. Tables and seeds are these, whatever is asked."""
    table_lines, load = [], measure.Load()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        measure.watch(measure.stratagem("init", str(project), "--no-git"), folder=Path(folder))
        for name, table in TABLES.items():
            found, rows = [], 0
            for seed in SEEDS:
                frame = split(table, seed)
                rows = len(frame)
                found.append({"ours": ours(name, table, frame, seed, project), **peers(table, frame, seed)})
                print(f"defaults: {name}, seed {seed}: {found[-1]}", file=sys.stderr)
            table_lines += lines(name, table, found, rows)
    about = f"{len(SEEDS)} seeds, each with other test rows ({TEST:.0%}); mean ± standard deviation over the seeds."
    explained = (
        "Ours is `stratagem data add` and `stratagem run`, with only the seed, the task and the column of the test "
        "rows set. `boosting` is scikit-learn's HistGradientBoosting without options; `linear` "
        "is LogisticRegressionCV or RidgeCV, which choose their penalty by cross-validation, on standardised numbers "
        "and one-hot categories. All train on the same rows; ours validates on a tenth of them. It lags if the mean "
        "difference on the same rows is larger than its standard deviation."
    )
    head = [
        "| table | rows | task | metric | ours | boosting | linear | ours lags behind |",
        "|---|---|---|---|---|---|---|---|",
    ]
    packages = ("tensorflow", "keras", "scikit-learn", "statsmodels", "pandas")
    return measure.section(HEADING, packages, load.others(), about, [*head, *table_lines, "", explained])
