from __future__ import annotations

import numpy as np
import pytest

from megatron_lite.data.mock import MockDataset


def test_a_sample_depends_on_seed_and_index_alone() -> None:
    data, longer, other = (
        MockDataset(5, 12, 300, 7),
        MockDataset(9, 12, 300, 7),
        MockDataset(5, 12, 300, 8),
    )
    assert np.array_equal(data[3], longer[3]) and np.array_equal(data[3], data[3])
    assert not np.array_equal(data[3], data[2])
    assert not np.array_equal(data[3], other[3])
    assert (data[3].shape, data[3].dtype, len(data)) == ((13,), np.int64, 5)


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 1000])
def test_ids_are_inside_the_vocabulary_and_spread_over_it(vocab_size: int) -> None:
    ids = np.concatenate([MockDataset(40, 100, vocab_size, 1)[number] for number in range(40)])
    assert ids.min() == 0 and ids.max() < vocab_size
    assert len(set(ids.tolist())) == min(64, vocab_size)
    assert ids.max() >= vocab_size * 63 // 64


def test_the_next_id_can_be_learned_as_far_as_the_docstring_says() -> None:
    """It is 7 places on with probability 0.9 + 0.1 / 64, else any of the 63 others: 0.729 nats.
    Over 200,000 tokens."""
    rows = np.stack([MockDataset(200, 1000, 64, 1)[number] for number in range(200)])
    steps = np.bincount(((rows[:, 1:] - rows[:, :-1]) % 64).ravel(), minlength=64) / 200_000
    follows, others = 0.9 + 0.1 / 64, 0.1 / 64
    assert steps[7] == pytest.approx(follows, abs=0.003)  # 4.5 standard deviations
    assert np.delete(steps, 7) == pytest.approx(others, abs=0.0005)
    # 4.16 nats without looking back
    assert np.bincount(rows.ravel()) / rows.size == pytest.approx(1 / 64, abs=0.003)
    assert -follows * np.log(follows) - 63 * others * np.log(others) == pytest.approx(
        0.729, abs=5e-4
    )


@pytest.mark.parametrize("index", [-1, 5])
def test_no_sample_outside_the_range(index: int) -> None:
    with pytest.raises(IndexError):
        MockDataset(5, 12, 300, 7)[index]
