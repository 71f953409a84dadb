"""The language of `--recompute-policy`: what each layer rebuilds in backward, and where its kept
tensors lie until then.

    0-3:full/2; every-2:core_attn+layernorm; *:none

    policy   rule; rule; ...     The first rule that names a layer decides. A layer that no rule
                                 names keeps everything.
    rule     [stageN/]layers:action[@store]
    layers   *   3   0-3   every-3   every-3+1
                                 Several of these are joined with commas. Layers count from 0
                                 within a stage. every-3+1 names the layers 1, 4, 7, ...
    action   none                keep everything
             full   full/2       rebuild whole layers, in units of 1 or 2 neighbouring layers
             core_attn+layernorm rebuild these regions of each layer
             ops(matmul,attention)
                                 keep the results of these operators and rebuild the rest
    store    device              on the device (the default)
             split               1/t of a unit's input on each tensor-parallel rank
             host                in host memory
             host(qkv_linear+core_attn)
                                 in host memory what these parts of a layer save, the rest on
                                 the device; for `none` alone (config/regions.py)
             split+host          both

Text that cannot be read raises a ValueError, which points at the character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from megatron_lite.config.operators import parse_entry
from megatron_lite.config.regions import ALIAS, MODULES, PARTS, expanded, store_of

STORES = ("device", "split", "host", "split+host")
MAX_LENGTH = 4096

Item = TypeVar("Item")


@dataclass(frozen=True)
class Layers:
    """The layers first, first + step, first + 2 step, ... of a stage, up to and including last.

    last: the last layer that may be named. None: the last layer of the stage.
    """

    first: int = 0
    last: int | None = None
    step: int = 1

    def __contains__(self, layer: int) -> bool:
        return (
            layer >= self.first
            and (self.last is None or layer <= self.last)
            and (layer - self.first) % self.step == 0
        )

    def __str__(self) -> str:
        if self.step > 1:
            return f"every-{self.step}" + (f"+{self.first}" if self.first else "")
        if self.last is None:
            return "*"
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, kw_only=True)
class LayerAction:
    """The action of a rule: at most one field is set. With none, the layer keeps everything.

    unit: the number of neighbouring layers of a unit, which is rebuilt whole. 0: no unit.
    regions: the regions of the layer that are rebuilt, sorted by name.
    ops: the operators whose results are kept. Everything else is rebuilt.
    """

    unit: int = 0
    regions: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.unit:
            return "full" if self.unit == 1 else f"full/{self.unit}"
        if self.ops:
            return f"ops({','.join(self.ops)})"
        return "+".join(self.regions) or "none"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of a policy: the layers that it names, and what they do.

    stage: the only stage that the rule applies to. None: all stages.
    position: the index of the rule's first character in the text of the policy.
    """

    layers: tuple[Layers, ...]
    action: LayerAction
    store: str = "device"
    stage: int | None = None
    position: int = field(default=0, compare=False)

    def names(self, layer: int, stage: int) -> bool:
        """Returns whether the rule names this layer of this stage."""
        return self.stage in (None, stage) and any(layer in layers for layers in self.layers)

    def __str__(self) -> str:
        stage = "" if self.stage is None else f"stage{self.stage}/"
        store = "" if self.store == "device" else f"@{self.store}"
        return f"{stage}{','.join(map(str, self.layers))}:{self.action}{store}"


@dataclass(frozen=True)
class Policy:
    """The rules of a policy in order. `str(policy)` is a text that parses to an equal policy.

    text: the text that the policy was parsed from, in which the positions of its rules count.
        It is empty if the policy was built from rules.
    """

    rules: tuple[Rule, ...]
    text: str = field(default="", compare=False, repr=False)

    def rule_of(self, layer: int, stage: int = 0) -> Rule | None:
        """Returns the rule that decides for the layer: the first that names it, or None."""
        return next((rule for rule in self.rules if rule.names(layer, stage)), None)

    def __str__(self) -> str:
        return "; ".join(map(str, self.rules))


def parse_policy(text: str, *, setting: str = "--recompute-policy") -> Policy:
    """Returns the policy that the text describes.

    setting: the name of the policy in error messages: a flag, or an argument of a Python function.

    Raises ValueError if the text is no policy. The message gives the place and what was expected.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(
            f"{setting} is longer than {MAX_LENGTH} characters (got {len(text)}): give fewer rules"
        )
    return _Reader(text, setting).policy()


def point_at(text: str, position: int, message: str, *, setting: str = "--recompute-policy") -> str:
    """Returns three lines: the message, the text, and a mark under the character at `position`."""
    return f"{setting}: {message}, at character {position + 1}\n  {text}\n  {' ' * position}^"


class _Reader:
    """Reads the text of a policy from left to right.

    position: the index of the next character.
    setting: the name of the policy in error messages.
    """

    def __init__(self, text: str, setting: str) -> None:
        self.text, self.setting, self.position = text, setting, 0

    def policy(self) -> Policy:
        rules = [self._rule()]
        while self._taken(";"):
            if self._at_end():
                break
            rules.append(self._rule())
        if not self._at_end():
            self._fail("expected ';' or the end")
        return Policy(tuple(rules), self.text)

    def _rule(self) -> Rule:
        self._skip_spaces()
        start, stage = self.position, None
        if self._taken("stage"):
            stage = self._number("the number of a stage")
            self._expect("/", "between the stage and its layers")
        layers = self._list(self._layers, ",")
        self._expect(":", "between layers and action")
        action = self._action()
        store = "device"
        if self._taken("@"):
            at = self.position
            store = self._word(STORES, "a place", extra="+")
            if store == "host" and self._taken("("):
                store = self._host_parts(action, at)
            if store.startswith("split") and not action.unit:
                # The store is the fault: the message points at it, not behind it.
                self.position = at
                self._fail("only the input of a unit can be split over ranks: full@split")
        return Rule(layers=layers, action=action, store=store, stage=stage, position=start)

    def _layers(self) -> Layers:
        if self._taken("*"):
            return Layers()
        if self._taken("every-"):
            step = self._number("a step", least=1)
            first = self._number("the first layer") if self._taken("+") else 0
            if first >= step:
                self._fail(f"the first layer of every-{step} must be below {step}")
            return Layers(first, None, step)
        wanted = "a layer: a number, a range such as 0-3, every-N or *"
        action = re.compile(r"\w+").match(self.text, self.position)
        if action is not None and action.group() in ("none", "full", *MODULES, ALIAS):
            wanted += f" (all layers: *:{action.group()})"
        first = self._number(wanted)
        start = self.position
        last = self._number("the last layer of the range") if self._taken("-") else first
        if last < first:
            self.position = start
            self._fail(f"the range ends before it begins ({first}-{last})")
        return Layers(first, last)

    def _action(self) -> LayerAction:
        if self._taken("ops"):
            self._expect("(", "after ops")
            ops = self._list(self._operator, ",")
            self._expect(")", "after the operators")
            return LayerAction(ops=ops)
        start = self.position
        name = self._word(("none", "full", *MODULES, ALIAS), "an action", other="ops(...)")
        if name == "none":
            return LayerAction()
        if name == "full":
            return LayerAction(
                unit=self._number("the layers of a unit", least=1) if self._taken("/") else 1
            )
        names = [name]
        while self._taken("+"):
            names.append(self._word((*MODULES, ALIAS), "a region"))
        regions = expanded(names)
        if len(set(regions)) < len(regions):
            self.position = start
            self._fail("a region is named twice")
        # Sorted, so that two spellings of the same regions are equal policies.
        return LayerAction(regions=tuple(sorted(regions)))

    def _host_parts(self, action: LayerAction, at: int) -> str:
        names = [self._word(tuple(PARTS), "a part of a layer")]
        while self._taken("+"):
            names.append(self._word(tuple(PARTS), "a part of a layer"))
        self._expect(")", "after the parts")
        if action != LayerAction():
            self.position = at
            self._fail("only a layer that keeps everything has parts on the host: none@host(..)")
        return store_of(tuple(names))

    def _operator(self) -> str:
        self._skip_spaces()
        match = re.compile(r"[A-Za-z_][\w.]*(/[1-9]\d{0,3})?").match(self.text, self.position)
        if match is None:
            self._fail("expected an operator, such as matmul, matmul/2 or aten.mm.default")
        try:
            # parse_entry knows no position: it is called before the reader moves on, so that
            # _fail points at the start of the operator.
            parse_entry(match.group())
        except ValueError as error:
            self._fail(str(error))
        self.position = match.end()
        return match.group()

    def _list(self, item: Callable[[], Item], separator: str) -> tuple[Item, ...]:
        items = [item()]
        while self._taken(separator):
            items.append(item())
        return tuple(items)

    def _word(
        self, allowed: tuple[str, ...], what: str, extra: str = "", other: str | None = None
    ) -> str:
        self._skip_spaces()
        match = re.compile(rf"[\w{extra}]+").match(self.text, self.position)
        if match is None or match.group() not in allowed:
            found = "" if match is None else f" (got {match.group()})"
            choices = allowed if other is None else (*allowed, other)
            self._fail(f"expected {what}: {', '.join(choices)}{found}")
        self.position = match.end()
        return match.group()

    def _number(self, what: str, *, least: int = 0) -> int:
        self._skip_spaces()
        match = re.compile(r"\d{1,6}").match(self.text, self.position)
        if match is None or int(match.group()) < least:
            self._fail(f"expected {what}" + (f" of at least {least}" if match else ""))
        self.position = match.end()
        return int(match.group())

    def _expect(self, text: str, where: str) -> None:
        if not self._taken(text):
            self._fail(f"expected '{text}' {where}")

    def _taken(self, text: str) -> bool:
        self._skip_spaces()
        found = self.text.startswith(text, self.position)
        self.position += len(text) if found else 0
        return found

    def _at_end(self) -> bool:
        self._skip_spaces()
        return self.position == len(self.text)

    def _skip_spaces(self) -> None:
        while self.text[self.position : self.position + 1].isspace():
            self.position += 1

    def _fail(self, message: str) -> NoReturn:
        raise ValueError(point_at(self.text, self.position, message, setting=self.setting))


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
