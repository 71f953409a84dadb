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
             layernorm+mlp/8     the MLP in 8 tiles of the sequence, one at a time, in forward and
                                 in backward; also full+mlp/8, in the units
             ops(matmul,attention)
                                 keep the results of these operators and rebuild the rest
             full+router         besides, keep which experts a router chose, behind any action but
                                 none. It is so wherever a layer calls top-k, also unsaid.
    store    device              on the device (the default)
             split               1/t of a unit's input on each tensor-parallel rank
             host                in host memory
             host(qkv_linear+core_attn)
                                 in host memory what these parts of a layer save, the rest on
                                 the device; for `none` alone (config/regions.py)
             split+host          both

Text that cannot be read raises a ValueError, which has the rule and what was expected.

An entry of `ops(...)` is a group or one operator of torch, such as aten.mm.default. The groups are:

    matmul       every matrix product
    attention    the fused attention kernels, and the whole attention over context-parallel ranks.
                 Unfused attention, which builds its scores, has no such operator.
    collective   the all-reduces, all-gathers and reduce-scatters of tensor parallelism, and the
                 all-gather of keys and values of unfused attention over context-parallel ranks
    max          maxima, which scaled number formats need. The layers of this project have none.

NAME/N keeps the first result of each layer and every N-th after it, in the order of the forward.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .checks import quoted
from .regions import ALIAS, MLP_REGION, MODULES, PARTS, expanded, store_of

STORES = ("device", "split", "host", "split+host")
MAX_LENGTH = 4096
FLAG = "--recompute-policy"
NUMBER = r"(\d{1,6})"
RULE = re.compile(rf"\s*(?:stage\s*{NUMBER}\s*/)?([^:]*):([^:@]*)(?:@([^:]*))?")
LAYERS = re.compile(
    rf"\*|every-{NUMBER}(?:\s*\+\s*{NUMBER})?|{NUMBER}(?:\s*-\s*{NUMBER})?", re.ASCII
)


@dataclass(frozen=True)
class Layers:
    """The layers first, first + step, first + 2 step, ... of a stage, up to and including last.

    last: the last layer that may be named. None: the last layer of the stage.
    """

    first: int = 0
    last: int | None = None
    step: int = 1

    def __contains__(self, layer: int) -> bool:
        last = layer if self.last is None else self.last
        return layer in range(self.first, last + 1, self.step)

    def __str__(self) -> str:
        if self.step > 1:
            return f"every-{self.step}" + (f"+{self.first}" if self.first else "")
        if self.last is None:
            return "*"
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


@dataclass(frozen=True, kw_only=True)
class LayerAction:
    """The action of a rule: at most one of the first three fields is set. With none, the layer
    keeps everything.

    unit: the number of neighbouring layers of a unit, which is rebuilt whole. 0: no unit.
    regions: the regions of the layer that are rebuilt, sorted by name.
    ops: the operators whose results are kept. Everything else is rebuilt.
    router: whether the text says that the choice of a router is kept.
    tiles: into how many tiles of the sequence the MLP is cut, in a unit or among the regions.
    """

    unit: int = 0
    regions: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    router: bool = False
    tiles: int = 1

    def __str__(self) -> str:
        mlp = f"{MLP_REGION}/{self.tiles}" if self.tiles > 1 else MLP_REGION
        if self.unit:
            text = "full" if self.unit == 1 else f"full/{self.unit}"
            text += f"+{mlp}" if self.tiles > 1 else ""
        elif self.ops:
            text = f"ops({','.join(self.ops)})"
        else:
            text = "+".join(mlp if one == MLP_REGION else one for one in self.regions) or "none"
        return f"{text}+router" if self.router else text


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule of a policy: the layers that it names, and what they do.

    stage: the only stage that the rule applies to. None: all stages.
    """

    layers: tuple[Layers, ...]
    action: LayerAction
    store: str = "device"
    stage: int | None = None

    def names(self, layer: int, stage: int) -> bool:
        """Returns whether the rule names this layer of this stage."""
        return self.stage in (None, stage) and any(layer in layers for layers in self.layers)

    def __str__(self) -> str:
        stage = "" if self.stage is None else f"stage{self.stage}/"
        store = "" if self.store == "device" else f"@{self.store}"
        return f"{stage}{','.join(map(str, self.layers))}:{self.action}{store}"


KEEP_ALL = Rule(layers=(Layers(),), action=LayerAction())


@dataclass(frozen=True)
class Policy:
    """The rules of a policy in order. `str(policy)` is a text that parses to an equal policy."""

    rules: tuple[Rule, ...]

    def rule_of(self, layer: int, stage: int = 0) -> Rule:
        """Returns the rule that decides for the layer: the first that names it, or one that keeps
        everything."""
        return next((rule for rule in self.rules if rule.names(layer, stage)), KEEP_ALL)

    def __str__(self) -> str:
        return "; ".join(map(str, self.rules))


def parse_policy(text: str, *, setting: str = FLAG) -> Policy:
    """Returns the policy that the text describes.

    setting: the name of the policy in error messages: a flag, or an argument of a Python function.

    Raises ValueError if the text is no policy. The message has the rule and what was expected.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(
            f"{setting} is longer than {MAX_LENGTH} characters (got {len(text)}): give fewer rules"
        )
    *rules, last = text.split(";")
    parsed = []
    for rule in [*rules, last] if last.strip() or not rules else rules:
        try:
            parsed.append(_rule(rule))
        except ValueError as fault:
            raise ValueError(f"{setting}: {fault}, in the rule {quoted(rule.strip())}") from None
    return Policy(tuple(parsed))


def _rule(text: str) -> Rule:
    found = RULE.fullmatch(text)
    if found is None:
        raise ValueError("expected LAYERS:ACTION, such as *:full or 0-3:core_attn")
    stage, layers, action_text, place = found.groups()
    action = _action(action_text.strip())
    return Rule(
        layers=tuple(_layers(one.strip()) for one in layers.split(",")),
        action=action,
        store="device" if place is None else _store(place.strip(), action),
        stage=int(stage) if stage else None,
    )


def _names(text: str, separator: str, what: str, known: Collection[str]) -> list[str]:
    """Returns the words of a text, each of which must be one of the known ones."""
    names = [name.strip() for name in text.split(separator)]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"expected {what}: {', '.join(known)} (got {quoted(unknown[0])})")
    return names


def _layers(text: str) -> Layers:
    found = LAYERS.fullmatch(text)
    if found is None:
        raise ValueError(
            f"expected a layer: a number, a range such as 0-3, every-N or * (got {quoted(text)})"
        )
    step, offset, first, last = (int(one) if one else None for one in found.groups())
    if step is not None and (offset or 0) >= step:
        raise ValueError(
            f"every-N+FIRST needs a step of at least 1, and a first layer below it (got {text})"
        )
    layers = Layers(first or offset or 0, first if last is None else last, step or 1)
    if layers.last is not None and layers.last < layers.first:
        raise ValueError(f"the range ends before it begins ({layers})")
    return layers


def _action(text: str) -> LayerAction:
    if found := re.fullmatch(r"(.*\S)\s*\+\s*router", text):
        kept = _action(found[1])
        if kept == LayerAction():
            raise ValueError("none keeps everything, the choice of a router too: leave out +router")
        return replace(kept, router=True)
    if inside := re.fullmatch(r"ops\s*\((.*)\)", text):
        return LayerAction(ops=tuple(_operator(one.strip()) for one in inside[1].split(",")))
    if text == "none":
        return LayerAction()
    tiles = 1
    if found := re.search(rf"(?<!\w){MLP_REGION}\s*/\s*(\d{{1,6}})(?!\w)", text):
        tiles = int(found[1])
        if tiles < 1:
            raise ValueError("expected the tiles of an MLP: at least 1 (got 0)")
        text = text[: found.start()] + MLP_REGION + text[found.end() :]
    tail = rf"(?:\s*\+\s*{MLP_REGION})?" if tiles > 1 else ""
    if found := re.fullmatch(rf"full(?:\s*/\s*(\d{{1,6}}))?{tail}", text):
        unit = int(found[1] or 1)
        if unit < 1:
            raise ValueError("expected the layers of a unit: at least 1 (got 0)")
        return LayerAction(unit=unit, tiles=tiles)
    known = ("none", "full", "full/N", "ops(...)", *MODULES, f"{MLP_REGION}/N", ALIAS)
    names = _names(text, "+", "an action", known)
    if whole := [name for name in names if name in known[:4]]:
        raise ValueError(f"{whole[0]} is no part of a layer, as core_attn and mlp in core_attn+mlp")
    regions = expanded(names)
    if len(set(regions)) < len(regions):
        raise ValueError("a region is named twice")
    # Sorted, so that two spellings of the same regions are equal policies.
    return LayerAction(regions=tuple(sorted(regions)), tiles=tiles)


def _operator(text: str) -> str:
    if re.fullmatch(r"[A-Za-z_][\w.]*(/[1-9]\d{0,3})?", text) is None:
        raise ValueError(
            "expected an operator, such as matmul, matmul/2 or aten.mm.default (got "
            f"{quoted(text)})"
        )
    parse_entry(text)
    return text


def _store(text: str, action: LayerAction) -> str:
    if inside := re.fullmatch(r"host\s*\((.*)\)", text):
        parts = _names(inside[1], "+", "a part of a layer", PARTS)
        if action != LayerAction():
            raise ValueError("only a layer that keeps everything has parts on the host: none@host")
        return store_of(tuple(parts))
    (place,) = _names(text, ";", "a place", STORES)  # a rule has no ";", so the text is one name
    if place.startswith("split") and not action.unit:
        raise ValueError("only the input of a unit can be split over ranks: full@split")
    return place


def check_policy_reaches(
    policy: Policy, num_layers: Sequence[int], *, setting: str = FLAG
) -> list[str]:
    """Returns a warning for each rule that names layers or unit lengths which the run lacks.

        "9:full" on 3 layers         an error: no stage has a layer 9
        "stage1/*:full", one stage   an error: there is no stage 1
        "*:full; 0:none"             an error: the first rule decides every layer of the second
        "every-2:full/2"             an error: it names no two neighbours, so no unit has 2
        "0-31:full" on 24 layers     a warning: the rule applies to the layers 0 to 23
        "*:full/8" on 4 layers       a warning: the units have 4 layers

    num_layers: the number of layers of each stage, in the order of the model. `stageN/` counts
        these stages: each virtual stage is one (config/stages.py), and a model without a pipeline
        is one stage.
    setting: the name of the policy in the messages.

    Raises ValueError for a rule that can never apply.
    """
    # (stage, layer) of each layer that no rule before has decided: the first rule decides.
    undecided = {(stage, layer) for stage, count in enumerate(num_layers) for layer in range(count)}
    warnings = []
    for rule in policy.rules:
        never = f"{setting}: the rule {rule} never applies: "
        if rule.stage is not None and rule.stage >= len(num_layers):
            raise ValueError(
                f"{never}stage {rule.stage} does not exist, only 0 to {len(num_layers) - 1}"
            )
        last = (max(num_layers) if rule.stage is None else num_layers[rule.stage]) - 1
        for layers in rule.layers:
            if layers.first > last:
                raise ValueError(f"{never}layer {layers} does not exist, only 0 to {last}")
        decided = {(stage, layer) for stage, layer in undecided if rule.names(layer, stage)}
        if not decided:
            raise ValueError(
                f"{never}the rules before it decide all of its layers; move it to the front"
            )
        undecided -= decided
        unit, longest = rule.action.unit, _longest_run(decided)
        if unit > longest == 1 and any(num_layers[stage] > 1 for stage, _ in decided):
            raise ValueError(
                f"{never}it names no neighbouring layers, so a unit cannot have {unit}: give full"
            )
        if unit > longest:
            warnings.append(f"{setting} '{rule}': no unit has more than {longest} layers here")
        for layers in rule.layers:
            if layers.last is not None and layers.last > last:
                warnings.append(f"{setting} '{rule}': {layers} reaches only to layer {last}")
    return warnings


def _longest_run(decided: set[tuple[int, int]]) -> int:
    """Returns the largest number of neighbouring layers within one stage."""
    # In a run the layer less its place is the same.
    runs = Counter((stage, layer - n) for n, (stage, layer) in enumerate(sorted(decided)))
    return max(runs.values())


GROUPS = {
    "matmul": (
        "aten.mm.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten.baddbmm.default",
        "aten.linear.default",
        "aten._grouped_mm.default",
        "megatron_lite.grouped_product.default",
    ),
    "attention": (
        "aten._flash_attention_forward.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_fused_attention_overrideable.default",
        "megatron_lite.context_parallel_attention.default",
    ),
    # Functional forms: an in-place collective returns nothing that a policy could keep. A layer
    # with an ops(...) policy therefore runs its collectives in this form (parallel/collectives.py).
    "collective": (
        "_c10d_functional.all_reduce.default",
        "_c10d_functional.all_gather_into_tensor.default",
        "_c10d_functional.reduce_scatter_tensor.default",
        "_c10d_functional.all_to_all_single.default",
    ),
    "max": ("aten.max.default", "aten.max.dim"),
}
IN_GROUPS = frozenset(name for names in GROUPS.values() for name in names)


class OperatorEntry(NamedTuple):
    """One entry of `ops(...)`, such as `matmul/2`.

    name: the name of a group or of one operator.
    every: N, if every N-th result is kept.
    """

    name: str
    every: int

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators that the entry names, each spelled namespace.op.overload."""
        return GROUPS.get(self.name, (self.name,))


def parse_entry(text: str) -> OperatorEntry:
    """Returns the entry that the text spells.

    Raises ValueError if the name is neither a group nor spelled like an operator. Raises it too if
    the name shows that the operator writes into its argument, since no result could be kept.
    """
    name, _, every = text.partition("/")
    if name not in GROUPS:
        if not re.fullmatch(r"\w+\.\w+\.\w+", name):
            raise ValueError(
                f"{name} is no group of operators ({', '.join(GROUPS)}) and no operator spelled "
                "namespace.op.overload, such as aten.mm.default"
            )
        namespace, operator, _ = name.split(".")
        if operator.endswith("_") or namespace == "c10d":
            raise ValueError(
                f"{name} writes into its argument: it has no result that could be kept"
                + (" (collective names those that have one)" if "c10d" in namespace else "")
            )
    return OperatorEntry(name, int(every or 1))


class Choice:
    """Decides which results of one run of one layer are kept.

    `keeps` must be called for every operator of the layer, in the order of the forward.
    """

    def __init__(self, ops: Sequence[str]) -> None:
        self._calls = dict.fromkeys(map(parse_entry, ops), 0)

    def keeps(self, operator: str) -> bool:
        """Returns whether the result of this call is kept."""
        # Every entry counts the call, also after another has decided: entries count separately.
        kept = False
        for entry, calls in self._calls.items():
            if operator in entry.operators:
                kept |= calls % entry.every == 0
                self._calls[entry] = calls + 1
        return kept
