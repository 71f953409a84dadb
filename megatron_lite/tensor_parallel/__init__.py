"""Floor 2: layers sharded over the tensor-parallel group (arXiv 1909.08053, 2205.05198)."""
