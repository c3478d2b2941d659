"""Tables, charts and pages of runs, comparisons and sweeps.

`page` writes the page of a run from the sections in `contents`, `results` and `examples`; `comparison` and `sweep`
write those of a comparison and a sweep; `side_by_side` compares runs. Commands that print tables import `comparison`,
`sweep` or `tables`, which need no NumPy.
"""
