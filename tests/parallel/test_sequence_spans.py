"""The spans of a sequence: each token on one rank, in order within a span, with the same causal
work on every rank."""

import pytest

from megatron_lite.parallel.sequence_spans import part_of, spans_of


def positions(size, rank, length):
    return [
        place
        for span in spans_of(length, rank=rank, size=size)
        for place in range(span.start, span.stop)
    ]


def test_rank_i_holds_spans_i_and_2c_minus_1_minus_i():
    """The order of Megatron's get_batch_on_this_cp_rank, in which its data and its ring agree."""
    assert [positions(2, rank, 8) for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [positions(3, rank, 6) for rank in (0, 1, 2)] == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize(
    ("size", "shards"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (4, 3)]
)
def test_parts_of_a_ranks_tokens_are_stretches_of_its_positions(size, shards):
    """As sequence parallelism cuts them; with 3 shards one lies across both spans."""
    own = 48 // size
    for rank in range(size):
        spans, whole = spans_of(48, rank=rank, size=size), positions(size, rank, 48)
        for shard in range(shards):
            part = part_of(spans, shard * own // shards, own // shards)
            found = [place for span in part for place in range(span.start, span.stop)]
            assert found == whole[shard * own // shards : (shard + 1) * own // shards]
