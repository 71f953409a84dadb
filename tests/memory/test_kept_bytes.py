"""The byte meter for any model: what policies spare on models of transformers, and what hooks alone
do not see."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from megatron_lite.memory.measure.kept_bytes import KeptBytes, measure_kept_bytes
from megatron_lite.recompute.apply import apply_policy_

S, B, H, V = 24, 3, 32, 61
INPUT = S * B * H * 4  # bytes of a layer's input in float32
STATES = 3 * 5056  # what a replay may keep of generators


def kept(policy: str | None, num_layers: int = 4) -> KeptBytes:
    """Of a model of transformers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=H,
        intermediate_size=40,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=S,
        vocab_size=V,
    )
    model = transformers.LlamaForCausalLM(config).train()
    if policy is not None:
        apply_policy_(model, layers_fqn="model.layers", policy=policy)
    tokens = torch.arange(S * B).view(B, S) % V
    with measure_kept_bytes(model) as meter:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    found = meter.measure(loss)
    loss.backward()
    del loss
    assert meter.measure().total == 0
    return found


def test_full_keeps_the_input_of_each_layer_and_every_second_spares_half_as_much() -> None:
    none, every_2, full = (kept(policy) for policy in (None, "every-2:full", "*:full"))
    assert none.beside == 0
    spared = none.total - full.total
    assert (
        2 * (none.total - every_2.total) == pytest.approx(spared, abs=2 * STATES)
        and spared > 4 * 5 * INPUT
    )
    of_a_layer = (full.total - kept("*:full", num_layers=2).total) / 2
    assert INPUT <= of_a_layer <= INPUT + STATES


class Squares(nn.Module):
    """x + (x W)^2, and so on; recomputed by torch's checkpoint in either mode, or selectively."""

    def __init__(self, **checkpointing: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(3))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:

            def run(x: Tensor, layer: nn.Module = layer) -> Tensor:
                return x + layer(x).square()

            x = checkpoint(run, x, **self.checkpointing) if self.checkpointing else run(x)
        return x


def saving_matmuls(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if "addmm" in str(operator)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def squares(**checkpointing: Any) -> KeptBytes:
    torch.manual_seed(4)
    model, x = Squares(**checkpointing), torch.randn(S, H, requires_grad=True)
    with measure_kept_bytes(model) as meter:
        y = model(x)
    return meter.measure(y)


def test_what_a_checkpoint_holds_outside_of_the_hooks_counts() -> None:
    """torch's selective checkpoint keeps results that no hook of ours is given."""
    row = S * H * 4
    none, full = squares(), squares(use_reentrant=False, preserve_rng_state=False)
    ops = squares(
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=partial(create_selective_checkpoint_contexts, saving_matmuls),
    )
    assert none == KeptBytes(saved=6 * row, beside=0)  # input and square's input of each layer
    # x existed before; whether the hooks see it is torch's affair
    assert full.total in (2 * row, 3 * row)
    assert ops.total == full.total + 3 * row and ops.beside >= 3 * row


def test_an_output_that_the_caller_holds_counts_only_where_it_is_saved() -> None:
    model = nn.Linear(H, H)
    x = torch.randn(S, H)
    with measure_kept_bytes(model) as meter:
        y = model(x)
        z = y.exp()
    assert meter.measure().total == 3 * S * H * 4  # x, and y and z that the block made
    assert meter.measure((y, z)).total == 2 * S * H * 4  # x, and z, which exp saves
    assert meter.measure({"any": [y]}).total == 2 * S * H * 4
