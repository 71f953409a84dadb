"""Mistakes in the description of a layer and in the table of regions, each put in: a named test
must fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_lite.config import regions
from megatron_lite.description import model_ends, norms, transformer_layer
from megatron_lite.description.operations import LayerDescription, Operation
from megatron_lite.memory.predict import states, step_peak
from tests.description import test_drift, test_regions
from tests.memory import test_peaks_on_a_gpu
from tests.support.changes import with_fields
from tests.support.mutants import Mutant, assert_seen, parameters, replaces

Patch = pytest.MonkeyPatch


def changed(patch: Patch, name: str, **fields: Any) -> None:
    """Gives these fields to the operation of this name in every layer."""

    @replaces("describe_layer", transformer_layer, test_regions)
    def layer(describe: Any, model: Any, sizes: Any, number: int = 0) -> LayerDescription:
        described: LayerDescription = describe(model, sizes, number)
        return replace(
            described,
            operations=tuple(
                with_fields(one, **fields) if one.name == name else one
                for one in described.operations
            ),
        )

    layer(patch)


@replaces("norm_statistics", norms)
def a_norm_keeps_no_statistics(real, *args, **options):
    return with_fields(real(*args, **options), num_bytes=0)


def a_matmul_is_forgotten(patch: Patch) -> None:
    changed(patch, "linear_proj", calls=())


def a_bias_is_forgotten(patch: Patch) -> None:
    changed(patch, "linear_fc2", parameters=())


@replaces("column_linear", transformer_layer)
def inputs_are_not_gathered(real, *args: Any, **options: Any) -> Operation:
    operation = real(*args, **options)
    return with_fields(operation, calls=operation.calls[-1:])


def a_second_norm_outside_of_its_region(patch: Patch) -> None:
    changed(patch, "pre_mlp_layernorm", regions=())


@replaces("mlp", regions.REGIONS)
def a_region_has_no_tail(region):
    return replace(region, skips_tail=False)


def row(name: str) -> dict[str, Any]:
    """Returns the argument of a test of one measured run."""
    return dict(row=next(one for one in test_peaks_on_a_gpu.ROWS if one["name"] == name))


def without_caches(patch: Patch) -> None:
    """Takes away the caches, which would hide a change or keep it for later tests."""
    patch.setattr(step_peak, "stage_course", step_peak.stage_course.__wrapped__)
    patch.setattr(step_peak, "_states", step_peak._states.__wrapped__)


def a_loss_casts_no_rows(patch: Patch) -> None:
    without_caches(patch)
    half = model_ends.loss_blocks
    patch.setattr(model_ends, "loss_blocks", lambda *args: half(*args) // 2)


def an_allocator_does_not_round(patch: Patch) -> None:
    without_caches(patch)
    patch.setattr(states, "allocated", lambda num_bytes, device: num_bytes)


DRIFT = test_drift.test_every_module_keeps_computes_sends_and_holds_what_is_described
ONE = dict(tp_size=1, sequence_parallel=False)
ON_GPU = test_peaks_on_a_gpu.test_the_peak_of_a_step_is_the_measured_one
TAIL = test_regions.test_a_region_has_a_tail_exactly_where_the_table_says_so
MUTANTS: list[Any] = [
    Mutant(a_norm_keeps_no_statistics, DRIFT, ONE),
    Mutant(a_matmul_is_forgotten, DRIFT, ONE),
    Mutant(a_bias_is_forgotten, DRIFT, ONE),
    Mutant(inputs_are_not_gathered, DRIFT, dict(tp_size=2, sequence_parallel=True), long=True),
    Mutant(a_loss_casts_no_rows, ON_GPU, row("qwen3-0.6b shape, V 32k, none")),
    Mutant(an_allocator_does_not_round, ON_GPU, row("6 x 1024 with dropout, full")),
    Mutant(
        a_second_norm_outside_of_its_region,
        test_regions.test_a_region_is_entered_where_its_operations_are_and_nowhere_else,
        dict(region="layernorm"),
    ),
    Mutant(a_region_has_no_tail, TAIL, dict(region="mlp")),
]


@pytest.mark.parametrize("mutant", parameters(MUTANTS))
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_seen(mutant, monkeypatch)
