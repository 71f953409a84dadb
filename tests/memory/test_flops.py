"""The FLOP formulas against torch's own counter, to the last FLOP.

Attention is mostly unfused here: the counter knows torch's flash kernels of CUDA, and counts
nothing for the one of a CPU.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.memory.predict.flops import forward_flops, hardware_flops, peak_flops, step_flops
from megatron_lite.recompute.recompute_plan import keep_everything
from tests.support.equality import VARIANTS, variant_config
from tests.support.flash_flops import FORMULAS
from tests.support.models import build_tiny_model, padded_vocab_size, sample_tokens, tp_state
from tests.support.ranks import run_ranks

BATCH, SEQ_LENGTH = 3, 7


def counted(config, parallel, loss_chunk_size=None):
    """FLOPs that torch counts on this rank: (forward, forward and backward)."""
    tokens, labels = sample_tokens(batch=BATCH, seq_length=SEQ_LENGTH)
    model = build_tiny_model(config, parallel, dtype=torch.float32, loss_chunk_size=loss_chunk_size)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        loss = model.loss(tokens, labels).mean()
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops()


def predicted(config, tp_size):
    sizes = dict(batch=BATCH, seq_length=SEQ_LENGTH, padded_vocab_size=padded_vocab_size(tp_size))
    return forward_flops(config, **sizes), step_flops(config, **sizes)


@pytest.mark.runs(daily=3, ci=7)
@pytest.mark.parametrize("name", VARIANTS)
def test_flops_of_forward_and_step_are_those_that_torch_counts(name):
    config = variant_config(name, attention_backend="unfused")
    if config.num_experts is not None:  # the products for their biases are none of the model's
        config = replace(config, add_bias_linear=False)
    with tp_state(1) as parallel:
        assert counted(config, parallel) == predicted(config, 1)


@pytest.mark.runs
@pytest.mark.parametrize("tp_size", [1, 4])
def test_a_loss_in_chunks_costs_the_logits_once_more(tp_size):
    config, plan = variant_config("gpt2", attention_backend="unfused"), keep_everything(2)
    sizes = dict(batch=BATCH, seq_length=SEQ_LENGTH, padded_vocab_size=padded_vocab_size(tp_size))

    def work(rank, world_size):
        with tp_state(world_size) as parallel:
            return [counted(config, parallel, chunk_size) for chunk_size in (1, 5, 1000)]

    forward, both = (
        forward_flops(config, **sizes),
        hardware_flops(config, plan, device="cpu", loss_chunk_size=5, **sizes),
    )
    assert both == step_flops(
        config, **sizes
    ) + 2 * BATCH * SEQ_LENGTH * config.hidden_size * padded_vocab_size(tp_size)
    for of_ranks in zip(*run_ranks(work, tp_size), strict=True):
        assert tuple(map(sum, zip(*of_ranks, strict=True))) == (forward, both)


@pytest.mark.parametrize(
    ("device_name", "bf16", "float32", "tf32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 19.5, 156),
        ("NVIDIA H100 80GB HBM3", 989, 67, 494.5),
        ("NVIDIA H100 NVL", 835, 60, 417.5),
        ("NVIDIA B200", 2250, 80, 1125),
        ("NVIDIA GB200", 2500, 90, 1250),
        ("NVIDIA L4", 121, 30.3, 60.5),
    ],
)
def test_the_peak_of_a_gpu_follows_from_its_name_and_dtype(device_name, bf16, float32, tf32):
    assert peak_flops(device_name, bf16=True) == bf16 * 1e12
    assert peak_flops(device_name, bf16=False) == float32 * 1e12
    assert peak_flops(device_name, bf16=False, tf32=True) == tf32 * 1e12
