"""The argparse parser of every program here: its help, and all faults of a command line at once.

argparse stops at the first word that it cannot read. `Parser.read` takes the flag with the fault
out of the words and parses again, until nothing is left to find. `Faults` collects the faults of
all steps of parsing. A help text has at most 100 columns, and 80 in a narrower terminal. Standard
library only.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TextIO

from megatron_lite.config.megatron_flags import closest_flag
from megatron_lite.config.plain import parse_whole_number, shown

WIDEST, NARROWEST = 100, 80
VALUES: Mapping[Any, str] = {int: "N", float: "X"}
LONGEST_NAME = 12  # columns of a value that has the name of its flag
LONGEST_CHOICES = 32  # columns of choices that stand in the place of a value


def help_columns() -> int:
    """Returns the columns of a help text: those of the terminal or of $COLUMNS, from 80 to 100."""
    columns = shutil.get_terminal_size((WIDEST, 24)).columns
    return max(NARROWEST, min(WIDEST, columns))


def paragraph(text: str, *, indent: str = "") -> str:
    """Returns a text of one paragraph in lines that fit. Flags are not broken at their dashes."""
    return textwrap.fill(
        text,
        help_columns(),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def for_stream(text: str, stream: TextIO | None) -> str:
    """Returns a message whose long lines are broken between words if the stream is a terminal.

    A file, and a program that reads the stream, gets every line whole. Lines that are indented,
    such as a policy with a mark below its fault, stay whole too, unless they are items of a list.
    """
    if stream is None or not stream.isatty():
        return text
    columns = max(40, shutil.get_terminal_size((WIDEST, 24)).columns)
    return "\n".join(
        line
        if line.startswith(" ") and not line.startswith("  - ")
        else textwrap.fill(
            line, columns, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
        )
        for line in text.split("\n")
    )


class HelpLayout(argparse.HelpFormatter):
    """argparse's layout with our width, and with long choices behind the help of their flag."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"width": help_columns(), **settings})

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        if action.type in VALUES:
            return VALUES[action.type]
        name = super()._get_default_metavar_for_optional(action)
        return name if len(name) <= LONGEST_NAME else "TEXT"

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return super()._format_args(_shortened(action), default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        return super()._expand_help(_shortened(action))


class RawHelpLayout(HelpLayout, argparse.RawDescriptionHelpFormatter):
    """HelpLayout that does not fill the lines of the description and the epilog again."""


def choices_of(action: argparse.Action) -> list[str]:
    """Returns the choices of a flag, also those that only its metavar lists; or an empty list."""
    if action.choices is not None:
        return [str(choice) for choice in action.choices]
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return metavar[1:-1].split(",") if metavar[:1] == "{" else []


def _shortened(action: argparse.Action) -> argparse.Action:
    """Returns the flag itself, or one that lists its long choices in its help."""
    choices = choices_of(action)
    if len(",".join(choices)) <= LONGEST_CHOICES:
        return action
    listed = f"one of {', '.join(choices)}".replace("%", "%%")
    return argparse.Action(
        option_strings=action.option_strings,
        dest=action.dest,
        nargs=action.nargs,
        default=action.default,
        metavar="NAME",
        help=f"{action.help}; {listed}" if action.help else listed,
    )


class Read(NamedTuple):
    """The result of reading a command line.

    namespace: the flags that were read.
    unread: the words that no flag takes.
    faults: one text for each flag whose value cannot be read.
    failed: the destinations of these flags.
    """

    namespace: argparse.Namespace
    unread: list[str]
    faults: list[str]
    failed: list[str]


@dataclass
class Faults:
    """The faults of a command line, collected while it is parsed.

    texts: one text for each fault.
    fields: the fields that have no usable value because of a fault. A rule that reads one of them
        cannot be checked.
    """

    texts: list[str] = field(default_factory=list)
    fields: set[str] = field(default_factory=set)

    @contextmanager
    def of(self, *fields: str) -> Iterator[None]:
        """Collects a ValueError of the block as a fault of these fields."""
        try:
            yield
        except ValueError as error:
            self.texts.append(str(error))
            self.fields.update(fields)


class Parser(argparse.ArgumentParser):
    """A parser that reports all faults of a command line at once.

    Its help has our width (help_format.py), and its whole numbers have at most 64 bits.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": HelpLayout, **settings})
        self.register("type", int, whole_number)

    @property
    def actions(self) -> tuple[argparse.Action, ...]:
        """Returns what the parser takes, in the order in which it was added."""
        return tuple(self._actions)

    def groups(self) -> dict[str, list[argparse.Action]]:
        """Returns the actions by the title of their group."""
        return {group.title or "": group._group_actions for group in self._action_groups}

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Reads the words. The message about a word that no flag takes names the nearest flag."""
        found, unread = self.parse_known_args(args, namespace)
        if unread:
            names = [word.partition("=")[0] for word in unread if word.startswith("--")]
            near = [closest_flag(one, self._option_string_actions) for one in names]
            meant = " and ".join(dict.fromkeys(one for one in near if one is not None))
            meant = f": did you mean {meant}?" if meant else ""
            self.error(f"unrecognized arguments: {' '.join(unread)}{meant}")
        return found

    def read(self, argv: Sequence[str]) -> Read:
        """Reads the words. A flag whose value cannot be read counts as not given."""
        words = list(argv)
        faults: list[str] = []
        failed: list[str] = []
        while True:
            try:
                namespace, unread = self.parse_known_args(words)
                return Read(namespace, unread, faults, failed)
            except argparse.ArgumentError as error:
                # our readers name the flag themselves
                faults.append(re.sub(r"^argument \S+: (?=--)", "", str(error)))
                spellings = (error.argument_name or "").split("/")
                rest = _without(words, spellings)
                if len(rest) == len(words):
                    self.stop(faults)  # the fault is in no flag that could be taken out
                words = rest
                failed += [
                    action.dest
                    for action in self.actions
                    if {*spellings} & {*action.option_strings}
                ]

    def stop(self, faults: Sequence[str]) -> NoReturn:
        """Prints the faults and exits with status 2: one fault as one line, several as a list."""
        if len(faults) == 1:
            self.error(faults[0])
        lines = "".join(f"\n  - {fault}" for fault in faults)
        self.error(f"{len(faults)} faults in the command line:{lines}")

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2.

        argparse would print the usage first. With Megatron's many flags it would hide the message.
        """
        self.exit(2, for_stream(f"{self.prog}: error: {message}\n", sys.stderr))


def whole_number(text: str) -> int:
    """Returns the int of at most 64 bits that the text spells, as an argparse type."""
    try:
        return parse_whole_number(text)
    except ValueError as error:
        beyond = "beyond 64 bits" in str(error)
        raise argparse.ArgumentTypeError(
            str(error) if beyond else f"invalid int value: {shown(repr(text))}"
        ) from None


def _without(words: Sequence[str], spellings: Sequence[str]) -> list[str]:
    """Returns the words without these flags and without the values that follow them."""
    rest: list[str] = []
    dropping = False
    for word in words:
        if re.match(r"-\D", word):
            dropping = word.partition("=")[0] in spellings
        if not dropping:
            rest.append(word)
    return rest
