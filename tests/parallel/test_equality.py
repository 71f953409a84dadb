"""Ranks that share tensors and sequences compute what one rank computes: the loss and every
gradient, of every variant of a model.

Errors are relative to the largest value of their tensor (support/equality.py). What each tolerance
allows for:
    float64 1e-13   sums of a few hundred terms taken in another order, at 2e-16 each; a fault of
                    logic is above 1e-3
    float32 1e-5    the same at 1e-7 each
"""

from functools import cache

import pytest
import torch

from tests.support.equality import DIFFERING, OF_A_LAYOUT, VARIANTS, differences
from tests.support.models import Layout, loss_and_grads, tiny_config
from tests.support.pairs import FULL_GRIDS, sampled
from tests.support.ranks import run_ranks
from tests.support.saves import same


def length_of(layout):
    """Returns a length that is divisible by 2 c, and by t of it under sequence parallelism."""
    return 16 if layout.cp == 4 else 12


ALONE = Layout()
IN_CHUNKS = {"gpt2": 7, "llama": 7}  # --loss-chunk-size, tied and untied; one rank has none
LAYOUTS = [
    Layout(tp=2, sequence_parallel=True),
    Layout(tp=2),
    Layout(tp=4, sequence_parallel=True),
    Layout(tp=4),
    Layout(cp=2),
    Layout(cp=2, cp_comm_type="allgather"),
    Layout(tp=2, cp=2, sequence_parallel=True, cp_comm_type="allgather"),
    Layout(tp=2, cp=2, sequence_parallel=True),
    Layout(tp=2, cp=2),
    Layout(cp=2, cp_comm_type="a2a"),
    Layout(tp=2, cp=2, sequence_parallel=True, cp_comm_type="a2a"),
    Layout(cp=2, cp_comm_type=("p2p", "a2a") * 4),
    Layout(tp=2, cp=2, sequence_parallel=True, cp_comm_type=("a2a", "allgather") * 4),
    Layout(cp=3),
    Layout(cp=4),
    Layout(cp=4, cp_comm_type="allgather"),
]
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5}
# Under context parallelism a layer with a window builds its scores, also where the others run a
# kernel.
MODELS = {
    **VARIANTS,
    "gshard": {**VARIANTS["gshard"], **OF_A_LAYOUT},
    "flash windows": dict(DIFFERING, attention_backend="flash"),
    "unfused windows": dict(DIFFERING, attention_backend="unfused"),
}


def outcome(layout, name, dtype, seq_length):
    """The loss and the whole gradients, over two micro-batches."""
    with layout.state() as parallel:
        model = layout.model(
            tiny_config(**{"num_layers": 2, **MODELS[name]}),
            parallel,
            dtype=dtype,
            loss_chunk_size=None if layout == ALONE else IN_CHUNKS.get(name),
        )
        return loss_and_grads(model, parallel, seq_length=seq_length)


@cache
def expected(name, dtype, seq_length):
    alone = outcome(ALONE, name, dtype, seq_length)
    # else a parameter that is compared says nothing
    assert [key for key, grad in alone.grads.items() if not grad.any()] == []
    return alone


def cases_of(layout):
    """Models with dtypes. The default run has each second model, by turns of its layouts."""
    names = [*MODELS] if FULL_GRIDS else [*MODELS][LAYOUTS.index(layout) // 4 % 2 :: 2]
    return [(name, torch.float64) for name in names] + [
        (name, torch.float32) for name in sampled(names, every=5, at_most=3)
    ]


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_and_every_gradient_equal_those_of_one_rank(layout):
    """All ranks have the same bits: they update alike."""
    check(layout, cases_of(layout))


def check(layout, cases):
    def work(rank, world_size):
        return [outcome(layout, *case, length_of(layout)) for case in cases]

    for case, first, *others in zip(cases, *run_ranks(work, layout.ranks), strict=True):
        errors = differences(expected(*case, length_of(layout)), first)
        tolerance = TOLERANCES[case[1]]
        assert {key: error for key, error in errors.items() if not error < tolerance} == {}, case
        for other in others:
            assert torch.equal(first.loss, other.loss) and same(first.grads, other.grads), case
