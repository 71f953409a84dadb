"""Mistakes in Muon and in the seam between optimizer and update rule, each put back: a named
test must fail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.optim import muon_update
from megatron_lite.optim.layouts import Piece
from megatron_lite.optim.muon_update import MOMENTUM, SCALES, Muon
from megatron_lite.optim.optimizer import Optimizer
from tests.optim import test_layouts, test_muon, test_muon_layouts
from tests.support.mutants import Mutant, assert_seen, replaces

Patch = pytest.MonkeyPatch


@replaces("_direction", Muon)
def momentum_is_a_sum_and_no_mean(_: Any, self: Muon, piece: Piece, stays: Tensor) -> Tensor:
    momentum = self.states[piece.name][MOMENTUM]
    momentum.copy_(torch.where(stays, momentum, self._config.muon_momentum * momentum + piece.grad))
    return momentum


@replaces("_direction", Muon)
def a_skipped_step_moves_the_momentum(real, self, piece, stays):
    return real(self, piece, torch.zeros_like(stays))


def scales_take_columns_for_rows(patch: Patch) -> None:
    for mode in SCALES:
        replaces(mode, SCALES)(lambda scale, m, n: scale(n, m))(patch)


@replaces("_scaled", Muon)
def the_scale_is_that_of_the_shard(scaled: Any, self: Muon, shard: Tensor, tp_dim: int) -> Tensor:
    whole_scale = self._scale
    self._scale = lambda m, n: whole_scale(*shard.shape)
    try:
        return scaled(self, shard, tp_dim)
    finally:
        self._scale = whole_scale


@replaces("_update", Muon)
def query_key_and_value_are_cut_as_three_blocks(
    real: Any, self: Muon, direction: Tensor, spec: Any
) -> Tensor:
    """The first rows as queries: right for one query group alone."""
    if len(spec.matrices) < 3 or not self._config.muon_split_qkv:
        return real(self, direction, spec)
    groups = direction.shape[0] // sum(spec.matrices)
    blocks = direction.split([groups * rows for rows in spec.matrices])
    return torch.cat([self._scaled(block, spec.tp_dim) for block in blocks])


@replaces("_gathered", muon_update)
def columns_are_gathered_as_rows(
    real: Any, shard: Tensor, tp_dim: int | None, group: Any
) -> Tensor:
    return (
        real(shard, 0, group).view(shard.shape[0], -1)
        if tp_dim == 1
        else real(shard, tp_dim, group)
    )


@replaces("__init__", Muon)
def a_piece_is_updated_by_the_first_elements(
    init: Any, self: Muon, *arguments: Any, **more: Any
) -> None:
    init(self, *arguments, **more)
    self._pieces = {
        name: Piece(
            name=piece.name,
            spec=piece.spec,
            start=0,
            stop=piece.stop - piece.start,
            master=piece.master,
            decays=piece.decays,
        )
        for name, piece in self._pieces.items()
    }


@replaces("whole_states", Optimizer)
def the_momentum_is_not_saved(real: Any, self: Optimizer, name: str) -> dict[str, Tensor]:
    return {
        key: value if key != MOMENTUM else torch.zeros_like(value)
        for key, value in real(self, name).items()
    }


@replaces("load", Optimizer)
def the_momentum_is_not_loaded(
    real: Any, self: Optimizer, states: Mapping[str, Mapping[str, Tensor]], *, num_updates: int
) -> None:
    kept = {
        name: state[MOMENTUM].clone() for name, state in self.states.items() if MOMENTUM in state
    }
    real(self, states, num_updates=num_updates)
    for name, value in kept.items():
        self.states[name][MOMENTUM].copy_(value)


@replaces("set_num_updates", Muon)
def adamw_is_not_told_how_many_updates_were_made(_, self, number):
    pass


@replaces("__init__", Muon)
def embeddings_are_matrices_too(
    real: Any,
    self: Muon,
    layout: Any,
    specs: Mapping[str, Any],
    config: Any,
    parallel: Any,
    **choices: Any,
) -> None:
    more = {
        name: spec
        if len(spec.global_shape) < 2 or spec.matrices
        else type(spec)(**{**spec.__dict__, "matrices": (1,)})
        for name, spec in specs.items()
    }
    real(self, layout, more, config, parallel, **choices)


TORCHS = (
    test_muon.test_matrices_follow_torchs_muon,
    dict(
        nesterov=True,
        weight_decay=0.1,
        momentum=0.95,
        num_steps=5,
        mode="shape_scaling",
        extra=1.0,
        adjustment="original",
    ),
)
FINITE = (test_muon.test_a_skipped_finite_step_changes_nothing_and_nothing_waits_for_the_device,)
SPLIT = (
    test_muon.test_query_key_and_value_rows_are_three_matrices_unless_told_otherwise,
    dict(split=True),
)
REST = (
    test_muon.test_the_matrices_of_layers_are_muons_and_all_else_is_adamws_to_the_bit,
    dict(name="gpt2"),
)
OVER_TP = (
    test_muon_layouts.test_over_tp_ranks_the_whole_matrix_or_each_block_is_orthogonalized,
    dict(mode="duplicated"),
)
ZERO1 = (
    test_layouts.test_zero1_and_overlap_change_no_bit,
    dict(world_size=2, tp_size=1, layouts=("zero1, overlap",), dtype=torch.float32, rule="muon"),
)
RESUMED = (
    test_muon_layouts.test_a_resumed_run_goes_on_bit_for_bit,
    dict(ranks=1, sizes={}, data_parallel=test_muon_layouts.REPLICATED, training=dict(bf16=True)),
)
MUTANTS = [
    Mutant(momentum_is_a_sum_and_no_mean, *TORCHS),
    Mutant(scales_take_columns_for_rows, *TORCHS),
    Mutant(a_skipped_step_moves_the_momentum, *FINITE),
    Mutant(query_key_and_value_are_cut_as_three_blocks, *SPLIT),
    Mutant(embeddings_are_matrices_too, *REST),
    Mutant(columns_are_gathered_as_rows, *OVER_TP),
    Mutant(the_scale_is_that_of_the_shard, *OVER_TP),
    Mutant(a_piece_is_updated_by_the_first_elements, *ZERO1),
    Mutant(the_momentum_is_not_saved, *RESUMED),
    Mutant(the_momentum_is_not_loaded, *RESUMED),
    Mutant(adamw_is_not_told_how_many_updates_were_made, *RESUMED),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: Patch, tmp_path: Path) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path)
