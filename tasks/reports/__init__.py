"""What a person opens: tables, pictures and pages of runs, comparisons and sweeps.

`page` writes the page of a run from the sections in `contents`, `results` and `examples`, `comparison_html` that of a
comparison, and `sweep` that of a sweep. The first two are not imported here, because NumPy would delay the commands
that print tables.
"""

from tasks.reports.comparison import comparison_cells, comparison_page, comparison_remarks, comparison_table, step_cells
from tasks.reports.findings import concluded
from tasks.reports.pictures import augmented_examples, confusion_matrix, learning_curve, predictions, reliability
from tasks.reports.sweep import ranked, short_names, sweep_cells, sweep_page, sweep_remarks, sweep_table, text_of
from tasks.reports.tables import (
    describe_columns,
    history_table,
    metrics_table,
    moments,
    offers,
    offers_cells,
    offers_page,
    predictions_table,
)
