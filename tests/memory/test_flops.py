"""Hardware FLOPs of recompute plans against torch's own counter, to the last FLOP."""

from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_lite.config.recompute import MODULES
from megatron_lite.description.sizes import Sizes
from megatron_lite.memory.predict.flops import PolicyFlops, peak_flops
from tests.support.equality import VARIANTS, variant_config
from tests.support.flash_flops import FORMULAS
from tests.support.models import (
    build_tiny_model,
    padded_vocab_size,
    plan_of,
    sample_tokens,
    tp_state,
)
from tests.support.pairs import subsets

BATCH, SEQ_LENGTH = 3, 8


def plans(num_layers):
    """Every policy, with every combination of regions, with and without tail skip."""
    policies = (
        *("*:none", "*:full", "*:full/2", "*:full/3", "0:full; *:none", "0-2:full; *:none"),
        *(f"*:{'+'.join(modules)}" for modules in subsets(MODULES)),
        "*:ops(matmul)",
        "*:ops(attention)",
        "*:ops(matmul/2,attention)",
        "*:ops(matmul/3,collective)",
        "0:ops(max);1:full",
        "*:ops(aten.addmm.default)",
        "*:ops(aten.mm.default/2,aten.bmm.default)",
    )
    return {
        f"{policy}, tail skipped: {skip}": plan_of(policy, num_layers, recompute_tail_skip=skip)
        for skip in (True, False)
        for policy in policies
    }


def counted(config, plan, **loss):
    """FLOPs of forward and backward that torch counts."""
    with tp_state(1) as parallel:
        model = build_tiny_model(config, parallel, dtype=torch.float32, plan=plan, **loss)
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
            model(*sample_tokens(batch=BATCH, seq_length=SEQ_LENGTH)).mean().backward()
    return counter.get_total_flops()


def predicted(config, plan, **loss):
    sizes = Sizes(
        model=config,
        micro_batch_size=BATCH,
        seq_length=SEQ_LENGTH,
        padded_vocab_size=padded_vocab_size(1),
        **loss,
    )
    return PolicyFlops.of(sizes, plan).hardware


VARIANTS_AND_BACKENDS = list(product(VARIANTS, ("unfused", "flash")))


@pytest.mark.runs
@pytest.mark.parametrize("variant, backend", VARIANTS_AND_BACKENDS)
def test_the_figure_of_every_plan_is_the_one_that_torch_counts(variant, backend):
    # not divisible by the units of 2 and 3
    config = variant_config(variant, num_layers=5, attention_backend=backend)
    # Every plan has its turn in one of the cases. Neighbours in the list are alike.
    turn = (list(VARIANTS).index(variant) + (backend == "flash")) % 13
    named = dict(list(plans(config.num_layers).items())[turn::13])
    for name, plan in named.items():
        assert counted(config, plan) == predicted(config, plan), name


@pytest.mark.parametrize("loss_chunk_size", [1, 5, 1000])
def test_a_loss_in_chunks_costs_the_logits_once_more(loss_chunk_size):
    case = variant_config("gpt2"), plan_of("*:none", 2)
    once_more = counted(*case, loss_chunk_size=loss_chunk_size)
    assert once_more == predicted(*case, loss_chunk_size=loss_chunk_size) > predicted(*case)


@pytest.mark.parametrize(
    "device_name, bf16, float32, tf32",
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
