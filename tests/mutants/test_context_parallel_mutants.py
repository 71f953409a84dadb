"""Mistakes in attention over context-parallel ranks, each put back: a named test must fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.parallel import DataParallelConfig
from megatron_lite.context_parallel import exchange
from megatron_lite.context_parallel import sharded_attention as attention
from megatron_lite.context_parallel.attention_kernels import attend
from megatron_lite.model import embedding, gpt
from megatron_lite.optim import grad_buffer
from megatron_lite.parallel import sequence_spans
from megatron_lite.parallel.collectives import Started
from megatron_lite.parallel.state import ParallelState
from megatron_lite.training import step
from tests.context_parallel import test_attention, test_equality, test_run
from tests.context_parallel.test_equality import Layout
from tests.support.changes import with_fields
from tests.support.mutants import Mutant, assert_seen, parameters, replaces

Patch = pytest.MonkeyPatch


@replaces("spans_of", sequence_spans)
def each_rank_holds_one_stretch(_, length, *, rank, size):
    return (slice(rank * length // size, (rank + 1) * length // size),)


@replaces("spans_of", sequence_spans)
def spans_in_the_order_of_the_ranks(
    _: Any, length: int, *, rank: int, size: int
) -> tuple[slice, ...]:
    """Rank i holds i and c + i."""
    part = length // (2 * size)
    return tuple(slice(place * part, (place + 1) * part) for place in (rank, size + rank))


@replaces("merge_", attention)
def parts_are_added_without_rescaling(_, total, part):
    return total.output.add_(part.output)


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


@replaces("_reading", attention)
def own_keys_are_read_ahead(real, *args):
    return with_fields(real(*args), causal=False)


@replaces("p2p", exchange.EXCHANGES)
def the_ring_turns_the_other_way(real: exchange.Exchange) -> exchange.Exchange:
    """What comes from the rank before is taken for what the rank after sent."""

    def parts(own, group):
        for part in exchange.around_the_ring(own, group):
            yield with_fields(part, source=(2 * group.rank() - part.source) % group.size())

    return exchange.Exchange(parts, exchange.RingSum)


@replaces("result", exchange.RingSum)
def gradients_of_keys_stop_one_rank_before_home(_, self):
    self._travelling.wait()
    return self._travelling.operand


@replaces("part_of", embedding)
def learned_positions_count_from_zero_on_every_rank(_, spans, start, length):
    return (slice(start, start + length),)


@replaces("select", gpt)
def rotary_positions_count_from_zero_on_every_rank(_, table, spans, dim):
    return table[: sum(span.stop - span.start for span in spans)]


@replaces("positions_by_rank", sequence_spans.ContextParallel)
def unfused_masks_as_if_keys_were_gathered_in_order(real, self, num_tokens, device):
    return real(self, num_tokens, device).flatten().sort().values.view(self.size, num_tokens)


@replaces("start_all_reduce_", grad_buffer)
def gradients_are_not_summed(_, tensor, group):
    return Started(tensor, None)


@replaces("dp_cp_size", ParallelState)
def the_loss_is_the_mean_over_data_parallel_ranks_alone(_, self):
    return self.dp_size


@replaces("all_reduce_", step)
def only_data_parallel_ranks_add_up_the_loss(_, tensor, group):
    return tensor


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
            each_rank_holds_one_stretch,
            spans_in_the_order_of_the_ranks,
            parts_are_added_without_rescaling,
            the_log_sum_exp_stays_that_of_the_first_part,
            backward_with_the_log_sum_exp_of_each_part,
            own_keys_are_read_ahead,
            the_ring_turns_the_other_way,
            gradients_of_keys_stop_one_rank_before_home,
        )
    ),
    *(
        EQUALITY(fault)
        for fault in (
            rotary_positions_count_from_zero_on_every_rank,
            unfused_masks_as_if_keys_were_gathered_in_order,
        )
    ),
    *(
        EQUALITY(fault, long=True)
        for fault in (learned_positions_count_from_zero_on_every_rank, gradients_are_not_summed)
    ),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_the_mistake_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_seen(mutant, monkeypatch)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(the_loss_is_the_mean_over_data_parallel_ranks_alone, marks=pytest.mark.long),
        pytest.param(only_data_parallel_ranks_add_up_the_loss, marks=pytest.mark.long),
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_run_shows_the_mistake(
    fault: Callable[[Patch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_run.test_ten_losses_and_the_validation_loss_are_those_of_one_rank(
            tmp_path, test_run.NO_DROPOUT, 2, {}, DataParallelConfig()
        )
