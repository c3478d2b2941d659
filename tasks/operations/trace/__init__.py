"""The chain from a source of data, by commit and run, to a version of a model, from any of its ends.

What a reference means (`references`), and what that hangs together with (`links`, `data_links`), by the records of runs
and by MLflow's registry (`known`).
"""

from tasks.operations.trace.references import trace
