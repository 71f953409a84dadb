"""The language of --recompute-policy.

Which operators `ops(...)` may name, which of their results are kept, and what a run says of
names without effect.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.policy import (
    GROUPS,
    STORES,
    Choice,
    LayerAction,
    Layers,
    Policy,
    Rule,
    check_policy_reaches,
    parse_policy,
)
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.regions import MODULES
from megatron_lite.recompute.recompute_plan import RecomputePlan, segments
from megatron_lite.recompute.schedule import plan_stage
from tests.support.runs import tiny_run

LAYERS = st.one_of(
    st.just(Layers()),
    st.tuples(st.integers(0, 12), st.integers(0, 4)).map(
        lambda pair: Layers(pair[0], pair[0] + pair[1])
    ),
    st.tuples(st.integers(2, 5), st.integers(0, 1)).map(
        lambda pair: Layers(pair[1], None, pair[0])
    ),
)
ACTIONS = st.one_of(
    st.just(LayerAction()),
    st.builds(LayerAction, unit=st.integers(1, 4), tiles=st.integers(1, 3)),
    st.sets(st.sampled_from(MODULES), min_size=1).map(
        lambda regions: LayerAction(regions=tuple(sorted(regions)))
    ),
    st.lists(
        st.sampled_from(["matmul", "matmul/2", "attention", "aten.mm.default"]),
        min_size=1,
        unique=True,
    ).map(lambda ops: LayerAction(ops=tuple(ops))),
)
RULES = st.builds(
    lambda layers, action, router, store, stage: Rule(
        layers=tuple(layers),
        action=replace(action, router=router and action != LayerAction()),
        stage=stage,
        store=store if action.unit or not store.startswith("split") else "host",
    ),
    st.lists(LAYERS, min_size=1, max_size=3),
    ACTIONS,
    st.booleans(),
    st.sampled_from(STORES),
    st.one_of(st.none(), st.integers(0, 2)),
)
POLICIES = st.lists(RULES, min_size=1, max_size=4).map(lambda rules: Policy(tuple(rules)))


@given(POLICIES)
def test_what_a_policy_prints_parses_to_it(policy):
    assert parse_policy(str(policy)) == policy


@given(POLICIES, st.integers(1, 12), st.integers(0, 2))
def test_every_layer_has_exactly_one_treatment_and_it_is_that_of_the_first_rule_that_names_it(
    policy, num_layers, stage
):
    plan = RecomputePlan(tuple(segments(policy, num_layers, stage)))
    covered = []
    for segment in plan.segments:
        for layer in range(segment.first_layer, segment.first_layer + segment.num_layers):
            covered.append(layer)
            first = next(
                (
                    rule
                    for rule in policy.rules
                    if rule.stage in (None, stage)
                    and any(layer in layers for layers in rule.layers)
                ),
                None,
            )
            action = LayerAction() if first is None else first.action
            assert segment.unit == bool(action.unit) and segment.ops == action.ops
            assert segment.router == action.router
            inside = {"mlp": {"activation"}, "moe": {"moe_act", "shared_experts"}}
            assert segment.regions == set(action.regions).difference(
                *(inside.get(region, ()) for region in action.regions)
            )
            assert segment.store == ("device" if first is None else first.store)
            assert not segment.unit or segment.num_layers <= action.unit
    assert covered == list(range(num_layers))


@pytest.mark.parametrize(
    "flags, policy",
    [
        ({}, "*:none"),
        (
            dict(recompute_granularity="selective", recompute_modules=("pointwise", "core_attn")),
            "*:layernorm+activation+dropout+moe_act+core_attn",
        ),
        (
            dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=9),
            "*:full",
        ),
    ],
)
def test_megatrons_flags_and_the_policy_that_says_the_same_give_equal_plans(flags, policy):
    """The others stand on docs/coming-from.md, which has a test."""
    assert plan_stage(RecomputeConfig(**flags), 5) == plan_stage(
        RecomputeConfig(recompute_policy=policy), 5
    )


def test_layers_units_and_stages_go_by_their_numbers():
    def units(policy, num_layers, stage=0):
        plan = plan_stage(RecomputeConfig(recompute_policy=policy), num_layers, stage)
        return [(one.first_layer, one.num_layers) for one in plan.segments if one.unit]

    assert units("every-3+2:full", 8) == [(2, 1), (5, 1)]
    assert units("3:none; *:full/2", 7) == [(0, 2), (2, 1), (4, 2), (6, 1)]
    assert units("stage1/0:full; 0:mlp", 2) == [] != units("stage1/0:full; 0:mlp", 2, 1)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected LAYERS:ACTION, such as *:full"),
        ("auto:full", "expected a layer: a number, a range"),
        ("0-3:", "expected an action: none, full"),
        ("0,3-1:full", "the range ends before it begins (3-1)"),
        ("*:full/0", "at least 1"),
        ("*:full@moon", "expected a place: device, split, host, split+host (got 'moon')"),
        ("*:mlp@split", "full@split"),
        ("*:mlp + norm", "(got 'norm')"),
        ("*:mlp+mlp", "named twice"),
        ("*:full+mlp", "full is no part of a layer"),
        ("*:none+router", "leave out +router"),
        ("every-0:full", "a step of at least 1"),
        ("*:ops()", "expected an operator"),
        ("*:none@host(mlp)", "expected a part of a layer: attn_norm, qkv_linear, core_attn"),
        ("*:full@host(core_attn)", "only a layer that keeps everything has parts"),
        ("*:ops(matmuls)", "matmuls is no group of operators (matmul, attention, collective, max)"),
        ("*:ops(matmul, aten.mm)", "no operator spelled namespace.op.overload"),
        ("*:ops(aten.mul_.Tensor/2)", "writes into its argument"),
        ("*:ops(c10d.allreduce_.default)", "collective names those"),
    ],
)
def test_an_error_has_the_rule_and_what_was_expected(text, message):
    with pytest.raises(ValueError) as raised:
        parse_policy(text, setting="policy")
    said = str(raised.value)
    rule = next(one for one in text.split(";") if one.strip() in said).strip()
    assert said.startswith("policy: ") and said.endswith(f", in the rule {rule!r}")
    assert message in said and "\n" not in said


@given(st.text("0123:;,@*+-/()every-full none mlp host ops split", max_size=40))
def test_any_other_text_is_refused_or_prints_as_it_is_read(text):
    try:
        policy = parse_policy(text)
    except ValueError as error:
        assert ", in the rule " in str(error)
    else:
        assert parse_policy(str(policy)) == policy


def test_text_is_bounded():
    with pytest.raises(ValueError, match="policy is longer than 4096"):
        parse_policy("0:full;" * 1000, setting="policy")


def test_parts_of_a_layer_have_one_normal_spelling():
    policy = parse_policy("0: none @ host( linear_fc2 + core_attn+core_attn ); *:full@host;")
    assert str(policy) == "0:none@host(core_attn+linear_fc2); *:full@host"
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    "text, num_layers, message",
    [
        ("0,9:full", [3], "layer 9 does not exist, only 0 to 2"),
        ("stage1/2:full", [3, 2], "layer 2 does not exist, only 0 to 1"),
        ("*:mlp; stage3/0:full", [3, 3], "stage 3 does not exist, only 0 to 1"),
        ("0-1:full; 2:mlp; *:none", [3], "the rules before it decide all of its layers"),
        ("every-2:full/2", [4], "no neighbouring layers, so a unit cannot have 2: give full"),
    ],
)
def test_a_rule_that_can_never_apply_is_an_error(text, num_layers, message):
    with pytest.raises(ValueError) as raised:
        check_policy_reaches(parse_policy(text), num_layers, setting="policy")
    said = str(raised.value)
    assert said.startswith("policy: the rule ") and message in said


@pytest.mark.parametrize(
    "text, num_layers, warning",
    [
        ("every-2:full", [1], None),
        ("stage0/*:full; stage1/0:mlp; *:none", [2, 2], None),
        ("*:full/2", [3], None),
        ("1:none; *:full/2", [5], None),
        ("0-31:full", [24], "0-31 reaches only to layer 23"),
        ("*:full/8", [4, 3], "no unit has more than 4 layers here"),
    ],
)
def test_a_rule_that_says_more_than_it_does_is_one_warning(text, num_layers, warning):
    found = check_policy_reaches(parse_policy(text), num_layers)
    assert found == ([] if warning is None else [f"--recompute-policy '{text}': {warning}"])


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
def test_every_nth_result_of_a_group_is_kept_from_the_first_on(forward, every):
    choice = Choice((f"matmul/{every}",))
    matmuls = [place for place, name in enumerate(forward) if name in GROUPS["matmul"]]
    assert [place for place, name in enumerate(forward) if choice.keeps(name)] == matmuls[::every]


def test_an_entry_counts_what_it_names_and_one_is_enough_to_keep():
    choice = Choice(("matmul/3", f"{MM}/2", "collective"))
    forward = [ADDMM, MM, SUM, MM, MM, ADDMM, MM]  # of matmul/3: places 0, 4; of mm/2: 1, 4
    assert [place for place, name in enumerate(forward) if choice.keeps(name)] == [0, 1, 2, 4]


def test_a_run_refuses_operators_whose_bytes_it_could_not_tell():
    with pytest.raises(ValueError, match=r"aten\.gelu\.default would keep cannot be told"):
        tiny_run(recompute_policy="0:ops(matmul);1:ops(aten.gelu.default)")
    tiny_run(recompute_policy="0:ops(matmul);1:ops(aten.bmm.default/2,max)")
