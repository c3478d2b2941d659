"""What a person opens: pictures and tables of runs, of comparisons, and of what strategies offer.

A run's page is in `page`, with a file for a section or a few; it is not imported here, because its NumPy would delay
the commands that print tables.
"""

from tasks.reports.columns import describe_columns, moments
from tasks.reports.comparison import comparison_cells, comparison_page, comparison_remarks, comparison_table, step_cells
from tasks.reports.findings import concluded
from tasks.reports.pictures import augmented_examples, confusion_matrix, learning_curve, predictions, reliability
from tasks.reports.strategies import offers, offers_cells, offers_page
from tasks.reports.sweep import ranked, short_names, sweep_cells, sweep_remarks, sweep_table, text_of
from tasks.reports.tables import history_table, metrics_table, predictions_table
