"""Spans against a brute force: split an array of row numbers with numpy and read off where each row
went."""

import itertools

import numpy as np
import pytest

from megatron_lite.parallel.parameter_spec import ParameterSpec
from tests.support.pairs import in_one_test

PADDING = -1
CASES = [
    (length, blocks, extra, tp_size)
    for length, blocks, extra, tp_size in itertools.product(
        (1, 5, 8, 12, 24, 30), (1, 2, 3), (0, 1, 3, 7, 40), (1, 2, 3, 4, 6)
    )
    if length % blocks == 0
    and (length + extra) % (blocks * tp_size) == 0
    and (blocks == 1 or extra == 0)
]


def brute_force_shards(length, blocks, extra, tp_size):
    """Each rank's row numbers, padding as -1."""
    rows = np.concatenate([np.arange(length), np.full(extra, PADDING)])
    return [
        np.concatenate(
            [part[rank] for part in (np.split(block, tp_size) for block in np.split(rows, blocks))]
        )
        for rank in range(tp_size)
    ]


@in_one_test("length, blocks, extra, tp_size", CASES)
def test_spans_say_where_each_row_stands(length, blocks, extra, tp_size):
    spec = ParameterSpec(
        global_shape=(3, length, 2),
        tp_dim=1,
        tp_blocks=blocks,
        padded_length=length + extra if extra else None,
    )
    for rank, expected in enumerate(brute_force_shards(length, blocks, extra, tp_size)):
        assert spec.local_shape(tp_size) == (3, len(expected), 2)
        rows = np.full(len(expected), PADDING)
        for span in spec.spans(rank, tp_size):
            assert span.length > 0
            rows[span.local_start : span.local_start + span.length] = np.arange(
                span.global_start, span.global_start + span.length
            )
        assert rows.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "spec, tp_size, message",
    [
        (
            ParameterSpec(global_shape=(7, 5), tp_dim=0),
            2,
            "a dim of 7 in 1 blocks is not divisible by tensor-parallel size 2",
        ),
        (ParameterSpec(global_shape=(12, 5), tp_dim=0, tp_blocks=2), 4, "a dim of 12 in 2 blocks"),
    ],
)
def test_a_dim_that_does_not_split_is_an_error(spec, tp_size, message):
    with pytest.raises(ValueError, match=message):
        spec.local_shape(tp_size)
