"""The flags of Megatron-LM, of all its releases, that set no field here, and what becomes of each.

megatron_flags.json has them by the reason: those that are refused, since they would change numbers
or promise something that the user would miss; those that have no effect, also without the feature
that they belong to; those that have one legal value; and old spellings. A name there that ends with
"=" takes a value, and one that ends with "=*" takes several. This module is its only reader.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
# The fields of configurations stored by version 0.1 that have no effect any more.
RETIRED_FIELDS = frozenset(DATA["retired fields"])
# With more ignored flags than this, one line names all of them, without the reasons.
MOST_REASONS = 3
NEGATIONS = {"no", "not", "disable", "without"}


def add_flags_without_effect(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that are accepted and ignored, and the flags that allow only one value.

    Each is stored under its own spelling with the dashes, which no field has. `take_ignored` and
    `only_value_faults` find it by this name.
    """
    names = [name for row in DATA["no effect"] for name in row["flags"]]
    for name in [*names, *(f"{flag}=" for flag in ONLY_VALUE)]:
        flag, equals, several = name.partition("=")
        options: dict[str, Any] = (
            dict(nargs=several or None) if equals else {"action": "store_true"}
        )
        parser.add_argument(flag, dest=flag, help=argparse.SUPPRESS, **options)


def renamed_words(argv: Sequence[str], parsed: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns `argv` with old spellings replaced, and a notice for each flag replaced.

    parsed: the flags of the parser. Underscores in the name of a flag are replaced by dashes,
    unless it is a known flag as it stands.
    """
    renamed, notices = [], []
    known = {*parsed, *RENAMED, *REFUSED}
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--") and name not in known and name.replace("_", "-") in known:
            name = name.replace("_", "-")
        if name in RENAMED:
            notices.append(f"{name} is an old spelling, read as {RENAMED[name]}")
            # The last word takes the value of the old flag. The words before it are complete.
            *added, name = RENAMED[name].split()
            renamed += added
        renamed.append(name + equals + value)
    return renamed, notices


def only_value_faults(given: dict[str, Any]) -> list[str]:
    """Removes the flags that allow only one value, and returns a fault for each other value.

    Numbers are compared as numbers: 1.0 is 1.
    """

    def is_allowed(value: str, only: str) -> bool:
        try:
            return value == only or float(value) == float(only)
        except ValueError:
            return False

    return [
        f"Megatron's {flag} {value} is not supported here, only {only}: {REFUSED[flag]}"
        for flag, only in ONLY_VALUE.items()
        if not is_allowed(value := given.pop(flag, None) or only, only)
    ]


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


def unread_faults(unread: Sequence[str], supported: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the faults of the words that no flag of the parser takes.

    Also returns the supported flags that the unknown ones were probably meant to be.

    Refused flags with one reason share a fault. The values of an unknown flag are no faults.
    """
    names = dict.fromkeys(word.partition("=")[0] for word in unread if word.startswith("--"))
    refused: dict[str, list[str]] = {}
    faults, meant = [], []
    for name in names:
        if name in REFUSED:
            refused.setdefault(REFUSED[name], []).append(name)
            continue
        closest = closest_flag(name, supported, NO_EFFECT)
        meant += [closest] if closest is not None else []
        advice = f"did you mean {closest}?" if closest else "--help lists the flags"
        faults.append(f"unknown flag {name}: {advice}")
    if unread and not names:
        faults.append(f"{unread[0]!r} follows no flag that takes it")
    for reason, flags in refused.items():
        several = f"{', '.join(flags[:-1])} and {flags[-1]} are"
        subject = several if len(flags) > 1 else f"{flags[0]} is"
        faults.append(f"Megatron's {subject} not supported here: {reason}")
    return faults, meant


def fate_of(word: str) -> str | None:
    """Returns one line on a flag of Megatron that this program renames, refuses or ignores.

    word: the flag in lower case, with or without its two dashes. Returns None for any other word.
    """
    flag = word if word.startswith("--") else f"--{word}"
    if flag in RENAMED:
        return f"{flag} is an old spelling of {RENAMED[flag]}"
    if flag in NO_EFFECT:
        return f"{flag} is accepted and has no effect {NO_EFFECT[flag]}"
    return f"{flag} is refused: {REFUSED[flag]}" if flag in REFUSED else None


def closest_flag(name: str, supported: Iterable[str], others: Iterable[str] = ()) -> str | None:
    """Returns the known flag that `name` was probably meant to be, or None if none is near.

    The order is: the flag of this name in other programs, then `supported`, then `others`. A flag
    is near if its words are those of `name`, up to typing errors and a word more or less.
    """
    supported = list(supported)
    other = DATA["other programs"].get(name.replace("_", "-"))
    if other in supported:
        return str(other)
    for known in (supported, others):
        nearness, found = max(((_nearness(name, one), one) for one in known), default=(0.0, ""))
        if nearness > 0.0:
            return found
    return None


def _nearness(name: str, known: str) -> float:
    """Returns how near two flags are, at most 2; 0.0 if one has a word that changes the meaning."""
    mine, theirs = _words(name), _words(known)
    if "".join(mine) == "".join(theirs):
        return 2.0
    fewer, more = sorted((mine, theirs), key=len)
    # The first word is the subject: a flag with another one is about something else.
    if 3 * len(fewer) < 2 * len(more) or (
        len(mine) != len(theirs) and not _is_same_word(mine[0], theirs[0])
    ):
        return 0.0
    left = list(more)
    for word in fewer:
        same = next((one for one in left if _is_same_word(word, one)), None)
        if same is None:
            return 0.0
        left.remove(same)
    if NEGATIONS & {*left}:
        return 0.0
    return len(fewer) / len(more) + difflib.SequenceMatcher(None, name, known).ratio()


def _words(name: str) -> list[str]:
    words = name.strip("-").replace("_", "-").split("-")
    return words[1:] if words[0] in ("use", "enable") and len(words) > 1 else words


def _is_same_word(word: str, other: str) -> bool:
    """Returns whether two words are one, abbreviated (len, length) or with a typing error."""
    if word == other:
        return True
    short, long = sorted((word, other), key=len)
    starts = (short, short.rstrip("s"))
    if any(len(one) >= 3 and long.startswith(one) for one in starts) and long.isalpha():
        return True
    return (
        word[:1] == other[:1]
        and re.sub(r"\D", "", word) == re.sub(r"\D", "", other)
        and difflib.SequenceMatcher(None, word, other).ratio() > 0.75
    )
