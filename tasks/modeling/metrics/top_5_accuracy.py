"""The share of examples whose class is among the five largest logits; the only ``top_<k>_accuracy`` that every
evaluation measures."""

from tasks.modeling.metrics import top_k

METRIC = top_k(5)
