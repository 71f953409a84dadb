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
from tests.support.models import build_tiny_model, tp_state, with_new_streams
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


def gradients(config, parallel, layout, recompute, *, sequence_parallel, dtype):
    """This rank's pieces after one step of two micro-batches with dropout, and the loss."""
    fresh = with_new_streams(parallel)
    model = build_tiny_model(
        config,
        fresh,
        sequence_parallel=sequence_parallel,
        dtype=dtype,
        plan=plan_stage(recompute, NUM_LAYERS),
    )
    shard_model_(model, fresh, layout)
    optimizer = Optimizer(model, OptimizerConfig(), fresh, layout)
    loss = torch.tensor(backward(model, optimizer, fresh, 0, sequences=8))
    optimizer.layout.gradients.reduce_()
    return {"loss": loss, **{piece.name: piece.grad.clone() for piece in optimizer.layout.pieces}}


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize(
    ("layout", "tp_size", "sequence_parallel", "config", "dtype", "chosen"),
    [
        ("fsdp2", 1, False, GPT, torch.float32, ()),
        ("fsdp2, memory-efficient", 1, False, LLAMA, torch.bfloat16, SOME),
        ("fsdp2, no reshard", 1, False, GPT, torch.float32, SOME),
        ("fsdp2, memory-efficient", 2, True, GPT, torch.float32, SOME),
        ("fsdp2", 2, False, GPT, torch.float32, SPLIT),
        ("zero1, overlap", 1, False, GPT, torch.float32, ()),
        ("zero1, overlap", 2, True, LLAMA, torch.bfloat16, SOME),
    ],
)
def test_gradients_are_those_without_recomputation(
    layout, tp_size, sequence_parallel, config, dtype, chosen
):
    def work(rank, world_size):
        found = {}
        with tp_state(tp_size) as parallel:
            named = policies(can_split=tp_size > 1 and not sequence_parallel)
            named = {name: named[name] for name in chosen or sampled(named, every=4, at_most=3)}
            expected = None
            for name, recompute in {"none": RecomputeConfig(), **named}.items():
                actual = gradients(
                    config,
                    parallel,
                    LAYOUTS[layout],
                    recompute,
                    sequence_parallel=sequence_parallel,
                    dtype=dtype,
                )
                expected = expected or actual
                found[name] = [
                    key for key, value in expected.items() if not torch.equal(value, actual[key])
                ]
        return {name: keys for name, keys in found.items() if keys}

    assert run_ranks(work, 2 * tp_size) == [{}] * 2 * tp_size
