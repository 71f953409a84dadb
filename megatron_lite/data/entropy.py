"""The loss that a model can reach from token frequencies alone.

A model that has learned more than frequencies has a lower loss.
"""

from __future__ import annotations

import numpy as np

from megatron_lite.config.checks import InputError
from megatron_lite.data.indexed import IndexedDataset

BLOCK = 1 << 22


def unigram_entropy(prefix: str) -> float:
    """Returns the entropy of the token ids of a dataset, in nats per token.

    It equals the loss of the best unigram model of the dataset. Raises InputError if the dataset
    holds no tokens.
    """
    tokens = IndexedDataset(prefix).tokens
    if not len(tokens):
        raise InputError(f"{prefix}.bin holds no tokens")
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(tokens), BLOCK):
        block = np.bincount(tokens[start : start + BLOCK], minlength=len(counts))
        block[: len(counts)] += counts
        counts = block
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum())
