"""The processes that run stages: their requests, answers and restarts. Each ends with its parent process.

docs/processes.md describes the processes: who starts and ends them, and who signals whom. `stages` is the table of
requests: `client` and `child` send them, `cluster` forwards them to the members of a strategy, and `serve` answers in
the other process. `dvc_program` calls DVC. `system/child.py` starts each process, and `strategies/environment.py` has
its environment. `tasks/tracked.py` has the stages of a run, `tasks/experiments.py` those of comparisons and sweeps.
"""
