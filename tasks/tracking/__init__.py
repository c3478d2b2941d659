"""Runs, metrics and models in MLflow; the only package that imports mlflow.

Runs are always addressed by id, never as MLflow's "active run", which is local to a thread and can leave stray runs.

MLflow takes seconds to import, and so do most modules of this package; ``trained_models`` does not import it.
"""
