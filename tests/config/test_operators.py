"""Which operators `ops(...)` may name, which of their results are kept, and what a run says of
names without effect."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.policy import GROUPS, Choice, parse_policy
from megatron_lite.config.run import RunConfig
from tests.support.runs import tiny_run

MM, ADDMM, BMM, SUM = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "_c10d_functional.all_reduce.default",
)


@given(
    st.lists(st.sampled_from([MM, ADDMM, BMM, SUM, "aten.add.Tensor"]), max_size=20),
    st.integers(1, 5),
)
def test_every_nth_result_of_a_group_is_kept_from_the_first_on(
    forward: list[str], every: int
) -> None:
    choice = Choice((f"matmul/{every}",))
    matmuls = [place for place, name in enumerate(forward) if name in GROUPS["matmul"]]
    kept = [place for place, name in enumerate(forward) if choice.keeps(name)]
    assert kept == matmuls[::every]


def test_an_entry_counts_what_it_names_and_one_is_enough_to_keep() -> None:
    choice = Choice(("matmul/3", f"{MM}/2", "collective"))
    forward = [ADDMM, MM, SUM, MM, MM, ADDMM, MM]  # of matmul/3: places 0, 4; of mm/2: 1, 4
    assert [place for place, name in enumerate(forward) if choice.keeps(name)] == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("*:ops(matmuls)", "matmuls is no group of operators (matmul, attention, collective, max)"),
        ("*:ops(matmul, aten.mm)", "no operator spelled namespace.op.overload"),
        ("*:ops(aten.mul_.Tensor/2)", "writes into its argument"),
        ("*:ops(c10d.allreduce_.default)", "collective names those"),
        ("*:ops(c10d._allgather_base_.default)", "writes into its argument"),
    ],
)
def test_an_unknown_name_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_policy(text)
    assert message in str(raised.value) and ", in the rule " in str(raised.value)


def run_with(policy: str, *, tp_size: int = 1, **model: object) -> RunConfig:
    return tiny_run(tp_size=tp_size, **dict(model), recompute_policy=policy)


def test_a_run_refuses_operators_whose_bytes_it_could_not_tell() -> None:
    with pytest.raises(ValueError, match=r"aten\.gelu\.default would keep cannot be told"):
        run_with("0:ops(matmul);1:ops(aten.gelu.default)")
    run_with("0:ops(matmul);1:ops(aten.bmm.default/2,max)")
