"""Tables, charts and pages of runs, comparisons and sweeps.

`page` writes the page of a run from the `sections`; `comparison` and `sweep` write those of a comparison and a sweep.
Commands that print tables import `comparison`, `sweep` or `tables`, which need no NumPy.
"""
