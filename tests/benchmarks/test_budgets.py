"""What `--recompute-policy auto --memory-budget` promises, with the functions of the benchmark."""

from __future__ import annotations

import pytest

# dispatch modes import it when first entered: 3 s, here once for all forked ranks
import torch._dynamo  # noqa: F401

from benchmarks.budgets import (
    HAND_SET,
    Row,
    budgets,
    chosen,
    memory_row,
    next_budget,
    policy_of,
    run_of,
    with_times,
)
from megatron_lite.memory.predict.step_peak import fullest_step_peak
from megatron_lite.plan.planned_run import with_policy
from megatron_lite.plan.step_time import step_time

RUN = run_of("cpu")
BUDGETS = budgets(RUN, 6)


def seconds(text: str) -> float:
    """Returns the predicted time of a step under the policy."""
    return step_time(with_policy(RUN.config, text), RUN.hardware, RUN.num_ranks).seconds


def test_the_next_budget_is_the_smallest_that_changes_the_plan() -> None:
    budget = BUDGETS[2]
    larger, policy = next_budget(RUN, budget), policy_of(chosen(RUN, budget).config)
    assert policy_of(chosen(RUN, larger).config) != policy
    assert policy_of(chosen(RUN, larger - 1).config) == policy


@pytest.mark.long
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_step_under_the_policy_of_auto_fits_the_budget(budget: int) -> None:
    assert memory_row(RUN, budget).peak_bytes <= budget


@pytest.mark.long
@pytest.mark.parametrize("budget", BUDGETS)
def test_no_policy_by_hand_that_fits_is_predicted_to_be_faster(budget: int) -> None:
    own = seconds(policy_of(chosen(RUN, budget).config))
    for text in HAND_SET:
        config = with_policy(RUN.config, text)
        if fullest_step_peak(config, device="cpu", dp_cp_size=1).num_bytes <= budget:
            assert own <= seconds(text), text


def test_the_best_policy_by_hand_is_the_fastest_that_fits() -> None:
    row = Row(
        budget_bytes=10,
        policy="own",
        predicted_bytes=9,
        peak_bytes=9,
        next_budget_bytes=12,
        next_policy="next",
        next_peak_bytes=11,
    )
    times = {"own": [3.0, 4.0, 9.0], "fits": [2.0, 4.0, 6.0], "slow": [9.0] * 3, "full": [1.0] * 3}
    (timed,) = with_times([row], {"fits": 10, "slow": 1, "full": 11}, times)
    assert (timed.best, timed.ratio) == ("fits", 1.5)
    assert list(with_times([row], {"full": 11}, times)) == [row]
