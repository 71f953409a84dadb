"""The argparse parser of every program here, which finds all faults of a command line at once.

argparse stops at the first word that it cannot read. `Parser.read` takes the flag with the fault
out of the words and parses again, until nothing is left to find. `Faults` collects the faults of
all steps of parsing. Standard library only.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from megatron_lite.config.megatron_flags import closest_flag
from megatron_lite.config.plain import parse_whole_number


def help_columns() -> int:
    """Returns the columns of a text: those of the terminal or of $COLUMNS, from 80 to 100."""
    return max(80, min(100, shutil.get_terminal_size((100, 24)).columns))


def paragraph(text: str, *, indent: str = "") -> str:
    """Returns a text of one paragraph in lines that fit. Flags are not broken at their dashes."""
    wrapper = textwrap.TextWrapper(help_columns(), indent, indent, break_on_hyphens=False)
    return wrapper.fill(text)


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

    Its whole numbers have at most 64 bits.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("type", int, reader(parse_whole_number))

    @property
    def actions(self) -> tuple[argparse.Action, ...]:
        """Returns what the parser takes, in the order in which it was added."""
        return tuple(self._actions)

    def call_options(self, title: str) -> None:
        """Gives the flags without a group of their own this title."""
        self._optionals.title = title

    def groups(self) -> dict[str, list[argparse.Action]]:
        """Returns the actions by the title of their group."""
        return {group.title or "": group._group_actions for group in self._action_groups}

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Reads the words. The message about a word that no flag takes names the nearest flags."""
        found, unread = self.parse_known_args(args, namespace)
        if unread:
            names = [word.partition("=")[0] for word in unread if word.startswith("--")]
            known = self._option_string_actions
            near = [flag for name in names if (flag := closest_flag(name, known)) is not None]
            meant = f": did you mean {' and '.join(near)}?" if near else ""
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
                failed.append(self._option_string_actions[spellings[0]].dest)

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
        self.exit(2, f"{self.prog}: error: {message}\n")


def reader(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns the function as an argparse type: argparse then shows the text of its ValueError."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


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
