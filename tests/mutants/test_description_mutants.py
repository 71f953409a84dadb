"""Mistakes in the description of a layer, each put in: a named test must fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_lite.description import model_ends, norms, transformer_layer
from megatron_lite.description.operations import LayerDescription
from megatron_lite.memory.predict import step_peak
from tests.description import test_drift, test_regions
from tests.memory import test_peaks_on_a_gpu
from tests.support.changes import with_fields
from tests.support.mutants import Mutant, each_is_seen, replaces

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


DRIFT = test_drift.test_every_module_keeps_computes_sends_and_holds_what_is_described
ONE = dict(tp_size=1, sequence_parallel=False)
ON_GPU = test_peaks_on_a_gpu.test_the_peak_of_a_step_is_the_measured_one
MUTANTS: list[Any] = [
    Mutant(a_norm_keeps_no_statistics, DRIFT, ONE),
    Mutant(a_matmul_is_forgotten, DRIFT, ONE),
    Mutant(a_loss_casts_no_rows, ON_GPU, row("qwen3-0.6b shape, V 32k, none")),
]


test_is_seen = each_is_seen(MUTANTS)
