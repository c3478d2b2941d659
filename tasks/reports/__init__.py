"""What a person opens: pictures and tables of runs, of comparisons, and of what strategies offer.

A run's page is in `page`, with a file for a section or a few; it is not imported here, because its NumPy would delay
the commands that print tables.
"""

from tasks.report.columns import describe_columns, moments
from tasks.report.comparison import (
    comparison_cells,
    comparison_page,
    comparison_remarks,
    comparison_table,
    step_cells,
)
from tasks.report.findings import concluded
from tasks.report.pictures import augmented_examples, confusion_matrix, learning_curve, predictions, reliability
from tasks.report.strategies import offers, offers_cells, offers_page
from tasks.report.sweep import ranked, short_names, sweep_cells, sweep_remarks, sweep_table, text_of
from tasks.report.tables import history_table, metrics_table, predictions_table
