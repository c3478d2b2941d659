"""The runs in mlruns/: finding them (`entries`), locking them and cleaning up after killed processes (`locks`), their
status and the results of their stages (`outcome`), resuming them (`entries`, `resume`), listing and comparing them
(`listing`), freeing disk space (`pruning`), their origin (`lineage`, `repository`; `dvc` has the lock and the settings
of DVC) and their remote copy (`remote`).
"""
