"""The flags of Megatron-LM, of all its releases, that set no field here, and what becomes of each.

megatron_flags.json has them by the reason: those that are refused, since they would change numbers
or promise something that the user would miss; those that have no effect, also without the feature
that they belong to; those that have one legal value; and old spellings. A name there that ends with
"=" takes a value, and one that ends with "=*" takes several. Rows with "whose" are of forks of
Megatron-LM and of launchers; "by value" has the flags of forks that are other flags here, by their
value. This module is the only reader of the file.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.config.checks import InputError
from megatron_lite.config.plain import parse_json

DATA = parse_json(Path(__file__).with_name("megatron_flags.json").read_text())
REFUSED: Mapping[str, str] = {
    flag: row["reason"] for row in DATA["refused"] for flag in row["flags"]
}
# The rest of the sentence that begins with "--flag has no effect".
NO_EFFECT: Mapping[str, str] = {
    name.partition("=")[0]: row["reason"] for row in DATA["no effect"] for name in row["flags"]
}
# Flags that allow only this value, which is what the program does anyway. Any other is refused.
ONLY_VALUE: Mapping[str, str] = DATA["only value"]
RENAMED: Mapping[str, str] = DATA["renamed"]
# What each value of a flag is here. Any other value is refused.
BY_VALUE: Mapping[str, Mapping[str, str]] = DATA["by value"]
# The fork that a flag belongs to, if it is not Megatron-LM's own.
WHOSE: Mapping[str, str] = {
    name.partition("=")[0]: row["whose"]
    for row in (*DATA["refused"], *DATA["no effect"])
    if "whose" in row
    for name in row["flags"]
}
# The fields of configurations stored by version 0.1 that have no effect any more.
RETIRED_FIELDS = frozenset(DATA["retired fields"])
# With more ignored flags than this, one line names all of them, without the reasons.
MOST_REASONS = 3
NEGATIONS = {"no", "not", "disable", "without"}  # a flag with another of these means another thing


def add_flags_without_effect(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that are accepted and ignored, and the flags that allow only one value.

    Each is stored under its own spelling with the dashes, which no field has. `take_ignored` and
    `check_only_values` find it by this name.
    """
    names = [name for row in DATA["no effect"] for name in row["flags"]]
    for name in [*names, *(f"{flag}=" for flag in ONLY_VALUE)]:
        flag, equals, several = name.partition("=")
        options: Any = dict(nargs=several or None) if equals else dict(action="store_true")
        parser.add_argument(flag, dest=flag, help=argparse.SUPPRESS, **options)


def renamed_words(argv: Sequence[str], parsed: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns `argv` with old spellings replaced, and a notice for each flag replaced.

    parsed: the flags of the parser. Underscores in the name of a flag are replaced by dashes,
    unless it is a known flag as it stands.
    """
    renamed, notices = [], []
    known = {*parsed, *RENAMED, *BY_VALUE, *REFUSED}
    words = deque(argv)
    while words:
        name, equals, value = words.popleft().partition("=")
        if name.startswith("--") and name not in known and name.replace("_", "-") in known:
            name = name.replace("_", "-")
        if name in BY_VALUE:
            while not equals and words and not words[0].startswith("--"):
                value = f"{value} {words.popleft()}".strip()
            read_as = BY_VALUE[name].get(value)
            if read_as is None:
                renamed.append(f"{name}={value}")  # no flag of the parser takes it
                continue
            renamed += read_as.split()
            notices.append(f"{name} {value} is read as {read_as or 'what happens here anyway'}")
            continue
        if name in RENAMED:
            notices.append(f"{name} is an old spelling, read as {RENAMED[name]}")
            # The last word takes the value of the old flag. The words before it are complete.
            *added, name = RENAMED[name].split()
            renamed += added
        renamed.append(name + equals + value)
    return renamed, notices


def check_only_values(given: dict[str, Any]) -> None:
    """Removes the flags that allow only one value. Raises InputError for another; 1.0 is 1."""
    for flag, only in ONLY_VALUE.items():
        value = given.pop(flag, None) or only
        if value not in (only, f"{only}.0"):
            raise InputError(
                f"Megatron's {flag} {value} is not supported here, only {only}: {REFUSED[flag]}"
            )


def take_ignored(given: dict[str, Any]) -> list[str]:
    """Removes the flags without effect, and returns notices about them: a line for each, or one
    line for many."""
    found = [flag for flag in NO_EFFECT if given.pop(flag, None)]
    if len(found) > MOST_REASONS:
        return [
            f"{len(found)} flags have no effect here (--help ignored has the reasons): "
            + ", ".join(found)
        ]
    return [f"{flag} has no effect {NO_EFFECT[flag]}" for flag in found]


def unread_faults(unread: Sequence[str], supported: Sequence[str]) -> list[str]:
    """Returns the faults of the words that no flag of the parser takes.

    Refused flags with one reason share a fault. The values of an unknown flag are no faults.
    """
    names = {word.partition("=")[0]: word for word in unread if word.startswith("--")}
    refused: dict[tuple[str, str], list[str]] = {}
    faults = []
    for name, word in names.items():
        if name in REFUSED:
            owner = WHOSE.get(name, "Megatron")
            refused.setdefault((owner, REFUSED[name]), []).append(name)
        elif name in BY_VALUE:
            faults.append(
                f"{word.replace('=', ' ', 1)} is not supported here, only "
                + " or ".join(BY_VALUE[name])
            )
        else:
            faults.append(f"unknown flag {name}: {advice(name, supported)}")
    for (owner, reason), flags in refused.items():
        are = "is" if len(flags) == 1 else "are"
        faults.append(f"{owner}'s {', '.join(flags)} {are} not supported here: {reason}")
    if unread and not names:
        faults = [f"{unread[0]!r} follows no flag that takes it"]
    return faults


def advice(name: str, supported: Iterable[str]) -> str:
    """Returns what to do about an unknown flag."""
    closest = closest_flag(name, supported, NO_EFFECT)
    return f"did you mean {closest}?" if closest else "--help lists the flags"


def listed(kind: str) -> list[tuple[str, list[str]]]:
    """Returns the reasons of the flags that are "refused" or "ignored", each with its flags."""
    key, said = ("no effect", "no effect ") if kind == "ignored" else (kind, "")
    found = [
        (said + row["reason"], [name.partition("=")[0] for name in row["flags"]])
        for row in DATA[key]
    ]
    only = [f"{flag} {value}" for flag, value in ONLY_VALUE.items()]
    return found + [("accepted with this value:", only)] * (kind == "refused")


def fate_of(word: str, value: str = "") -> str | None:
    """Returns one line on a flag of Megatron that this program renames, refuses or ignores.

    word: the flag in lower case, with or without its two dashes. value: its value, if it is known.
    Returns None for any other word, and for a flag whose one legal value this is.
    """
    flag = word if word.startswith("--") else f"--{word}"
    if flag in RENAMED:
        return f"{flag} is an old spelling of {RENAMED[flag]}"
    if flag in BY_VALUE:
        known = ", ".join(f"{value}: {read or 'as here'}" for value, read in BY_VALUE[flag].items())
        if value and value not in BY_VALUE[flag]:
            return f"{flag} {value} is refused: it is read by its value ({known})"
        return f"{flag} is read by its value ({known})"
    if value and ONLY_VALUE.get(flag) == value:
        return None
    if flag in NO_EFFECT:
        return f"{flag} is accepted and has no effect {NO_EFFECT[flag]}"
    return f"{flag} is refused: {REFUSED[flag]}" if flag in REFUSED else None


def closest_flag(name: str, supported: Iterable[str], others: Iterable[str] = ()) -> str | None:
    """Returns the known flag that `name` was probably meant to be, or None if none is near.

    The order is: the flag of this name in other programs, then `supported`, then `others`.
    """
    supported = list(supported)
    other = DATA["other programs"].get(name.replace("_", "-"))
    if other in supported:
        return str(other)
    for known in (supported, others):
        for near in difflib.get_close_matches(name, known, n=1, cutoff=0.84):
            if _meaning(near) == _meaning(name):
                return near
    return None


def _meaning(flag: str) -> tuple[str, set[str]]:
    """Returns the digits and the negations of a flag: near spellings may differ in them."""
    return re.sub(r"\D", "", flag), NEGATIONS & {*flag.strip("-").split("-")}
