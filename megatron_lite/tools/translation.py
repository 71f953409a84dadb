"""The result of translating another system's config, and the functions that read such a config.

translators.py and modalities.py share this file. A config is plain data: mappings, lists, texts,
numbers. `typed` takes the known keys of a section and refuses a wrong type or an unknown key.
`notes_elsewhere` searches the rest of a whole config file. It names every key that concerns
recomputation, offloading or the wrapping of modules, so no such key is ignored silently.
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
KEEP, ALL = (Policy((Rule(layers=EVERY, action=LayerAction(unit=unit)),)) for unit in (0, 1))
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
ELSEWHERE: dict[str, tuple[tuple[object, ...], str]] = {
    "compile": (
        OFF,
        (
            "--torch-compile compiles the norms, activations, rotary embedding and dropout here, "
            "under every recompute policy"
        ),
    ),
    "fsdp_reshard_after_forward": (
        (None, True, "default", "always"),
        "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward keeps gathered weights here",
    ),
    "reshard_after_forward": (
        (None, True, "default", "always"),
        "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward keeps gathered weights here",
    ),
    "fsdp_cpu_offload": (OFF, "weights and optimizer states stay on the device here"),
    "enable_cpu_offload": (OFF, "weights and optimizer states stay on the device here"),
    "cpu_offload": (OFF, "weights and optimizer states stay on the device here"),
    "offload_param": (OFF, "weights stay on the device here"),
    "offload_optimizer": (OFF, "optimizer states stay on the device here"),
}


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
            return (
                "--torch-compile",
                "--activation-memory-budget",
                str(self.activation_memory_budget),
            )
        contiguous = (
            ("--contiguous-saved-activations",) if self.contiguous_saved_activations else ()
        )
        wrapping = (
            ("--use-torch-fsdp2", "--fsdp-memory-efficient-wrapping")
            if self.fsdp_memory_efficient_wrapping
            else ()
        )
        size = self.tensor_model_parallel_size
        ranks = () if size is None else ("--tensor-model-parallel-size", str(size))
        return ("--recompute-policy", str(self.policy), *contiguous, *wrapping, *ranks)

    @property
    def layers_needed(self) -> int:
        """The fewest layers of a pipeline stage of which every rule of the policy names one."""
        return 1 + max(min(layers.first for layers in rule.layers) for rule in self.policy.rules)

    def for_layers(self, num_layers: int) -> Translation:
        """Returns the translation for stages of `num_layers` layers.

        A rule that names none of them is left out, with a note. The launcher would refuse it, since
        it does nothing.
        """
        kept = tuple(
            rule
            for rule in self.policy.rules
            if any(layers.first < num_layers for layers in rule.layers)
        )
        notes = tuple(
            (
                f"{rule} names no layer of {num_layers}: nothing is recomputed by it, and it is "
                "left out"
            )
            for rule in self.policy.rules
            if rule not in kept
        )
        return self._replace(policy=Policy(kept) if kept else KEEP, notes=(*self.notes, *notes))


def every(step: object, where: str) -> Rule:
    """Returns the rule that makes every step-th layer a unit: the last of each `step` layers.

    The original systems count alike. Raises ValueError if `step` is not from 1 to MAX_STEP.
    """
    if not isinstance(step, int) or not 1 <= step <= MAX_STEP:
        raise ValueError(
            f"{where} must be from 1, which is every layer, to {MAX_STEP} (got {shown(step)})"
        )
    return Rule(layers=(Layers(step - 1, None, step),), action=LayerAction(unit=1))


def operators(keys: Container[str]) -> Rule:
    """Returns a rule for every layer: it keeps these operators' results and rebuilds the rest."""
    ops = dict.fromkeys(name for key, name in OPERATORS.items() if key in keys)
    return Rule(layers=EVERY, action=LayerAction(ops=tuple(ops)))


def section(config: Any, system: str, name: str) -> Any:
    """Returns the section `name` of a config file. Raises ValueError if it is absent."""
    mapping(config, system)
    require(
        name in config,
        f"{system}: there is no section {name}, so nothing is said of recomputation: choose a "
        "--recompute-policy yourself",
    )
    return config[name]


def mapping(value: Any, where: str) -> Mapping[str, Any]:
    """Returns `value`. Raises ValueError unless it is a mapping (an object, in JSON's words)."""
    require(isinstance(value, Mapping), f"{where}: expected an object, got {shown(value)}")
    return value


def typed(given: Any, where: str, *, file: Any = None, **kinds: Any) -> dict[str, Any]:
    """Returns the values of the known keys of a section.

    file: the config that the section is part of. A text `${a.b}` stands for the value at that place
        in it.
    kinds: the types that each known key may have.
    Raises ValueError for an unknown key, and for a value that has none of the key's types.
    """
    mapping(given, where)
    unknown = [key for key in given if key not in kinds]
    require(
        not unknown,
        f"{where}: unknown key {shown(unknown[0] if unknown else None)} (known: "
        f"{', '.join(kinds) or 'none'})",
    )
    values = {
        key: resolved(value, given if file is None else file, f"{where}: {key}")
        for key, value in given.items()
    }
    for key, value in values.items():
        allowed = kinds[key] if isinstance(kinds[key], tuple) else (kinds[key],)
        fits = (
            type(value) is bool
            if bool in allowed
            else isinstance(value, allowed) and type(value) is not bool
        )
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
        require(fits, f"{where}: {key} must be {names} (got {shown(value)})")
    return values


def resolved(value: Any, file: Any, where: str) -> Any:
    """Returns `value`, or for an interpolation `${a.b}` the value at that place in the file."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(value, str) or "${" not in value:
            return value
        match = INTERPOLATION.fullmatch(value)
        require(
            match is not None,
            f"{where} is {shown(value)}, which only the original resolves: write its value "
            "into the file",
        )
        place: Any = file
        for part in match[1].split("."):  # type: ignore[index]
            require(
                isinstance(place, Mapping) and part in place,
                f"{where} refers to {shown(match[1])}, "  # type: ignore[index]
                "which the file does not hold",
            )
            place = place[part]
        value = place
    raise ValueError(f"{where} refers to itself, or through more than {MAX_REFERENCES} other keys")


def without_counterpart(system: str, given: Mapping[str, Any], **reasons: str) -> tuple[str, ...]:
    """Returns a note for each of these values that was given and is neither off nor the default."""
    return tuple(
        f"{system}: {key} has no counterpart: {reason}"
        for key, reason in reasons.items()
        if given.get(key) not in (None, False, "default")
    )


def notes_elsewhere(system: str, config: Any, read: Collection[str]) -> tuple[str, ...]:
    """Returns a note for each unread key of a file about recomputation, offloading or wrapping.

    read: the places that the translation has read, such as "activation_checkpoint". Everything
        below them counts as read too, and so does a place that they refer to.
    """
    notes = []
    all_read = frozenset(read).union(*(_references(config, place, MAX_DEPTH) for place in read))
    for place, value in _relevant(config, "", all_read, MAX_DEPTH):
        quiet, reason = ELSEWHERE.get(
            place.rpartition(".")[2], (OFF, "it is not a key that this translation knows")
        )
        if not _is_quiet(value, quiet):
            notes.append(f"{system}: {named(place)} {shown(value)} is not translated: {reason}")
    beyond = len(notes) - MAX_NOTES_ELSEWHERE
    return (
        *notes[:MAX_NOTES_ELSEWHERE],
        *([f"{system}: and {beyond} more keys are not translated"] if beyond > 0 else []),
    )


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


def require(condition: bool, message: str) -> None:
    """Raises ValueError with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def shown(value: object) -> str:
    """Returns the value as short text on one line, however large it is."""
    return reprlib.repr(value)
