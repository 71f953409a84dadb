"""Bytes, peaks and FLOPs of models whose layers differ by number: predicted equals measured."""

from dataclasses import replace

import pytest
import torch

from arguments import parse_args
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.stages import stages
from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.memory.predict.kept_tensors import activation_bytes
from megatron_lite.recompute.schedule import plan_stage
from tests.memory import test_activations, test_peak
from tests.recompute.test_equality import DIFFERING_MODELS as MODELS
from tests.support.models import BATCH, SEQ_LENGTH, build_tiny_model, tiny_sizes, tp_state
from tests.support.ranks import run_ranks

POLICIES = (
    "*:none",
    "*:full",
    "*:full/2",
    "1:none; *:full/3",
    "every-2:full; *:core_attn+layernorm",
    "*:pointwise",
    "0-2:full/3@host; *:mlp@host",
    "*:ops(matmul,attention)",
    "1:none; *:ops(matmul/2)",
    "*:core_attn+activation",
)
FLASH = next(config for name, config in MODELS.items() if name.startswith("SDPA"))


def wrong_bytes(rank, world_size, sequence_parallel):
    found = {}
    with tp_state(world_size) as parallel:
        for name, config in MODELS.items():
            for policy in POLICIES:
                for dtype in (torch.float32, torch.bfloat16):
                    figures = test_activations.figures(
                        config,
                        RecomputeConfig(recompute_policy=policy),
                        parallel,
                        sequence_parallel=sequence_parallel,
                        dtype=dtype,
                    )
                    if not figures.agree:
                        found[f"{name} {policy} {dtype}"] = figures
    return found


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize(("tp_size", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_the_bytes_of_every_policy_are_the_measured_ones(tp_size, sequence_parallel):
    assert run_ranks(wrong_bytes, tp_size, sequence_parallel, detail=False) == [{}] * tp_size


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_every_moment_of_every_policy_is_the_measured_one(config):
    config = replace(
        config, num_layers=test_peak.NUM_LAYERS, window_attn_skip_freq=2, no_rope_freq=None
    )
    assert test_peak.differences(0, 1, config, False) == {}
    config = replace(config, no_rope_freq=tuple([0, 1, 0, 1, 1, 0][: config.num_layers]))
    assert test_peak.differences(0, 1, config, False) == {}


def test_a_later_stage_begins_with_its_own_layers():
    """Layer 1 of the second stage is layer 3 of the model: which of them keep rotary tables differs
    by stage."""
    config = replace(
        FLASH, num_layers=4, window_attn_skip_freq=(1, 0, 0, 1), no_rope_freq=(0, 1, 1, 1)
    )
    words = (
        "--num-layers 4 --pipeline-model-parallel-size 2 --hidden-size 8 --num-attention-heads "
        "1 --seq-length 12 "
        "--max-position-embeddings 12 --micro-batch-size 1 --vocab-size 72"
    )
    plan = plan_stage(RecomputeConfig(), 2)
    for stage in stages(parse_args(words.split()).config.parallel, 4):
        with tp_state(1) as parallel:
            model = build_tiny_model(config, parallel, dtype=torch.float32, stage=stage)
            with kept_for_backward(exclude=model.parameters()) as meter:
                hidden = torch.randn(SEQ_LENGTH, BATCH, 32, requires_grad=True)
                output = model.decoder(hidden, model.rotary_tables(SEQ_LENGTH))
                measured = meter.total_bytes()
                del output
        sizes = tiny_sizes(has_embedding=False, has_head=False, first_layer=stage.first_layer)
        # the final norm's input and statistics
        norm = 4 * BATCH * SEQ_LENGTH * (32 + 1) if stage.is_last else 0
        assert measured - norm == activation_bytes(config, plan, sizes), stage
