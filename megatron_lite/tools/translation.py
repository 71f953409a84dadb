"""The result of translating another system's config, and the functions that read such a config.

A config is plain data: mappings, lists, texts, numbers. A table of keys says which types each may
have, and why a value has no counterpart. The rest of a whole file is searched for keys that concern
recomputation, offloading or the wrapping of modules, so that none of them is ignored silently.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from megatron_lite.config.policy import LayerAction, Layers, Policy, Rule

MAX_STEP = 999_999
MAX_REFERENCES = 20  # references that an interpolation may follow
MAX_NOTES_ELSEWHERE = 20
LONGEST_PLACE = 100  # characters of a place in a file that a message shows
EVERY = (Layers(),)
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
RESHARDS = (None, True, "default", "always")


class ConfigKey(NamedTuple):
    """A key that is read.

    kinds: its types; None is null. note: why it has no counterpart here. name: its name here, if a
    table of several systems has one. choices: its values other than null; () if any value will do.
    """

    kinds: tuple[type | None, ...] = (bool,)
    note: str = ""
    name: str = ""
    choices: Collection[object] = ()


class Translation(NamedTuple):
    """The settings to run with.

    rules: those of the recompute policy; () if it is a budget for compiled layers.
    more: further flags and their values. notes: one line for each value without a counterpart.
    """

    rules: tuple[Rule, ...]
    more: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def policy(self) -> Policy:
        """The recompute policy."""
        return Policy(self.rules)

    @property
    def flags(self) -> tuple[str, ...]:
        """The settings as words of a command line."""
        policy = ("--recompute-policy", str(self.policy)) if self.rules else ()
        return (*policy, *self.more)

    def for_layers(self, num_layers: int | None) -> Translation:
        """Returns the translation for stages of `num_layers` layers.

        A rule that names none of them is left out, with a note. The launcher would refuse it, since
        it does nothing. None: for any number, with a note on the fewest layers that it needs.
        """
        firsts = {rule: min(layers.first for layers in rule.layers) for rule in self.rules}
        needed = 1 + max(firsts.values(), default=0)
        if num_layers is None:
            notes = [
                f"{self.policy} needs a stage of {needed} layers or more: with fewer the launcher "
                "refuses it; give --num-layers N for the flags of a smaller model"
            ]
            return self._replace(notes=(*self.notes, *notes[: needed > 1]))
        kept = tuple(rule for rule in self.rules if firsts[rule] < num_layers)
        notes = [
            f"{rule} names no layer of {num_layers}: nothing is recomputed by it, and it is left "
            "out"
            for rule in self.rules
            if rule not in kept
        ]
        rules = kept or (self.rules and (unit(0),))
        return self._replace(rules=rules, notes=(*self.notes, *notes))


class ConfigReader:
    """A config of one system, and the notes about it. Every fault raises ValueError."""

    def __init__(self, system: str, config: Any) -> None:
        self._system, self.config = system, config
        self.notes: list[str] = []
        self._check_mapping(config)

    def require(self, condition: bool, message: str) -> None:
        """Raises ValueError with the message unless the condition holds."""
        if not condition:
            raise ValueError(f"{self._system}: {message}")

    def note(self, text: str) -> None:
        """Adds a note."""
        self.notes.append(f"{self._system}: {text}")

    def section(self, name: str) -> Any:
        """Returns a section of the file, which must be there."""
        self.require(
            name in self.config,
            f"there is no section {name}, so nothing is said of recomputation: choose a "
            "--recompute-policy yourself",
        )
        return self.config[name]

    def values(self, given: Any, keys: Mapping[str, ConfigKey]) -> dict[str, Any]:
        """Returns the values of a section. They must have known keys, and the keys' types and
        choices.

        A text `${a.b}` stands for the value at that place in the file.
        """
        self._check_mapping(given)
        found = {}
        for key, value in given.items():
            self.require(
                key in keys, f"unknown key {shown(key)} (known: {', '.join(keys) or 'none'})"
            )
            kinds, note, name, choices = keys[key]
            value = self.resolved(value, key)
            self.require(
                # not isinstance, since Python's bool is an int too
                object in kinds or (None if value is None else type(value)) in kinds,
                f"{key} must be {' or '.join(kind.__name__ if kind else 'null' for kind in kinds)} "
                f"(got {shown(value)})",
            )
            if choices and value is not None:
                self.choice(key, value, choices)
            if note and value not in (None, False, "default"):
                self.note(f"{key} has no counterpart: {note}")
            found[name or key] = value
        return found

    def resolved(self, value: Any, where: str) -> Any:
        """Returns `value`, or for an interpolation `${a.b}` the value at that place in the file."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(value, str) or "${" not in value:
                return value
            match = INTERPOLATION.fullmatch(value)
            self.require(
                match is not None,
                f"{where} is {shown(value)}, which only the original resolves: write its value "
                "into the file",
            )
            place = match[1]  # type: ignore[index]
            value = self.config
            for part in place.split("."):
                self.require(
                    isinstance(value, Mapping) and part in value,
                    f"{where} refers to {shown(place)}, which the file does not hold",
                )
                value = value[part]
        raise ValueError(
            f"{self._system}: {where} refers to itself, or through more than {MAX_REFERENCES} "
            "other keys"
        )

    def choice(self, key: str, value: Any, allowed: Collection[object]) -> None:
        """Raises ValueError unless the value is one of those allowed."""
        self.require(
            value in allowed,
            f"{key} must be one of {', '.join(map(str, allowed))} (got {shown(value)})",
        )

    def every(self, step: Any, where: str) -> Rule:
        """Returns the rule that makes every step-th layer a unit: the last of each `step` layers.

        The original systems count alike.
        """
        self.require(
            isinstance(step, int) and 1 <= step <= MAX_STEP,
            f"{where} must be from 1, which is every layer, to {MAX_STEP} (got {shown(step)})",
        )
        return Rule(layers=(Layers(step - 1, None, step),), action=LayerAction(unit=1))

    def result(self, read: Iterable[str], *rules: Rule, more: Iterable[str] = ()) -> Translation:
        """Returns the translation with these rules, further flags and all notes.

        Each key elsewhere in the file that concerns recomputation, offloading or wrapping gets a
        note.

        read: the places that the translation has read, such as "activation_checkpoint". Everything
            below them counts as read too, and so does a place that they refer to.
        """
        known = set(read)
        below = tuple(f"{place}." for place in known)
        for place, value in everything(self.config):
            if isinstance(value, str) and f"{place}.".startswith(below):
                known.update(INTERPOLATION.findall(value))
        found = list(_relevant(self.config, "", known))
        for place, value in found[:MAX_NOTES_ELSEWHERE]:
            self.note(f"{named(place)} {shown(value)} is not translated")
        if len(found) > MAX_NOTES_ELSEWHERE:
            self.note(f"and {len(found) - MAX_NOTES_ELSEWHERE} more keys are not translated")
        return Translation(rules, tuple(more), tuple(self.notes))

    def _check_mapping(self, value: Any) -> None:
        self.require(isinstance(value, Mapping), f"expected an object, got {shown(value)}")


def unit(count: int, store: str = "device") -> Rule:
    """Returns the rule that makes every layer a unit (1), or that keeps everything (0)."""
    return Rule(layers=EVERY, action=LayerAction(unit=count), store=store)


def inside(value: Any, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yields (place, key, value) of what a mapping or a list holds directly."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for name, below in value.items():
            key = str(name)[:LONGEST_PLACE]  # places of a deep file would else be endless
            yield f"{place}.{key}".removeprefix("."), key, below


def everything(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (place, value) of a config and of all that it holds, at any level."""
    yield place, value
    for name, _, below in inside(value, place):
        yield from everything(below, name)


def _relevant(value: Any, place: str, read: set[str]) -> Iterator[tuple[str, Any]]:
    """Yields the places and values of the outermost unread keys with relevant names, unless the
    value turns its feature off."""
    for name, key, below in inside(value, place):
        if name not in read:
            if not RELEVANT.search(key):
                yield from _relevant(below, name, read)
            elif not _is_quiet(below, RESHARDS if "reshard" in key else OFF):
                yield name, below


def _is_quiet(value: Any, quiet: Collection[object]) -> bool:
    """Returns whether the value turns off the feature of its key.

    In a mapping, the key `enable`, `enabled` or `device` decides.
    """
    if isinstance(value, Mapping):
        for switch in ("enable", "enabled", "device"):
            if switch in value:
                return value[switch] in OFF
        return all(_is_quiet(below, quiet) for below in value.values())
    return value == [] or any(value is one or (value == one and one != 1) for one in quiet)


def named(place: str) -> str:
    """Returns a place of a file for a message: whole, so that it can be copied, unless it is long
    or not printable."""
    return place if place.isprintable() and len(place) <= LONGEST_PLACE else shown(place)


def shown(value: object) -> str:
    """Returns the value as short text on one line, however large it is."""
    return reprlib.repr(value)
