"""Checks that every rule of a recompute policy applies to layers that the run has.

Standard library only. Examples:

    "9:full" on 3 layers         an error: no stage has a layer 9
    "stage1/*:full", one stage   an error: there is no stage 1
    "*:full; 0:none"             an error: the first rule decides every layer that the second names
    "every-2:full/2"             an error: it names no two neighbouring layers, so no unit has 2
    "0-31:full" on 24 layers     a warning: the rule applies to the layers 0 to 23
    "*:full/8" on 4 layers       a warning: the units have 4 layers
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_lite.config.policy import Policy, Rule, parse_policy, point_at

FLAG = "--recompute-policy"


def check_policy_reaches(
    policy: Policy, num_layers: Sequence[int], *, setting: str = FLAG
) -> list[str]:
    """Returns a warning for each rule that names layers or unit lengths which the run lacks.

    num_layers: the number of layers of each stage, in the order of the model. `stageN/` counts
        these stages: each virtual stage is one (config/stages.py), and a model without a pipeline
        is one stage.
    setting: the name of the policy in the messages.

    Raises ValueError for a rule that can never apply.
    """
    # The positions of the rules must count in `text`. A policy that was built from rules has no
    # text, so its own spelling is parsed to get positions.
    text = policy.text or str(policy)
    rules = policy.rules if policy.text else parse_policy(text).rules
    # (stage, layer) of each layer that no rule before has decided: the first rule decides.
    undecided = {(stage, layer) for stage, count in enumerate(num_layers) for layer in range(count)}
    warnings: list[str] = []
    for rule in rules:
        if (fault := _missing(rule, num_layers)) is not None:
            raise ValueError(point_at(text, rule.position, fault, setting=setting))
        decided = {(stage, layer) for stage, layer in undecided if rule.names(layer, stage)}
        if not decided:
            raise ValueError(
                point_at(
                    text,
                    rule.position,
                    f"the rule {rule} never applies: the rules before it decide all of "
                    "its layers; move it to the front, or leave it out",
                    setting=setting,
                )
            )
        undecided -= decided
        longest = _longest_run(decided)
        if rule.action.unit > longest == 1 and any(num_layers[stage] > 1 for stage, _ in decided):
            raise ValueError(
                point_at(
                    text,
                    rule.position,
                    f"the rule {rule} never applies to two neighbouring layers, so a unit "
                    f"cannot have {rule.action.unit}: give full, or name neighbouring layers",
                    setting=setting,
                )
            )
        if rule.action.unit > longest:
            warnings.append(
                f"{setting} '{rule}': a unit of {rule.action.unit} is more than the "
                f"{_layers(longest)} in a row that the rule applies to: no unit has more than "
                f"{_layers(longest)}"
            )
        warnings += (f"{setting} '{rule}': {fault}" for fault in _beyond(rule, num_layers))
    return warnings


def _missing(rule: Rule, num_layers: Sequence[int]) -> str | None:
    """Returns the fault of a rule that names a stage or a layer which does not exist, or None."""
    if rule.stage is not None and rule.stage >= len(num_layers):
        if len(num_layers) == 1:
            return (
                f"stage {rule.stage} does not exist: without a pipeline the model is one stage, "
                f"stage 0; leave out stage{rule.stage}/"
            )
        return f"stage {rule.stage} does not exist: the stages are 0 to {len(num_layers) - 1}"
    count = _longest_stage(rule, num_layers)
    for layers in rule.layers:
        if layers.first >= count:
            found = (
                f"layer {layers} does not exist"
                if layers.first == layers.last
                else f"{layers} names no layer"
            )
            return f"{found}: {_existing(rule, num_layers)}"
    return None


def _beyond(rule: Rule, num_layers: Sequence[int]) -> Iterator[str]:
    count = _longest_stage(rule, num_layers)
    for layers in rule.layers:
        if layers.last is not None and layers.last >= count:
            yield f"{layers} reaches only to layer {count - 1}: {_existing(rule, num_layers)}"


def _longest_stage(rule: Rule, num_layers: Sequence[int]) -> int:
    return max(num_layers) if rule.stage is None else num_layers[rule.stage]


def _existing(rule: Rule, num_layers: Sequence[int]) -> str:
    count = _longest_stage(rule, num_layers)
    where = ""
    if len(num_layers) > 1:
        where = " of a stage" if rule.stage is None else f" of stage {rule.stage}"
    return f"the layers{where} are 0 to {count - 1}" if count > 1 else f"the only layer{where} is 0"


def _longest_run(decided: set[tuple[int, int]]) -> int:
    """Returns the largest number of neighbouring layers within one stage."""
    longest = length = 0
    previous: tuple[int, int] | None = None
    for stage, layer in sorted(decided):
        length = length + 1 if previous == (stage, layer - 1) else 1
        longest, previous = max(longest, length), (stage, layer)
    return longest


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"
