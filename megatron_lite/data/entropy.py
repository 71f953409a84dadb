"""How far a loss can fall from counting tokens alone: a model that has learned more than frequencies is below it."""

from __future__ import annotations

import numpy as np

from megatron_lite.config.checks import InputError
from megatron_lite.data.indexed import IndexedDataset

BLOCK = 1 << 22


def unigram_entropy(prefix: str) -> float:
    """The entropy in nats per token of the distribution of token ids in a dataset: the loss of its best unigram model."""
    tokens = IndexedDataset(prefix).tokens
    if not len(tokens):
        raise InputError(f"{prefix}.bin holds no tokens")
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(tokens), BLOCK):
        block = np.bincount(tokens[start:start + BLOCK], minlength=len(counts))
        block[:len(counts)] += counts
        counts = block
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum())
