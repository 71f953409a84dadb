"""Every rule of a recompute policy applies to a layer of the run, or the run is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.config.policy import Policy, check_policy_reaches, parse_policy
from tests.config.test_policy import POLICIES


@pytest.mark.parametrize(
    ("text", "num_layers", "character", "message"),
    [
        ("9:full", [3], 1, "layer 9 does not exist: the layers are 0 to 2"),
        ("0,9:full", [3], 1, "layer 9 does not exist: the layers are 0 to 2"),
        ("0:full; 7-9:mlp", [3], 9, "7-9 names no layer: the layers are 0 to 2"),
        ("1:full", [1], 1, "layer 1 does not exist: the only layer is 0"),
        ("3:full", [3, 2], 1, "layer 3 does not exist: the layers of a stage are 0 to 2"),
        ("stage1/2:full", [3, 2], 1, "layer 2 does not exist: the layers of stage 1 are 0 to 1"),
        ("every-9+8:full", [4], 1, "every-9+8 names no layer: the layers are 0 to 3"),
        (
            "stage1/*:full",
            [3],
            1,
            (
                "stage 1 does not exist: without a pipeline the model is one stage, stage 0; leave "
                "out stage1/"
            ),
        ),
        ("*:mlp; stage3/0:full", [3, 3], 8, "stage 3 does not exist: the stages are 0 to 1"),
        (
            "*:full; 0:none",
            [3],
            9,
            "the rule 0:none never applies: the rules before it decide all of its layers",
        ),
        ("0-1:full; 2:mlp; *:none", [3], 18, "the rule *:none never applies"),
        ("stage0/*:full; stage1/*:mlp; *:none", [3, 3], 30, "the rule *:none never applies"),
        (
            "every-2:full/2",
            [4],
            1,
            "never applies to two neighbouring layers, so a unit cannot have 2: give full",
        ),
        (
            "1:none; *:full/3",
            [3],
            9,
            "never applies to two neighbouring layers, so a unit cannot have 3: give full",
        ),
    ],
)
def test_a_rule_that_can_never_apply_is_an_error_at_its_place(
    text: str, num_layers: list[int], character: int, message: str
) -> None:
    for setting in ("--recompute-policy", "policy"):
        with pytest.raises(ValueError) as raised:
            check_policy_reaches(parse_policy(text), num_layers, setting=setting)
        first, shown, _ = str(raised.value).splitlines()
        assert (
            first.startswith(f"{setting}: ")
            and message in first
            and first.endswith(f"at character {character}")
        )
        assert shown == f"  {text}"


@pytest.mark.parametrize(
    ("text", "num_layers", "warnings"),
    [
        ("*:full", [3], []),
        ("every-2:full", [1], []),
        ("every-2+1:full; *:none", [3], []),
        ("2:full", [3, 2], []),
        ("stage0/*:full; stage1/0:mlp; *:none", [2, 2], []),
        ("*:full/2", [3], []),
        ("1:none; *:full/2", [5], []),
        (
            "0-31:full",
            [24],
            [
                (
                    "--recompute-policy '0-31:full': 0-31 reaches only to layer 23: the layers are "
                    "0 to 23"
                )
            ],
        ),
        (
            "*:full/8",
            [4, 3],
            [
                "--recompute-policy '*:full/8': a unit of 8 is more than the 4 layers in a row "
                "that the rule applies "
                "to: no unit has more than 4 layers"
            ],
        ),
        (
            "*:full/2",
            [1, 1],
            [
                "--recompute-policy '*:full/2': a unit of 2 is more than the 1 layer in a row "
                "that the rule applies "
                "to: no unit has more than 1 layer"
            ],
        ),
    ],
)
def test_a_rule_that_says_more_than_it_does_is_one_warning(
    text: str, num_layers: list[int], warnings: list[str]
) -> None:
    assert check_policy_reaches(parse_policy(text), num_layers) == warnings


@given(POLICIES, st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_an_accepted_rule_decides_a_layer_and_a_refused_policy_has_a_fault(
    policy: Policy, num_layers: list[int]
) -> None:
    deciding = {
        id(policy.rule_of(layer, stage))
        for stage, count in enumerate(num_layers)
        for layer in range(count)
    }
    reaches_all = all(id(rule) in deciding for rule in policy.rules)
    try:
        check_policy_reaches(policy, num_layers)
    except ValueError as error:
        assert (
            not reaches_all
            or "names no layer" in str(error)
            or "does not exist" in str(error)
            or "neighbouring" in str(error)
        )
    else:
        assert reaches_all


def test_texts_name_the_setting_that_was_given() -> None:
    for text, message in (
        ("*:ful", "policy: expected an action"),
        ("0:full;" * 1000, "policy is longer than 4096"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            parse_policy(text, setting="policy")
