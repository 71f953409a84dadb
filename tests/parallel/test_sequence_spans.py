"""The spans of a sequence: each token on one rank, in order within a span, with the same causal
work on every rank."""

from megatron_lite.parallel.sequence_spans import spans_of


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
