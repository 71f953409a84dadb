"""Mistakes in Muon and in the seam between optimizer and update rule, each put back: a named
test must fail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.checkpointing import load
from megatron_lite.optim import muon_update, newton_schulz
from megatron_lite.optim.adam_update import AdamW
from megatron_lite.optim.muon_update import MOMENTUM, Muon
from megatron_lite.optim.newton_schulz import SCALES, SIMPLE, STEPS, Coefficients
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.optim.pieces import Piece
from tests.optim import test_muon, test_muon_layouts, test_newton_schulz
from tests.support.mutants import Mutant, assert_seen, replaces

Patch = pytest.MonkeyPatch


@replaces("_direction", Muon)
def the_gradient_itself_is_orthogonalized(_, self, piece, stays):
    """No momentum."""
    return piece.grad


@replaces("_direction", Muon)
def momentum_is_a_sum_and_no_mean(_: Any, self: Muon, piece: Piece, stays: Tensor) -> Tensor:
    momentum = self.states[piece.name][MOMENTUM]
    momentum.copy_(torch.where(stays, momentum, self._config.muon_momentum * momentum + piece.grad))
    return momentum


@replaces("_direction", Muon)
def nesterov_is_forgotten(real: Any, self: Muon, piece: Piece, stays: Tensor) -> Tensor:
    real(self, piece, stays)
    return self.states[piece.name][MOMENTUM]


@replaces("_direction", Muon)
def a_skipped_step_moves_the_momentum(real, self, piece, stays):
    return real(self, piece, torch.zeros_like(stays))


@replaces("_direction", Muon)
def a_skipped_step_is_multiplied_by_zero(_: Any, self: Muon, piece: Piece, stays: Tensor) -> Tensor:
    """NaN times 0 is NaN."""
    momentum = self.states[piece.name][MOMENTUM]
    return momentum.lerp_(piece.grad, 0.1 * (~stays).to(piece.grad.dtype))


@replaces("step", Muon)
def the_host_asks_whether_a_step_is_skipped(real, self, rate, skipped):
    return None if bool(skipped) else real(self, rate, skipped)


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


@replaces("quintic", STEPS)
def quintic_repeats_its_last_step(_, number):
    return (newton_schulz.QUINTIC + newton_schulz.QUINTIC[-1:] * number)[:number]


@replaces("quintic", STEPS)
def quintic_is_simple(_, number):
    return SIMPLE * number


@replaces("polar_express", STEPS)
def polar_express_starts_again(_, number):
    return (newton_schulz.POLAR_EXPRESS * number)[:number]


@replaces("simple", STEPS)
def a_coefficient_has_a_wrong_digit(_, number):
    return (Coefficients(3.4445, -4.7750, 2.0135),) * number


@replaces("__init__", Muon)
def weights_do_not_decay(
    init: Any, self: Muon, layout: Any, specs: Any, config: Any, parallel: Any, **more: Any
) -> None:
    init(self, layout, specs, config, parallel, **more)
    object.__setattr__(config, "weight_decay", 0.0)


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
def shards_are_blocks_of_their_own(_, shard, tp_dim, group):
    """Blockwise instead of duplicated."""
    return shard if group is None else torch.cat([shard] * group.size(), tp_dim)


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


@replaces("check_same_update_rule", load)
def the_rule_of_a_checkpoint_is_not_compared(_, ours, saved, where):
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


@replaces("__init__", Muon)
def the_rest_is_adamw_without_decay_groups(
    init: Any, self: Muon, *arguments: Any, **more: Any
) -> None:
    with pytest.MonkeyPatch.context() as inner:
        _one_group(inner)
        init(self, *arguments, **more)


@replaces("__init__", AdamW)
def _one_group(init: Any, self: AdamW, pieces: Any, *arguments: Any) -> None:
    alike = [
        Piece(
            name=piece.name,
            spec=piece.spec,
            start=piece.start,
            stop=piece.stop,
            master=piece.master,
            decays=True,
        )
        for piece in pieces
    ]
    init(self, alike, *arguments)


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
FORMULA = (
    test_muon.test_high_precision_is_the_formula_in_the_masters_dtype,
    dict(mode="unit_rms_norm", kind="quintic"),
)
BANDS = test_newton_schulz.test_singular_values_from_a_hundredth_on_come_near_1
BAD = (
    test_muon.test_a_step_with_a_bad_gradient_changes_nothing_and_the_next_one_goes_on,
    dict(where="tall", fault=float("nan"), dtype=torch.float32),
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
ZERO1 = (test_muon_layouts.test_zero1_changes_no_bit, dict(dtype=torch.float32))
TP2 = (
    test_muon_layouts.test_every_layout_trains_as_a_single_process,
    dict(world_size=2, tp_size=2, sequence_parallel=False, name="llama", layouts=("replicated",)),
)
RESUMED = (
    test_muon_layouts.test_a_resumed_run_goes_on_bit_for_bit,
    dict(ranks=1, sizes={}, data_parallel=test_muon_layouts.REPLICATED, training=dict(bf16=True)),
)
MUTANTS = [
    Mutant(the_gradient_itself_is_orthogonalized, *TORCHS),
    Mutant(momentum_is_a_sum_and_no_mean, *TORCHS),
    Mutant(nesterov_is_forgotten, *TORCHS),
    Mutant(a_coefficient_has_a_wrong_digit, *TORCHS),
    Mutant(weights_do_not_decay, *TORCHS),
    Mutant(scales_take_columns_for_rows, *TORCHS),
    Mutant(scales_take_columns_for_rows, *FORMULA),
    Mutant(a_skipped_step_moves_the_momentum, *BAD),
    Mutant(a_skipped_step_moves_the_momentum, *FINITE),
    Mutant(a_skipped_step_is_multiplied_by_zero, *BAD),
    Mutant(the_host_asks_whether_a_step_is_skipped, *FINITE),
    Mutant(
        quintic_repeats_its_last_step,
        test_newton_schulz.test_more_steps_than_coefficients_start_again_or_repeat_the_last,
    ),
    Mutant(quintic_is_simple, BANDS, dict(kind="quintic", num_steps=5, least=0.977, most=1.032)),
    Mutant(
        polar_express_starts_again,
        test_newton_schulz.test_more_steps_than_coefficients_start_again_or_repeat_the_last,
    ),
    Mutant(query_key_and_value_are_cut_as_three_blocks, *SPLIT),
    Mutant(embeddings_are_matrices_too, *REST),
    Mutant(the_rest_is_adamw_without_decay_groups, *REST),
    Mutant(shards_are_blocks_of_their_own, *OVER_TP),
    Mutant(shards_are_blocks_of_their_own, *TP2),
    Mutant(columns_are_gathered_as_rows, *OVER_TP),
    Mutant(the_scale_is_that_of_the_shard, *OVER_TP),
    Mutant(a_piece_is_updated_by_the_first_elements, *ZERO1),
    Mutant(the_momentum_is_not_saved, *RESUMED),
    Mutant(the_momentum_is_not_loaded, *RESUMED),
    Mutant(adamw_is_not_told_how_many_updates_were_made, *RESUMED),
    Mutant(
        the_rule_of_a_checkpoint_is_not_compared,
        test_muon_layouts.test_states_of_the_other_rule_are_refused_and_may_be_left_behind,
        dict(saved="adam", loaded="muon"),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: Patch, tmp_path: Path) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path)
