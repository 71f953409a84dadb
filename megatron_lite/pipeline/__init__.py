"""The pipeline: which rank runs which micro-batch when, and how tensors travel between stages."""
