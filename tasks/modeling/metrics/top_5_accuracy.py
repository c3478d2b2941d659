"""The share of examples whose class is among the five largest logits: of all ``top_<k>_accuracy`` the one that each
evaluation measures."""

from tasks.modeling.metrics import top_k

METRIC = top_k(5)
