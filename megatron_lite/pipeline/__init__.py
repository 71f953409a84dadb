"""Floor 2: the pipeline, its order of micro-batches, and the transfers between its stages."""
