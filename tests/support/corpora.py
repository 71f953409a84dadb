"""Token files for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron_lite.data.indexed import IndexedDatasetWriter, token_dtype


def written(
    prefix: str | Path, documents: Iterable[Sequence[int] | np.ndarray], *, vocab_size: int = 1000
) -> str:
    """Writes a pair of token files. Returns its prefix."""
    with IndexedDatasetWriter(str(prefix), token_dtype(vocab_size)) as writer:
        for ids in documents:
            writer.add_document(ids)
    return str(prefix)
