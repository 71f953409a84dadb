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
                                 the device; for `none` alone (config/host_parts.py)
             split+host          both

Text that cannot be read raises a ValueError, which points at the character.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from megatron_lite.config.host_parts import PARTS, store_of
from megatron_lite.config.operators import parse_entry
from megatron_lite.config.regions import ALIAS, MODULES, expanded

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
