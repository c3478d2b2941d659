"""DVC's page of plots, as it is without a network: its tables are drawn by scripts that a CDN has."""

import shutil

import pytest

pytestmark = pytest.mark.slow


def test_dvcs_plots_show_the_pictures_without_a_network(project, run, page):
    metrics = project / "metrics"
    metrics.mkdir()
    for name in ("learning_curve.png", "predictions.png"):
        shutil.copyfile(project / "docs" / "images" / "confusion-matrix.png", metrics / name)
    (metrics / "history.csv").write_text(
        "epoch,train/loss,validation/loss,train/accuracy,validation/accuracy\n1,1,1,0,0\n"
    )
    (metrics / "predictions.csv").write_text("actual,predicted\n0,0\n")
    plotted = run(["dvc", "plots", "show", "--out", "plots"])
    assert plotted.returncode == 0, plotted.stderr
    shown = page((project / "plots" / "index.html").as_uri())
    shown.wait_for("location.protocol == 'file:' && document.readyState == 'complete'")
    names = shown.run("[...document.images].filter(one => one.naturalWidth).map(one => one.src.split('/').pop())")
    assert sorted(names) == ["workspace_metrics_learning_curve.png", "workspace_metrics_predictions.png"]
