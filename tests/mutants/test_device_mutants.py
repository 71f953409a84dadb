"""Mistakes that only a GPU would punish, each put into a training step: a named test must fail."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_lite.parallel import collectives
from megatron_lite.recompute.offload import CudaCopyStreams
from megatron_lite.training.step import StepEnd, StepFigures
from tests.support.mutants import Mutant, each_is_seen, replaces
from tests.training import test_step_times
from tests.training.test_device_hot_path import check_short_case


@replaces("wait", CudaCopyStreams)
def nothing_waits_for_a_copy(wait: Any, self: Any, mark: Any) -> None:
    pass


@replaces("wait", collectives.Started)
def a_collective_is_read_before_it_ends(wait: Any, self: Any) -> Any:
    return self.result


@replaces("figures", StepEnd)
def figures_are_read_before_their_event(figures: Any, self: StepEnd) -> StepFigures:
    return StepFigures(**dict(zip(self._names, self._values.tolist(), strict=True)))


LATE = partial(
    Mutant,
    test=test_step_times.test_figures_read_one_step_late_are_those_of_their_own_step_and_wait_for_no_other,
)
MUTANTS = [
    LATE(figures_are_read_before_their_event),
    Mutant(nothing_waits_for_a_copy, check_short_case, dict(number=0)),
    Mutant(a_collective_is_read_before_it_ends, check_short_case, dict(number=3), long=True),
]


test_is_seen = each_is_seen(MUTANTS)
