"""The layout of every `--help`: at most 100 columns, and 80 in a narrower terminal.

A flag with many choices is shown as `--flag NAME`, with the choices behind its help: argparse would
print them in one word, which no line can hold. Standard library only.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Mapping
from typing import Any, TextIO

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
