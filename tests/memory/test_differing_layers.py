"""Bytes, peaks and FLOPs of models whose layers differ by number: predicted equals measured."""

from dataclasses import replace

import pytest
import torch

from megatron_lite.config.recompute import RecomputeConfig
from tests.memory import test_activations, test_peak
from tests.recompute.test_equality import DIFFERING_MODELS as MODELS
from tests.support.models import Layout
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


def wrong_bytes(rank, world_size, layout):
    found = {}
    with layout.state() as parallel:
        for name, config in MODELS.items():
            for policy in POLICIES:
                for dtype in (torch.float32, torch.bfloat16):
                    figures = test_activations.figures(
                        config, RecomputeConfig(recompute_policy=policy), parallel, layout, dtype
                    )
                    if not figures.agree:
                        found[f"{name} {policy} {dtype}"] = figures
    return found


@pytest.mark.runs
@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(2, True)])
def test_the_bytes_of_every_policy_are_the_measured_ones(layout):
    assert run_ranks(wrong_bytes, layout.ranks, layout) == [{}] * layout.ranks


@pytest.mark.runs
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_every_moment_of_every_policy_is_the_measured_one(config):
    config = replace(
        config, num_layers=test_peak.NUM_LAYERS, window_attn_skip_freq=2, no_rope_freq=None
    )
    assert test_peak.differences(0, 1, config, Layout()) == {}
    config = replace(config, no_rope_freq=tuple([0, 1, 0, 1, 1, 0][: config.num_layers]))
    assert test_peak.differences(0, 1, config, Layout()) == {}
