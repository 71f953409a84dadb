"""Settings that are heard by halves, and sizes that do not follow the run, each put back: a named
test must fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.checks import ContradictionError
from megatron_lite.memory.predict import pipeline_memory as pipeline
from megatron_lite.recompute.stores import Stores
from tests.config import test_alternatives
from tests.pipeline import test_runs
from tests.support.mutants import Mutant, assert_seen, replaces
from tests.training import test_rampup


@replaces("__init__", ContradictionError)
def a_flag_replaces_its_own_value_alone(_, self, text, *fields):
    self.args, self.fields = (text,), ()


@replaces("reserve", Stores)
def slots_are_made_for_the_first_step(_: Any, self: Stores, micro_batches: int) -> None:
    if not self._arenas:
        self.micro_batches = micro_batches


@replaces("sizes_from", BatchSchedule)
def every_size_of_a_ramp_counts_wherever_the_run_stands(_, self, consumed, num_iterations):
    return self.sizes


@replaces("enough_microbatches", pipeline)
def the_windows_repeat_with_the_schedule(_, config, rank, most=None):
    return 2 * 3


PRICED = test_runs.test_a_rank_never_holds_more_than_with_the_micro_batches_that_are_priced
MUTANTS = [
    Mutant(
        a_flag_replaces_its_own_value_alone,
        test_alternatives.test_a_flag_replaces_every_stored_alternative,
        dict(
            stored=test_alternatives.BASE + test_alternatives.FULL,
            flags="--recompute-policy 0:mlp",
            alone="--recompute-policy 0:mlp",
        ),
    ),
    Mutant(
        slots_are_made_for_the_first_step,
        test_rampup.test_slots_for_saved_inputs_are_made_once_for_what_the_ramp_will_have_in_flight,
        error="slots are in use",
    ),
    Mutant(
        every_size_of_a_ramp_counts_wherever_the_run_stands,
        test_rampup.test_a_ramp_through_a_batch_the_interleaved_pipeline_cannot_take_is_refused,
        error="a batch of 5 samples",
    ),
    Mutant(the_windows_repeat_with_the_schedule, PRICED, dict(num_kept=8, num_chunks=3)),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path)
