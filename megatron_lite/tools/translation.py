"""The result of translating another system's config, and the functions that read such a config.

translators.py and modalities.py share this file. A config is plain data: mappings, lists, texts,
numbers. A table of keys says which types each may have, and why a value has no counterpart. The
rest of a whole file is searched for keys that concern recomputation, offloading or the wrapping of
modules, so that none of them is ignored silently.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any, NamedTuple

from megatron_lite.config.policy import LayerAction, Layers, Policy, Rule

MAX_STEP = 999_999
MAX_DEPTH = 64  # levels of a config; tools/config_file.py already refuses files this deep
MAX_REFERENCES = 20  # references that an interpolation may follow
MAX_NOTES_ELSEWHERE = 20
MAX_PLACES, MAX_PLACE = 5, 100  # places that a message lists, and the characters of one place
EVERY = (Layers(),)
KEEP = Policy((Rule(layers=EVERY, action=LayerAction(unit=0)),))
# The results that 'op' keeps in torchtitan and, by their keys, in Modalities. Their lists name
# single kernels: aten.mm but not aten.addmm, so they rebuild every linear with a bias, and no
# attention kernel of a CPU. The groups here hold all kernels of a kind.
OPERATORS = {
    "ops.aten.mm.default": "matmul/2",
    "ops.aten._scaled_dot_product_efficient_attention.default": "attention",
    "ops.aten._scaled_dot_product_flash_attention.default": "attention",
    "ops._c10d_functional.reduce_scatter_tensor.default": "collective",
    "ops.aten.max.default": "max",
}
INTERPOLATION = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
RELEVANT = re.compile(
    r"(^|_)s?ac(_|$)|activations?_?(check|offload|memory|recomp)"
    r"|checkpoint_?(activation|in_cpu)|gradient_?checkpoint"
    r"|(selective|contiguous|partition(ed)?|cpu)_checkpoint|partition_activation"
    r"|(?<!p)recompute|(^|_)remat|offload|reshard"
    r"|shard(ed|ing)?_layers|wrap(?!ped)|memory_budget|^compile$",
    re.IGNORECASE,
)
OFF = (None, False, "", "none", "None", "disabled")
# Keys without a part in the recompute policy: the values at which they do nothing, and the note for
# any other value.
_GATHERED = "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward keeps gathered weights here"
_ON_DEVICE = "weights and optimizer states stay on the device here"
_RESHARDS = (None, True, "default", "always")
ELSEWHERE: dict[str, tuple[tuple[object, ...], str]] = {
    "compile": (
        OFF,
        "--torch-compile compiles the norms, activations, rotary embedding and dropout here, "
        "under every recompute policy",
    ),
    "fsdp_reshard_after_forward": (_RESHARDS, _GATHERED),
    "reshard_after_forward": (_RESHARDS, _GATHERED),
    "fsdp_cpu_offload": (OFF, _ON_DEVICE),
    "enable_cpu_offload": (OFF, _ON_DEVICE),
    "cpu_offload": (OFF, _ON_DEVICE),
    "offload_param": (OFF, _ON_DEVICE),
    "offload_optimizer": (OFF, _ON_DEVICE),
}


class ConfigKey(NamedTuple):
    """A key that is read. kinds: its types; None is null. note: why it has no counterpart here."""

    kinds: tuple[type | None, ...]
    note: str = ""


class Translation(NamedTuple):
    """The settings to run with: a recompute policy, or a budget for compiled layers.

    tensor_model_parallel_size: the size in the file, if a policy with `split` needs it.
    notes: one line for each value that has no counterpart here.
    """

    policy: Policy
    contiguous_saved_activations: bool = False
    activation_memory_budget: float | None = None
    notes: tuple[str, ...] = ()
    fsdp_memory_efficient_wrapping: bool = False
    tensor_model_parallel_size: int | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """The settings as words of a command line."""
        if self.activation_memory_budget is not None:
            budget = str(self.activation_memory_budget)
            return ("--torch-compile", "--activation-memory-budget", budget)
        words = ["--recompute-policy", str(self.policy)]
        if self.contiguous_saved_activations:
            words.append("--contiguous-saved-activations")
        if self.fsdp_memory_efficient_wrapping:
            words += ["--use-torch-fsdp2", "--fsdp-memory-efficient-wrapping"]
        if self.tensor_model_parallel_size is not None:
            words += ["--tensor-model-parallel-size", str(self.tensor_model_parallel_size)]
        return tuple(words)

    @property
    def layers_needed(self) -> int:
        """The fewest layers of a pipeline stage of which every rule of the policy names one."""
        return 1 + max(min(layers.first for layers in rule.layers) for rule in self.policy.rules)

    def for_layers(self, num_layers: int) -> Translation:
        """Returns the translation for stages of `num_layers` layers.

        A rule that names none of them is left out, with a note. The launcher would refuse it, since
        it does nothing.
        """
        kept, notes = [], list(self.notes)
        for rule in self.policy.rules:
            if any(layers.first < num_layers for layers in rule.layers):
                kept.append(rule)
            else:
                notes.append(
                    f"{rule} names no layer of {num_layers}: nothing is recomputed by it, and it "
                    "is left out"
                )
        return self._replace(policy=Policy(tuple(kept)) if kept else KEEP, notes=tuple(notes))


class ConfigReader:
    """A config of one system, and the notes about it. Every fault raises ValueError."""

    def __init__(self, system: str, config: Any) -> None:
        self._system, self.config = system, config
        self.notes: list[str] = []
        self.mapping(config)

    def require(self, condition: bool, message: str) -> None:
        """Raises ValueError with the message unless the condition holds."""
        if not condition:
            raise ValueError(f"{self._system}: {message}")

    def note(self, text: str) -> None:
        """Adds a note."""
        self.notes.append(f"{self._system}: {text}")

    def mapping(self, value: Any) -> Mapping[str, Any]:
        """Returns `value`, which must be a mapping (an object, in JSON's words)."""
        self.require(isinstance(value, Mapping), f"expected an object, got {shown(value)}")
        return value

    def section(self, name: str) -> Any:
        """Returns a section of the file, which must be there."""
        self.require(
            name in self.config,
            f"there is no section {name}, so nothing is said of recomputation: choose a "
            "--recompute-policy yourself",
        )
        return self.config[name]

    def values(self, given: Any, keys: Mapping[str, ConfigKey]) -> dict[str, Any]:
        """Returns the values of a section. They must have known keys and the keys' types.

        A text `${a.b}` stands for the value at that place in the file.
        """
        for key in self.mapping(given):
            self.require(
                key in keys, f"unknown key {shown(key)} (known: {', '.join(keys) or 'none'})"
            )
        found = {}
        for key, (kinds, note) in keys.items():
            if key not in given:
                continue
            found[key] = value = self.resolved(given[key], key)
            fits = any(
                value is None
                if kind is None
                else isinstance(value, kind) and (kind is bool or type(value) is not bool)
                for kind in kinds
            )
            names = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
            self.require(fits, f"{key} must be {names} (got {shown(value)})")
            if note and value not in (None, False, "default"):
                self.note(f"{key} has no counterpart: {note}")
        return found

    def resolved(self, value: Any, where: str) -> Any:
        """Returns `value`, or for an interpolation `${a.b}` the value at that place in the file."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(value, str) or "${" not in value:
                return value
            match = INTERPOLATION.fullmatch(value)
            if match is None:
                raise ValueError(
                    f"{self._system}: {where} is {shown(value)}, which only the original resolves: "
                    "write its value into the file"
                )
            value = self.config
            for part in match[1].split("."):
                self.require(
                    isinstance(value, Mapping) and part in value,
                    f"{where} refers to {shown(match[1])}, which the file does not hold",
                )
                value = value[part]
        raise ValueError(
            f"{self._system}: {where} refers to itself, or through more than {MAX_REFERENCES} "
            "other keys"
        )

    def every(self, step: object, where: str) -> Rule:
        """Returns the rule that makes every step-th layer a unit: the last of each `step` layers.

        The original systems count alike.
        """
        if not isinstance(step, int) or not 1 <= step <= MAX_STEP:
            raise ValueError(
                f"{self._system}: {where} must be from 1, which is every layer, to {MAX_STEP} "
                f"(got {shown(step)})"
            )
        return Rule(layers=(Layers(step - 1, None, step),), action=LayerAction(unit=1))

    def note_elsewhere(self, read: Collection[str]) -> None:
        """Adds a note for each unread key about recomputation, offloading or wrapping.

        read: the places that the translation has read, such as "activation_checkpoint". Everything
            below them counts as read too, and so does a place that they refer to.
        """
        all_read = frozenset(read).union(
            *(_references(self.config, place, MAX_DEPTH) for place in read)
        )
        count = 0
        for place, value in _relevant(self.config, "", all_read, MAX_DEPTH):
            quiet, reason = ELSEWHERE.get(
                place.rpartition(".")[2], (OFF, "it is not a key that this translation knows")
            )
            if not _is_quiet(value, quiet):
                count += 1
                if count <= MAX_NOTES_ELSEWHERE:
                    self.note(f"{named(place)} {shown(value)} is not translated: {reason}")
        if count > MAX_NOTES_ELSEWHERE:
            self.note(f"and {count - MAX_NOTES_ELSEWHERE} more keys are not translated")

    def result(self, *rules: Rule, **more: Any) -> Translation:
        """Returns the translation with these rules and all notes."""
        return Translation(Policy(rules), notes=tuple(self.notes), **more)


def unit(count: int, store: str = "device") -> Rule:
    """Returns the rule that makes every layer a unit (1), or that keeps everything (0)."""
    return Rule(layers=EVERY, action=LayerAction(unit=count), store=store)


def operators(keys: Container[str]) -> Rule:
    """Returns a rule for every layer: it keeps these operators' results and rebuilds the rest."""
    ops = dict.fromkeys(name for key, name in OPERATORS.items() if key in keys)
    return Rule(layers=EVERY, action=LayerAction(ops=tuple(ops)))


def _references(config: Any, place: str, depth: int) -> set[str]:
    """Returns the places that the interpolations `${a.b}` at and below a place refer to."""
    value = config
    for part in place.split(".") if place else ():
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, str):
        return set(INTERPOLATION.findall(value))
    if depth == 0 or not isinstance(value, (Mapping, list)):
        return set()
    below = value.values() if isinstance(value, Mapping) else value
    return set().union(*(_references(inner, "", depth - 1) for inner in below))


def _relevant(
    value: Any, place: str, read: frozenset[str], depth: int
) -> Iterator[tuple[str, Any]]:
    """Yields (place, value) of the outermost unread keys with relevant names."""
    if depth == 0:
        return
    if isinstance(value, Mapping):
        for key, below in value.items():
            name = f"{place}.{key}" if place else str(key)
            if name in read:
                continue
            if isinstance(key, str) and RELEVANT.search(key):
                yield name, below
            else:
                yield from _relevant(below, name, read, depth - 1)
    elif isinstance(value, list):
        for number, below in enumerate(value):
            yield from _relevant(below, f"{place}.{number}", read, depth - 1)


def _is_quiet(value: Any, quiet: tuple[object, ...]) -> bool:
    """Returns whether the value turns off the feature of its key.

    In a mapping, the key `enable`, `enabled` or `device` decides.
    """
    if isinstance(value, Mapping):
        for switch in ("enable", "enabled", "device"):
            if switch in value:
                return value[switch] in OFF
        return all(_is_quiet(below, quiet) for below in value.values())
    if isinstance(value, list):
        return not value
    return any(value is known or (isinstance(value, str) and value == known) for known in quiet)


def named(*places: str) -> str:
    """Returns places of a file as text for a message.

    A place is shown whole, so that it can be copied, unless it is too long or not printable. At
    most MAX_PLACES are shown.
    """
    texts = [
        place if place.isprintable() and len(place) <= MAX_PLACE else shown(place)
        for place in places[:MAX_PLACES]
    ]
    return ", ".join([*texts, *(["..."] if len(places) > MAX_PLACES else [])])


def shown(value: object) -> str:
    """Returns the value as short text on one line, however large it is."""
    return reprlib.repr(value)
