"""Counted parameters are those of the real model, in every layout; published models have their
published size."""

import itertools

import pytest

from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.stages import stages
from megatron_lite.memory.predict.states import parameter_count
from tests.support.equality import VARIANTS, variant_config
from tests.support.models import build_tiny_model, padded_vocab_size, tp_state
from tests.support.ranks import run_ranks

MODELS = {name: variant_config(name, num_layers=3) for name in VARIANTS}


def held(model):
    return sum(parameter.numel() for parameter in model.parameters())


def _held_by_stages(rank, world_size, config, parallel):
    with tp_state(world_size) as state:
        return [
            held(build_tiny_model(config, state, stage=stage))
            for stage in stages(parallel, config.num_layers)
        ]


@pytest.mark.runs(daily=2, ci=3)
@pytest.mark.parametrize("name", MODELS)
def test_every_rank_of_every_stage_holds_what_is_counted(name):
    parallel = ParallelConfig(pipeline_model_parallel_size=3)
    for layout, tp_size in itertools.product((ParallelConfig(), parallel), (1, 2)):
        counted = [
            parameter_count(MODELS[name], padded_vocab_size(tp_size), tp_size=tp_size, stage=stage)
            for stage in stages(layout, MODELS[name].num_layers)
        ]
        assert run_ranks(_held_by_stages, tp_size, MODELS[name], layout) == [counted] * tp_size
