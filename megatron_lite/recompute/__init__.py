"""Floor 2: activation recomputation (arXiv 2205.05198). Plans as data, and the engines for them."""
