"""Muon in every layout of ranks, and in whole runs: resumed, loaded elsewhere, under every
recompute policy."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from megatron_lite.config.checks import InputError
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.optim.muon_update import STEPS, orthogonalize
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.parameter_spec import ParameterSpec, mark
from tests.optim.test_muon import HIGH
from tests.support.equality import difference
from tests.support.models import tp_state
from tests.support.ranks import run_ranks
from tests.support.runs import run_to_end, tiny_run


class Split(nn.Module):
    """A weight split by rows and one split by columns over 2 ranks, with prescribed gradients."""

    def __init__(self, parallel):
        super().__init__()
        for dim, name in enumerate(("by_rows", "by_columns")):
            whole = torch.randn(
                8, 12, generator=torch.Generator().manual_seed(dim), dtype=torch.float64
            )
            shard = (
                whole
                if parallel.tp_group is None
                else whole.chunk(2, dim)[parallel.tp_rank].contiguous()
            )
            spec = ParameterSpec(global_shape=(8, 12), tp_dim=dim, matrices=(1,))
            self.register_parameter(name, mark(nn.Parameter(shard), spec))


def _update_split(rank, world_size, mode):
    """By name the change of this rank's shard in a step of size 1 without weight decay, whose
    gradient is the weight."""
    with tp_state(world_size) as parallel:
        model = Split(parallel)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        optimizer = Optimizer(
            model,
            OptimizerConfig(**HIGH, muon_tp_mode=mode, weight_decay=0.0, clip_grad=0.0),
            parallel,
        )
        optimizer.zero_grad()
        sum(value.square().sum() / 2 for value in model.parameters()).backward()
        optimizer.step(1.0)
        return {name: before[name] - value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("mode", ["duplicated", "blockwise"])
def test_over_tp_ranks_the_whole_matrix_or_each_block_is_orthogonalized(mode):
    """Blocks are matrices of their own, with scales of their own, as in Megatron."""
    updates = run_ranks(_update_split, 2, mode, detail=False)
    for dim, name in enumerate(("by_rows", "by_columns")):
        whole = torch.randn(
            8, 12, generator=torch.Generator().manual_seed(dim), dtype=torch.float64
        )
        blocks = [whole] if mode == "duplicated" else whole.chunk(2, dim)
        expected = torch.cat(
            [
                orthogonalize(block, STEPS["quintic"](5)) * math.sqrt(max(block.shape))
                for block in blocks
            ],
            dim,
        )
        assert difference(expected, torch.cat([update[name] for update in updates], dim)) < 1e-12, (
            name
        )


@pytest.mark.runs
@pytest.mark.parametrize(("saved", "loaded"), [("adam", "muon"), ("muon", "adam")])
def test_states_of_the_other_rule_are_refused_and_may_be_left_behind(saved, loaded, tmp_path):
    def config_of(rule, **checkpoint):
        return replace(
            tiny_run(train_iters=2, eval_iters=0, **checkpoint),
            optimizer=OptimizerConfig(optimizer=rule),
        )

    run_to_end(config_of(saved, save=str(tmp_path)))
    with pytest.raises(
        InputError,
        match=f"iter_0000002 holds the optimizer states of --optimizer {saved}, from which "
        f"--optimizer {loaded} cannot go on: give --optimizer {saved}, or --no-load-optim",
    ):
        run_to_end(config_of(loaded, load=str(tmp_path)))
    for options in (dict(no_load_optim=True), dict(finetune=True)):
        trainer = run_to_end(config_of(loaded, load=str(tmp_path), **options))
        assert trainer.optimizer.num_updates == (0 if "no_load_optim" in options else 2)
