"""Settings that are heard by halves, and sizes that do not follow the run, each put back: a named
test must fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli import flags
from megatron_lite.config import notices, policy
from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.memory.predict import pipeline_memory as pipeline
from megatron_lite.recompute.stores import Stores
from megatron_lite.supervision.pulse import Pulse
from megatron_lite.training import run_facts
from tests import test_arguments
from tests.config import test_alternatives, test_policy_reach
from tests.pipeline import test_runs
from tests.supervision import test_pulse
from tests.support.mutants import Mutant, assert_seen, replaces
from tests.training import test_logging, test_rampup

Patch = pytest.MonkeyPatch


@replaces("_missing", policy)
def a_layer_that_does_not_exist_is_passed_over(_, rule, num_layers):
    return None


@replaces("_longest_run", policy)
def units_are_as_long_as_they_say(_, decided):
    return 99


@replaces("_beyond", policy)
def a_rule_may_say_more_than_it_does(_, rule, num_layers):
    return ()


@replaces("replaced_fields", flags)
def a_flag_replaces_its_own_value_alone(_, stored, given):
    return {}


@replaces("replaced_notices", flags)
def a_value_is_replaced_without_a_word(_, replaced, file):
    return []


@replaces("reserve", Stores)
def slots_are_made_for_the_first_step(_: Any, self: Stores, micro_batches: int) -> None:
    if not self._arenas:
        self.micro_batches = micro_batches


@replaces("sizes_from", BatchSchedule)
def every_size_of_a_ramp_counts_wherever_the_run_stands(_, self, consumed, num_iterations):
    return self.sizes


@replaces("enough_microbatches", pipeline)
def the_windows_repeat_with_the_schedule(_, config, rank, num_chunks):
    return 2 * 3


@replaces("spared_flops", run_facts)
def every_micro_batch_is_recomputed_in_the_log(_, *args, **facts):
    return 0


@replaces("at", Pulse)
def the_limit_of_an_iteration_is_that_of_a_smaller_batch(
    at, self, where, *, limited=True, growth=1.0
):
    return at(self, where, limited=limited)


@replaces("_of_placement", notices)
def core_attention_is_judged_without_the_device(_, config, device, dp_cp_size):
    return []


REFUSED = test_policy_reach.test_a_rule_that_can_never_apply_is_an_error_at_its_place
PRICED = test_runs.test_a_rank_never_holds_more_than_with_the_micro_batches_that_are_priced
MUTANTS = [
    Mutant(
        a_layer_that_does_not_exist_is_passed_over,
        REFUSED,
        dict(text="0,9:full", num_layers=[3], character=1, message="layer 9 does not exist"),
    ),
    Mutant(
        units_are_as_long_as_they_say,
        REFUSED,
        dict(text="every-2:full/2", num_layers=[4], character=1, message="a unit cannot have 2"),
    ),
    Mutant(
        a_rule_may_say_more_than_it_does,
        test_policy_reach.test_a_rule_that_says_more_than_it_does_is_one_warning,
        dict(text="0-31:full", num_layers=[24], warnings=["one"]),
    ),
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
        a_value_is_replaced_without_a_word,
        test_alternatives.test_what_is_replaced_is_said_once_and_only_where_something_is,
    ),
    Mutant(
        slots_are_made_for_the_first_step,
        test_rampup.test_slots_for_saved_inputs_are_made_once_for_what_the_ramp_will_have_in_flight,
        error="slots are in use",
    ),
    Mutant(
        every_size_of_a_ramp_counts_wherever_the_run_stands,
        test_rampup.test_a_ramp_through_a_batch_the_interleaved_pipeline_cannot_take_is_refused,
        error="5 micro-batches per step",
    ),
    Mutant(the_windows_repeat_with_the_schedule, PRICED, dict(num_kept=8, num_chunks=3)),
    Mutant(
        every_micro_batch_is_recomputed_in_the_log,
        test_logging.test_the_hardware_flops_of_a_run_follow_partial_checkpointing_and_the_ramp,
    ),
    Mutant(
        the_limit_of_an_iteration_is_that_of_a_smaller_batch,
        test_pulse.test_a_larger_batch_may_take_longer_by_its_factor,
    ),
    Mutant(
        core_attention_is_judged_without_the_device,
        test_arguments.test_core_attention_is_priced_by_the_device_that_runs_it,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mistake_is_seen(
    mutant: Mutant, monkeypatch: Patch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_seen(mutant, monkeypatch, tmp_path=tmp_path, capsys=capsys)
