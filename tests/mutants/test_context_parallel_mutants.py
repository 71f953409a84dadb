"""Mistakes in attention over context-parallel ranks, each put back: a named test must fail."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from megatron_lite.context_parallel import exchange
from megatron_lite.context_parallel import sharded_attention as attention
from megatron_lite.context_parallel.attention_kernels import attend
from megatron_lite.model import embedding
from megatron_lite.parallel import sequence_spans
from tests.context_parallel import test_attention, test_equality
from tests.context_parallel.test_equality import Layout
from tests.support.changes import with_fields
from tests.support.mutants import Mutant, assert_seen, parameters, replaces

Patch = pytest.MonkeyPatch


@replaces("spans_of", sequence_spans)
def spans_in_the_order_of_the_ranks(
    _: Any, length: int, *, rank: int, size: int
) -> tuple[slice, ...]:
    """Rank i holds i and c + i."""
    part = length // (2 * size)
    return tuple(slice(place * part, (place + 1) * part) for place in (rank, size + rank))


@replaces("merge_", attention)
def the_log_sum_exp_stays_that_of_the_first_part(real, total, part):
    merged = with_fields(total, lse=total.lse.clone())
    real(merged, part)


@replaces("attend_backward", attention)
def backward_with_the_log_sum_exp_of_each_part(
    real, grad_output, query, key, value, attended, *, causal, scale
):
    return real(
        grad_output,
        query,
        key,
        value,
        attend(query, key, value, causal=causal, scale=scale),
        causal=causal,
        scale=scale,
    )


@replaces("result", exchange.RingSum)
def gradients_of_keys_stop_one_rank_before_home(_, self):
    self._travelling.wait()
    return self._travelling.operand


@replaces("part_of", embedding)
def learned_positions_count_from_zero_on_every_rank(_, spans, start, length):
    return (slice(start, start + length),)


@replaces("positions_by_rank", sequence_spans.ContextParallel)
def unfused_masks_as_if_keys_were_gathered_in_order(real, self, num_tokens, device):
    return real(self, num_tokens, device).flatten().sort().values.view(self.size, num_tokens)


FORMULA = partial(
    Mutant,
    test=test_attention.test_output_and_gradients_are_those_of_the_formula,
    arguments=dict(cp_size=3),
)
EQUALITY = partial(
    Mutant,
    test=test_equality.test_loss_and_every_gradient_equal_those_of_one_rank,
    arguments=dict(layout=Layout(2, 1, 2)),
)
MUTANTS = [
    *(
        FORMULA(fault)
        for fault in (
            spans_in_the_order_of_the_ranks,
            the_log_sum_exp_stays_that_of_the_first_part,
            backward_with_the_log_sum_exp_of_each_part,
            gradients_of_keys_stop_one_rank_before_home,
        )
    ),
    EQUALITY(unfused_masks_as_if_keys_were_gathered_in_order),
    EQUALITY(learned_positions_count_from_zero_on_every_rank, long=True),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_the_mistake_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_seen(mutant, monkeypatch)
