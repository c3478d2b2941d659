"""Runs, metrics and models in MLflow; the only importer of mlflow.

A run is always addressed by its id, never as MLflow's "active run", which does not cross threads and leaves stray runs
behind.

MLflow takes seconds to import, and so do most modules of this package. ``trained_models`` does without it.
"""
