from __future__ import annotations

import numpy as np

from megatron_lite.data.datasets import MockDataset


def test_a_sample_depends_on_seed_and_index_alone() -> None:
    sizes = ((5, 12, 300, 7), (9, 12, 300, 7), (5, 12, 300, 8))
    data, longer, other = (MockDataset(*size) for size in sizes)
    assert np.array_equal(data[3], longer[3]) and np.array_equal(data[3], data[3])
    assert not np.array_equal(data[3], data[2])
    assert not np.array_equal(data[3], other[3])
    assert (data[3].shape, data[3].dtype, len(data)) == ((13,), np.int64, 5)
