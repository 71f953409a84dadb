"""The argparse parser of every program here: its faults are one line, without the usage.

Standard library only.
"""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_lite.config.megatron_flags import closest_flag
from megatron_lite.config.plain import parse_whole_number


def help_columns() -> int:
    """Returns the columns of a text: those of the terminal or of $COLUMNS, from 80 to 100."""
    return max(80, min(100, shutil.get_terminal_size((100, 24)).columns))


def paragraph(text: str, *, indent: str = "") -> str:
    """Returns a text of one paragraph in lines that fit. Flags are not broken at their dashes."""
    wrapper = textwrap.TextWrapper(help_columns(), indent, indent, break_on_hyphens=False)
    return wrapper.fill(text)


class Parser(argparse.ArgumentParser):
    """A parser whose whole numbers have at most 64 bits.

    Abbreviated flags are refused: a new flag must not change the meaning of an old command.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)
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

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2.

        argparse would print the usage first. With Megatron's many flags it would hide the message.
        """
        own = re.sub(r"argument \S+: (?=--)", "", message)  # our readers name the flag themselves
        self.exit(2, f"{self.prog}: error: {own}\n")


def reader(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns the function as an argparse type: argparse then shows the text of its ValueError."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read
