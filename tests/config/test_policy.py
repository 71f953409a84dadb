"""The language of --recompute-policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.policy import STORES, LayerAction, Layers, Policy, Rule, parse_policy
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.regions import MODULES
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment, segments
from megatron_lite.recompute.schedule import plan_stage

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
    st.integers(1, 4).map(lambda unit: LayerAction(unit=unit)),
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
    lambda layers, action, store, stage: Rule(
        layers=tuple(layers),
        action=action,
        stage=stage,
        store=store if action.unit or not store.startswith("split") else "host",
    ),
    st.lists(LAYERS, min_size=1, max_size=3),
    ACTIONS,
    st.sampled_from(STORES),
    st.one_of(st.none(), st.integers(0, 2)),
)
POLICIES = st.lists(RULES, min_size=1, max_size=4).map(lambda rules: Policy(tuple(rules)))


@given(POLICIES)
def test_what_a_policy_prints_parses_to_it(policy: Policy) -> None:
    assert parse_policy(str(policy)) == policy


@given(POLICIES, st.integers(1, 12), st.integers(0, 2))
def test_every_layer_has_exactly_one_treatment_and_it_is_that_of_the_first_rule_that_names_it(
    policy: Policy, num_layers: int, stage: int
) -> None:
    plan = RecomputePlan(tuple(segments(policy, num_layers, stage)))
    assert [
        layer
        for segment in plan.segments
        for layer in range(segment.first_layer, segment.first_layer + segment.num_layers)
    ] == list(range(num_layers))
    for segment in plan.segments:
        for layer in range(segment.first_layer, segment.first_layer + segment.num_layers):
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
            assert segment.regions == set(action.regions) - (
                {"activation"} if "mlp" in action.regions else set()
            )
            assert segment.store == ("device" if first is None else first.store)
            assert not segment.unit or segment.num_layers <= action.unit


@given(POLICIES, st.integers(1, 12))
def test_a_plan_prints_as_a_policy_that_gives_it(policy: Policy, num_layers: int) -> None:
    plan = RecomputePlan(tuple(segments(policy, num_layers)))
    assert RecomputePlan(tuple(segments(parse_policy(str(plan)), num_layers))) == plan


FULL = dict(recompute_granularity="full")


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ({}, "*:none"),
        (dict(recompute_activations=True), "*:core_attn"),
        (
            dict(recompute_granularity="selective", recompute_modules=("pointwise", "core_attn")),
            "*:layernorm+activation+dropout+core_attn",
        ),
        (dict(**FULL, recompute_method="uniform"), "*:full"),
        (dict(**FULL, recompute_method="uniform", recompute_num_layers=2), "0-4:full/2"),
        (dict(**FULL, recompute_method="block", recompute_num_layers=2), "0,1:full; 2-4:none"),
        (dict(**FULL, recompute_method="block", recompute_num_layers=9), "*:full"),
        (
            dict(**FULL, recompute_method="uniform", distribute_saved_activations=True),
            "*:full@split",
        ),
    ],
)
def test_megatrons_flags_and_the_policy_that_says_the_same_give_equal_plans(
    flags: dict[str, object], policy: str
) -> None:
    assert plan_stage(RecomputeConfig(**flags), 5) == plan_stage(
        RecomputeConfig(recompute_policy=policy), 5
    )  # type: ignore[arg-type]


def test_every_nth_layer_goes_by_its_number() -> None:
    def units(policy: str) -> list[int]:
        plan = plan_stage(RecomputeConfig(recompute_policy=policy), 8)
        return [segment.first_layer for segment in plan.segments if segment.unit]

    assert (
        units("every-3:full") == [0, 3, 6]
        and units("every-3+2:full") == [2, 5]
        and units("every-1:full") == list(range(8))
    )


def test_units_never_reach_over_layers_of_another_rule() -> None:
    plan = plan_stage(RecomputeConfig(recompute_policy="3:none; *:full/2"), 7)
    units = [(segment.first_layer, segment.num_layers) for segment in plan.segments if segment.unit]
    assert units == [(0, 2), (2, 1), (4, 2), (6, 1)]
    assert plan.segments[2] == Segment(first_layer=3)


def test_a_rule_of_a_stage_leaves_the_others_alone() -> None:
    config = RecomputeConfig(recompute_policy="stage1/0:full; 0:mlp")
    assert [str(plan_stage(config, 2, stage)) for stage in (0, 1)] == [
        "0:mlp; 1:none",
        "0:full; 1:none",
    ]


@pytest.mark.parametrize(
    ("text", "character", "message"),
    [
        ("", 1, "expected a layer"),
        ("full", 1, "every-N or * (all layers: *:full)"),
        ("0:full; mlp+layernorm", 9, "(all layers: *:mlp)"),
        ("auto", 1, "every-N or *, at"),
        ("0-3", 4, "expected ':'"),
        ("0-3:", 5, "expected an action"),
        ("0-3:ful", 5, "expected an action: none, full, core_attn"),
        ("*:op(matmul)", 3, "pointwise, ops(...) (got op)"),
        ("3-1:full", 2, "the range ends before it begins (3-1)"),
        ("*:full/0", 8, "of at least 1"),
        ("*:full@moon", 8, "expected a place: device, split, host, split+host (got moon)"),
        ("*:mlp@split", 7, "full@split"),
        ("*:mlp+norm", 7, "expected a region"),
        ("*:mlp+mlp", 3, "named twice"),
        ("every-0:full", 7, "a step of at least 1"),
        ("every-2+2:full", 10, "below 2"),
        ("*:ops()", 7, "expected an operator"),
        ("*:ops(matmul", 13, "expected ')'"),
        ("*:full 0:none", 8, "expected ';'"),
        ("stage/0:full", 6, "the number of a stage"),
    ],
)
def test_an_error_points_at_the_character(text: str, character: int, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_policy(text)
    first, shown, mark = str(raised.value).splitlines()
    assert message in first and first.endswith(f"at character {character}")
    assert shown == f"  {text}" and mark.index("^") == character + 1


def test_text_is_bounded() -> None:
    with pytest.raises(ValueError, match="longer than 4096"):
        parse_policy("0:full;" * 1000)


@pytest.mark.parametrize(
    "flags",
    [
        dict(recompute_activations=True),
        dict(**FULL, recompute_method="uniform"),
        dict(distribute_saved_activations=True),
        dict(recompute_modules=("mlp",)),
    ],
)
def test_megatrons_flags_and_a_policy_exclude_each_other(flags: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="and --recompute-policy are two ways"):
        RecomputeConfig(recompute_policy="*:full", **flags)  # type: ignore[arg-type]


def test_parts_of_a_layer_have_one_normal_spelling() -> None:
    policy = parse_policy("0: none @ host( linear_fc2 + core_attn+core_attn ); *:full@host")
    assert str(policy) == "0:none@host(core_attn+linear_fc2); *:full@host"
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "message", "position"),
    [
        ("*:none@host(", "expected a part of a layer: attn_norm, qkv_linear, core_attn", 12),
        ("*:none@host(mlp)", "(got mlp)", 12),
        ("*:none@host(core_attn", "expected ')' after the parts", 21),
        ("*:full@host(core_attn)", "only a layer that keeps everything has parts", 7),
        ("*:mlp@host(core_attn)", "only a layer that keeps everything has parts", 6),
    ],
)
def test_parts_that_cannot_be_are_pointed_at(text: str, message: str, position: int) -> None:
    with pytest.raises(ValueError) as fault:
        parse_policy(text)
    assert message in str(fault.value)
    assert str(fault.value).endswith(f"\n  {text}\n  {' ' * position}^")
