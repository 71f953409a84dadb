"""Ranks that share each sequence compute what one rank computes alone: loss, gradients, weights
after training.

Tolerances as in tests/tensor_parallel/test_equality.py: sums in another order, relative to the
largest value of a tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from megatron_lite.parallel.state import ParallelState
from tests.support.equality import VARIANTS, differences, gradients, unsharded_gradients
from tests.support.models import Outcome, tp_state
from tests.support.ranks import run_ranks


class Layout(NamedTuple):
    """What is left of the world is data-parallel. seq_length: divisible by 2 c, and by t of it
    under sequence parallelism."""

    world_size: int
    tp_size: int
    cp_size: int
    sequence_parallel: bool = False
    cp_comm_type: str = "p2p"
    seq_length: int = 12

    @property
    def name(self) -> str:
        sequence = "-sequence-parallel" if self.sequence_parallel else ""
        context = f"cp{self.cp_size}-{self.cp_comm_type}"
        return f"tp{self.tp_size}{sequence}-{context}-world{self.world_size}"


LAYOUTS = [
    Layout(2, 1, 2),
    Layout(2, 1, 2, cp_comm_type="allgather"),
    Layout(3, 1, 3),
    Layout(4, 1, 4, seq_length=16),
    Layout(4, 1, 4, cp_comm_type="allgather", seq_length=16),
    Layout(4, 2, 2),
    Layout(4, 2, 2, True),
    Layout(4, 2, 2, True, "allgather"),
]
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-5}


def outcomes(layout: Layout, parallel: ParallelState) -> dict[tuple[str, torch.dtype], Outcome]:
    return {
        (name, dtype): gradients(
            name,
            parallel,
            sequence_parallel=layout.sequence_parallel,
            dtype=dtype,
            cp_comm_type=layout.cp_comm_type,
            seq_length=layout.seq_length,
        )
        for name in VARIANTS
        for dtype in TOLERANCES
    }


def check_gradients(layout: Layout) -> None:
    def work(rank: int, world_size: int) -> dict[tuple[str, torch.dtype], Outcome]:
        with tp_state(layout.tp_size, cp_size=layout.cp_size) as parallel:
            return outcomes(layout, parallel)

    first, *others = run_ranks(work, layout.world_size, detail=False)
    for (name, dtype), outcome in first.items():
        errors = differences(unsharded_gradients(name, dtype, layout.seq_length), outcome)
        assert {
            (name, key): error for key, error in errors.items() if not error < TOLERANCES[dtype]
        } == {}
        for other in others:  # all ranks update alike
            assert all(
                torch.equal(grad, other[name, dtype].grads[key])
                for key, grad in outcome.grads.items()
            )


# What a default run has: either exchange.
DEFAULT = {Layout(2, 1, 2), Layout(2, 1, 2, cp_comm_type="allgather")}


def marked(layouts: list[Layout], default: set[Layout]) -> list[Any]:
    """Parameters, those outside of `default` left to .ci/run."""
    return [
        pytest.param(layout, id=layout.name, marks=[pytest.mark.long] * (layout not in default))
        for layout in layouts
    ]


@pytest.mark.runs(daily=1, ci=3)
@pytest.mark.parametrize("layout", marked(LAYOUTS, DEFAULT))
def test_loss_and_every_gradient_equal_those_of_one_rank(layout: Layout) -> None:
    """Learned positions and rotary ones, query groups, flash and unfused attention: all variants,
    in both precisions."""
    check_gradients(layout)
