"""Mistakes in Muon and in the seam between optimizer and update rule, each put back: a named
test must fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.optim.layouts import Piece
from megatron_lite.optim.muon_update import MOMENTUM, Muon
from megatron_lite.optim.optimizer import Optimizer
from tests.optim import test_layouts, test_muon, test_muon_layouts
from tests.support.mutants import Mutant, assert_seen, replaces

Patch = pytest.MonkeyPatch


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


SPLIT = (
    test_muon.test_query_key_and_value_rows_are_three_matrices_unless_told_otherwise,
    dict(split=True),
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
    Mutant(query_key_and_value_are_cut_as_three_blocks, *SPLIT),
    Mutant(the_scale_is_that_of_the_shard, *OVER_TP),
    Mutant(a_piece_is_updated_by_the_first_elements, *ZERO1),
    Mutant(the_momentum_is_not_saved, *RESUMED),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: Patch, tmp_path: Path) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path)
