"""Causal attention in blocks of queries: against the softmax formula, and under each policy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.description.self_attention import attention_operations
from megatron_lite.description.sizes import QUERY_BLOCK, Sizes, query_blocks
from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.model.causal_attention import causal_attention
from megatron_lite.recompute.schedule import plan_stage
from tests.support.models import build_tiny_model, loss_and_grads, tiny_config, tp_state

# The last block is shorter than the others.
S, B, A, D = 2 * QUERY_BLOCK + 30, 2, 4, 6
SCALE = D**-0.5


def heads(groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a query, a key and a value in float32 that need gradients."""
    draw = torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn(S, B, count, D, generator=draw).requires_grad_()
        for count in (A, groups, groups)
    )
    return query, key, value


def formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns the attention through the whole matrix of scores, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = (x.repeat_interleave(A // x.shape[2], 2) for x in (key, value))
    scores = torch.einsum("ibhd,jbhd->bhij", query, key) * SCALE
    scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("bhij,jbhd->ibhd", scores.softmax(-1), value)


@pytest.mark.parametrize("groups", [A, 2])
def test_blocks_and_their_gradients_equal_the_softmax_formula(groups: int) -> None:
    leaves = heads(groups)
    output, expected = causal_attention(*leaves, scale=SCALE), formula(*leaves)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(6))
    own = torch.autograd.grad(output, leaves, grad)
    theirs = torch.autograd.grad(expected, leaves, grad.double())
    for one, other in zip((output, *own), (expected, *theirs), strict=True):
        # float32 sums of up to 286 terms of size 1
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("seq_length", "element_bytes", "device", "number"),
    [
        (255, 4, "cpu", 1),
        (256, 4, "cpu", 2),
        (257, 4, "cpu", 3),
        (512, 4, "cpu", 4),
        (513, 4, "cpu", 1),
        (512, 2, "cpu", 1),
        (512, 8, "cpu", 1),
        (512, 4, "cuda", 1),
    ],
)
def test_the_blocks_cover_every_query_once(
    seq_length: int, element_bytes: int, device: str, number: int
) -> None:
    blocks = query_blocks(seq_length, element_bytes, device)
    assert len(blocks) == number
    assert [i for block in blocks for i in range(block.start, block.stop)] == [*range(seq_length)]


def test_every_policy_gives_the_same_bits() -> None:
    config = tiny_config(num_layers=2, max_position_embeddings=S, attention_backend="flash")
    outcomes = {}
    with tp_state(1) as parallel:
        for policy in ("*:none", "*:ops(attention)", "*:core_attn", "*:full/1"):
            plan = plan_stage(RecomputeConfig(recompute_policy=policy), config.num_layers)
            model = build_tiny_model(config, parallel, dtype=torch.float32, plan=plan)
            outcomes[policy] = loss_and_grads(model, parallel, micro_batches=1, seq_length=S)
    none = outcomes["*:none"]
    for policy, outcome in outcomes.items():
        assert torch.equal(outcome.loss, none.loss), policy
        for name, grad in outcome.grads.items():
            assert torch.equal(grad, none.grads[name]), (policy, name)


def test_attention_in_blocks_keeps_what_the_description_says() -> None:
    config = tiny_config(num_attention_heads=A, kv_channels=D, attention_backend="flash")
    sizes = Sizes(micro_batch_size=B, seq_length=S, padded_vocab_size=64)
    described = [one for part in attention_operations(config, sizes, 0) for one in part.keeps]
    with kept_for_backward() as meter:
        output = causal_attention(*heads(A), scale=SCALE)
    kept = sum(one.num_bytes for one in meter.storages().values())
    assert kept == sum(tensor.num_bytes for tensor in described)
    assert output.requires_grad  # what is kept lives as long as the output
