"""Callbacks, the same for every training loop; the training stage defines their order."""
