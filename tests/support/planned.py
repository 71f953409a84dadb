"""Tiny models with a recompute plan, and their gradients."""

import torch

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.recompute.schedule import plan_stage
from tests.support.equality import variant_config
from tests.support.models import build_tiny_model, sample_tokens, tiny_config, tp_state

NUM_LAYERS = 3


def planned(recompute, *, parallel=None, variant=None, sequence_parallel=False, **config):
    """Returns a model in float32 that is recomputed by flags or by a policy.

    parallel: by default one rank, whose state is only there while the model is built.
    config: fields of the model, of the variant if one is named.
    """
    if parallel is None:
        with tp_state(1) as alone:
            return planned(recompute, parallel=alone, variant=variant, **config)
    if isinstance(recompute, str):
        recompute = RecomputeConfig(recompute_policy=recompute)
    fields = {"num_layers": NUM_LAYERS, **config}
    made = tiny_config(**fields) if variant is None else variant_config(variant, **fields)
    return build_tiny_model(
        made,
        parallel,
        sequence_parallel=sequence_parallel,
        dtype=torch.float32,
        plan=plan_stage(recompute, made.num_layers),
    )


def loss_of(model, seed=3):
    return model(*sample_tokens(seed)).mean()
