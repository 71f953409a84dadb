"""No policy changes a bit of a gradient however data-parallel ranks share out the weights, which a
replay must find gathered, and however early a gradient is sent."""

import pytest
import torch

from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.model.gpt import shard_model_
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.recompute.schedule import plan_stage
from tests.recompute.test_equality import MODELS, NUM_LAYERS, OPS, policies
from tests.support.layouts import LAYOUTS, backward
from tests.support.models import Layout, with_new_streams
from tests.support.pairs import sampled
from tests.support.ranks import run_ranks

GPT, LLAMA, *_ = MODELS.values()
SOME = (
    "uniform 2",
    "core_attn+layernorm+mlp",
    "pointwise",
    "*:pointwise@host",
    OPS[-1],
    f"{OPS[-1]}, verified",
)
SPLIT = ("uniform 1 split", "block 3 split", "*:full/2@split+host", "*:full/2@split, contiguous")


def gradients(config, parallel, place, layout, recompute, dtype):
    """This rank's pieces after one step of two micro-batches with dropout, and the loss."""
    fresh = with_new_streams(parallel)
    model = place.model(config, fresh, dtype=dtype, plan=plan_stage(recompute, NUM_LAYERS))
    shard_model_(model, fresh, layout)
    optimizer = Optimizer(model, OptimizerConfig(), fresh, layout)
    loss = torch.tensor(backward(model, optimizer, fresh, 0, sequences=8))
    optimizer.layout.gradients.reduce_()
    return {"loss": loss, **{piece.name: piece.grad.clone() for piece in optimizer.layout.pieces}}


@pytest.mark.runs
@pytest.mark.parametrize(
    "layout, place, config, dtype, chosen",
    [
        ("fsdp2", Layout(), GPT, torch.float32, ()),
        ("fsdp2, memory-efficient", Layout(), LLAMA, torch.bfloat16, SOME),
        ("fsdp2, no reshard", Layout(), GPT, torch.float32, SOME),
        ("zero1, overlap", Layout(), GPT, torch.float32, ()),
        ("fsdp2, memory-efficient", Layout(2, True), GPT, torch.float32, SOME),
        ("fsdp2", Layout(2), GPT, torch.float32, SPLIT),
        ("zero1, overlap", Layout(2, True), LLAMA, torch.bfloat16, SOME),
    ],
)
def test_gradients_are_those_without_recomputation(layout, place, config, dtype, chosen):
    def work(rank, world_size):
        found = {}
        with place.state() as parallel:
            named = policies(can_split=place.can_split)
            named = {name: named[name] for name in chosen or sampled(named, every=7, at_most=3)}
            expected = None
            for name, recompute in {"none": RecomputeConfig(), **named}.items():
                actual = gradients(config, parallel, place, LAYOUTS[layout], recompute, dtype)
                expected = expected or actual
                found[name] = [
                    key for key, value in expected.items() if not torch.equal(value, actual[key])
                ]
        return {name: keys for name, keys in found.items() if keys}

    assert run_ranks(work, 2 * place.ranks) == [{}] * 2 * place.ranks
