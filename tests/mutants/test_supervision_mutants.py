"""Mistakes in what looks after a run and speaks for it, each put back: a named test must fail."""

from __future__ import annotations

import pytest

from megatron_lite.supervision import verdict
from megatron_lite.training import run_notices
from tests.config import test_notices
from tests.supervision import test_verdict
from tests.support.mutants import Mutant, assert_seen, replaces

Patch = pytest.MonkeyPatch


@replaces("notices", run_notices)
def the_device_and_the_ranks_give_no_notice(_, config, about, **facts):
    return []


@replaces("LEFT", verdict)
def a_rank_that_has_ended_counts_as_silent(_):
    return "gone"


@replaces("_interrupts", verdict)
def every_signal_is_left_to_the_training_loop(_, number):
    return False


ALL = test_notices.test_one_function_gives_all_notices_of_a_run_in_the_order_of_the_command_line
MUTANTS = [
    Mutant(the_device_and_the_ranks_give_no_notice, ALL),
    Mutant(
        a_rank_that_has_ended_counts_as_silent,
        test_verdict.test_a_rank_that_had_ended_before_is_not_silent,
    ),
    Mutant(
        every_signal_is_left_to_the_training_loop,
        test_verdict.test_ctrl_c_ends_a_run_that_takes_care_of_other_signals,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_is_seen(mutant: Mutant, monkeypatch: Patch) -> None:
    assert_seen(mutant, monkeypatch)
