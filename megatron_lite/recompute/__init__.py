"""Floor 2: activation recomputation: plans as data, and the engine that runs them (arXiv 2205.05198)."""
