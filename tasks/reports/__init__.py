"""What a person opens: tables, charts and pages of runs, comparisons and sweeps.

`page` writes the page of a run from the sections in `contents`, `results` and `examples`; `side_by_side` compares runs.
Neither is imported here, because NumPy would delay the commands that print tables.
"""

from tasks.reports.comparison import (
    comparison_pages,
    comparison_remarks,
    comparison_table,
    figures_table,
    steps_table,
)
from tasks.reports.findings import concluded
from tasks.reports.sweep import ranked, short_names, sweep_cells, sweep_page, sweep_remarks, sweep_table, text_of
from tasks.reports.tables import (
    describe_columns,
    history_table,
    metrics_table,
    moments,
    predictions_table,
)
