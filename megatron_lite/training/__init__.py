"""Floor 5: the training loop, evaluation, metrics and logs."""
