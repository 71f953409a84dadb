"""The result of translating another system's config, and the reader of such a config.

A config is plain data: mappings, lists, texts, numbers. Tables say in which sections of the file a
system has its settings, which values each may have, and why one has no counterpart. The rest of a
whole file is searched for keys that concern recomputation, offloading or the wrapping of modules,
so that none of them is ignored silently.
"""

import re
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

MAX_STEP = 999_999
MAX_REFERENCES = 20  # references that an interpolation may follow
MAX_NOTES_ELSEWHERE = 20
LONGEST_PLACE = 100  # characters of a place in a file that a message shows
NO_KEY = "(?!)"  # the regular expression that matches nothing
WHOLE_LAYERS, NOTHING = "*:full", "*:none"  # rules of a policy: what every layer rebuilds
INTERPOLATION = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
STEP = re.compile(r"[0-9]{1,6}")
RELEVANT = re.compile(
    r"(^|_)s?ac(_|$)|activations?_?(check|offload|memory|recomp)"
    r"|checkpoint_?(activation|in_cpu)|gradient_?checkpoint"
    r"|(selective|contiguous|partition(ed)?|cpu)_checkpoint|partition_activation"
    r"|(?<!p)recompute|(^|_)remat|offload|reshard"
    r"|shard(ed|ing)?_layers|wrap(?!ped)|memory_budget|^(enable_)?compile$",
    re.IGNORECASE,
)
# Values that turn a feature off, and the usual ones of resharding, as texts.
OFF = ("none", "false", "0", "", "disabled", "[]")
RESHARDS = ("none", "true", "default", "always")


class Key(NamedTuple):
    """A key that is read.

    allowed: its types and, as texts, its values; None is null. name: its name here. note: why it
    has no counterpart here.
    """

    allowed: tuple[type | str | None, ...] = (bool,)
    name: str = ""
    note: str = ""


class Table(NamedTuple):
    """The keys of a section.

    section: the place of the section, "" for the file itself, as a regular expression. own: all
    keys that belong to it, as a regular expression: one of them that is not in `keys` is an error.
    """

    section: str
    keys: Mapping[str, Key]
    own: str = NO_KEY


class Translation(NamedTuple):
    """The settings to run with.

    flags: the words of a command line. Without --recompute-policy they are a budget for compiled
    layers. notes: one line for each value without a counterpart.
    """

    flags: tuple[str, ...]
    notes: tuple[str, ...]


class Settings:
    """The settings that a config of one system has. Every fault raises ValueError.

    given: the values by their names here. Null and false count as missing.
    read: the places of the file that were read, and those that they refer to. What lies below them
        counts as read too.
    flags: those beside the policy.
    """

    def __init__(self, system: str, config: Any, tables: Iterable[Table]) -> None:
        self.system, self.config, self._tables = system, config, tables
        self.given: dict[str, Any] = {}
        self.read: set[str] = set()
        self.flags, self.notes = list[str](), list[str]()
        self.require(isinstance(config, Mapping), f"expected an object, got {shown(config)}")
        self._read(config, "")

    def require(self, condition: bool, message: str) -> None:
        """Raises ValueError with the message unless the condition holds."""
        if not condition:
            raise ValueError(f"{self.system}: {message}")

    def note(self, text: str) -> None:
        """Adds a note."""
        self.notes.append(f"{self.system}: {text}")

    def give(self, name: str, value: Any) -> None:
        """Sets a value. Raises ValueError if it has another one already."""
        held = self.given.setdefault(name, value)
        self.require(
            held is value or held == value,
            f"{name} is {shown(held)} and {shown(value)}: leave one of them out",
        )

    def _read(self, section: Any, place: str) -> None:
        """Reads the settings in a section and in all below it."""
        fitting = (one for one in self._tables if re.fullmatch(one.section, place, re.DOTALL))
        _, keys, own = next(fitting, Table("", {}))
        is_section = place and own == NO_KEY and isinstance(section, Mapping)
        if is_section and section.get("enable") is False:
            keys = {}  # the section is turned off
        for at, key, value in inside(section, place):
            self.require(
                key in keys or not re.fullmatch(own, key, re.DOTALL),
                f"unknown key {shown(key)} (known: {', '.join(keys)})",
            )
            if key in keys:
                self.read.add(at)
                value = self._set(key, self._resolved(value, key), keys[key])
            self._read(value, at)

    def _set(self, key: str, value: Any, row: Key) -> Any:
        """Checks and sets the value of a key. Returns the value."""
        names = [one.__name__ if isinstance(one, type) else one or "null" for one in row.allowed]
        self.require(
            # not isinstance, since Python's bool is an int too
            type(value) in row.allowed or value in row.allowed,
            f"{key} must be {' or '.join(names)} (got {shown(value)})",
        )
        if value is not None and value is not False and not isinstance(value, Mapping):
            if row.note and value != "default":
                self.note(f"{key} has no counterpart: {row.note}")
            self.give(row.name or key, value)
        return value

    def _resolved(self, value: Any, where: str) -> Any:
        """Returns `value`, or for an interpolation `${a.b}` the value at that place in the file."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(value, str) or "${" not in value:
                return value
            match = INTERPOLATION.fullmatch(value)
            if match is None:
                break
            self.read.add(match[1])
            value = self.config
            for part in match[1].split("."):
                value = value.get(part, match[0]) if isinstance(value, Mapping) else match[0]
        raise ValueError(
            f"{self.system}: {where} is {shown(value)}, which the file does not resolve: write "
            "its value there"
        )

    def every(self, step: Any, where: str, *, from_first: bool = False) -> str:
        """Returns the rule that makes one of each `step` layers a unit: the last, as the counters
        of most systems do, or the first.

        step: a number, maybe as text.
        """
        number = int(step) if isinstance(step, str) and STEP.fullmatch(step) else step
        self.require(
            isinstance(number, int) and 1 <= number <= MAX_STEP,
            f"{where} must be from 1, which is every layer, to {MAX_STEP} (got {shown(step)})",
        )
        if number == 1:
            return WHOLE_LAYERS
        if from_first:
            return f"every-{number}:full"
        rule = f"every-{number}+{number - 1}:full"
        self.note(f"{rule} is for stages of {number} layers or more: others refuse it")
        return rule

    def result(self, policy: str) -> Translation:
        """Returns the translation with this policy, unless it is "", other flags and all notes.

        Each key elsewhere in the file that concerns recomputation, offloading or wrapping gets a
        note.
        """
        found = list(_relevant(self.config, "", self.read))
        for place, value in found[:MAX_NOTES_ELSEWHERE]:
            # A place is whole, so that it can be copied, unless it is long or not printable.
            self.note(
                f"{place if place.isprintable() and len(place) <= LONGEST_PLACE else shown(place)} "
                f"{shown(value)} is not translated"
            )
        if len(found) > MAX_NOTES_ELSEWHERE:
            self.note(f"and {len(found) - MAX_NOTES_ELSEWHERE} more keys are not translated")
        words = ["--recompute-policy", policy] if policy else []
        return Translation((*words, *self.flags), tuple(self.notes))


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


def _is_quiet(value: Any, quiet: Collection[str]) -> bool:
    """Returns whether the value turns off the feature of its key.

    In a mapping, the key `enable`, `enabled` or `device` decides.
    """
    if isinstance(value, Mapping):
        for switch in ("enable", "enabled", "device"):
            if switch in value:
                return _is_quiet(value[switch], OFF)
        return all(_is_quiet(below, quiet) for below in value.values())
    return str(value).lower() in quiet


shown = reprlib.repr  # a value as short text on one line, however large it is
