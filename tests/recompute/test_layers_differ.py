"""Recomputation where layers with and without a window, and with and without rotary embedding,
share a unit: no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

# a selective checkpoint imports it at its first operator: once here, not in every forked rank
import torch._dynamo

from tests.recompute.test_equality import NUM_LAYERS, faults, policies
from tests.support.equality import LLAMA
from tests.support.limits import HANG_S
from tests.support.models import tiny_config
from tests.support.pairs import sampled
from tests.support.ranks import run_ranks

DIFFERING: dict[str, Any] = dict(
    LLAMA,
    num_layers=NUM_LAYERS,
    window_size=(3, 0),
    window_attn_skip_freq=(1, 0, 1, 1, 0),
    no_rope_freq=(0, 1, 1, 0, 0),
)
MODELS = {
    "SDPA, residual dropout": tiny_config(**DIFFERING, hidden_dropout=0.1),
    "unfused, dropout, query groups": tiny_config(
        **DIFFERING,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        group_query_attention=True,
        num_query_groups=2,
    ),
}


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize(
    ("tp_size", "sequence_parallel", "dtype"),
    [
        (1, False, torch.float32),
        pytest.param(1, False, torch.bfloat16, marks=pytest.mark.long),
        pytest.param(2, False, torch.float32, marks=pytest.mark.long),
        pytest.param(2, True, torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_gradients_are_unchanged_to_the_bit(
    tp_size: int, sequence_parallel: bool, dtype: torch.dtype
) -> None:
    """Every policy of Megatron's flags, kept results of operators, host memory and one buffer."""
    named = sampled(
        policies(can_split=tp_size > 1 and not sequence_parallel),
        every=2,
        at_most=1 if (tp_size, dtype) == (1, torch.float32) else 4,
    )
    inputs = (sequence_parallel, dtype, dict.fromkeys(MODELS, named), MODELS)
    found = run_ranks(faults, tp_size, *inputs, detail=False, timeout=3 * HANG_S)
    assert found == [{}] * tp_size
