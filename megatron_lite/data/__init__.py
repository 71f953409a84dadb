"""Floor 1: tokenizers, indexed datasets, sample order. No torch."""
