"""One group of flags for one config class, and what a flag's value may be.

A flag has the name of its field, so each flag is written once.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from megatron_lite.config.json_text import parse_whole_number, shown


class FlagGroup:
    """The flags of one config class.

    A flag stores nothing unless it is given. Its help shows the default of the class's field.
    """

    def __init__(self, parser: argparse.ArgumentParser, title: str, config_class: type) -> None:
        self._group = parser.add_argument_group(title)
        self._fields = {field.name: field for field in dataclasses.fields(config_class)}

    def value(
        self,
        flag: str,
        kind: type,
        text: str,
        *,
        alias: str | None = None,
        values: Sequence[str] = (),
        nargs: str | int | None = None,
    ) -> None:
        """Adds a flag with a value, or with several (nargs).

        values: the choices for the help. The config class checks them.
        """
        field = field_name(flag)
        metavar = (
            "{" + ",".join(values) + "}" if values else {int: "N", float: "X", str: "TEXT"}[kind]
        )
        names = [flag] if alias is None else [flag, alias]
        self._group.add_argument(
            *names,
            dest=field,
            type=kind,
            nargs=nargs,
            metavar=metavar,
            default=argparse.SUPPRESS,
            help=text + self._default(field),
        )

    def switch(self, flag: str, text: str, *, alias: str | None = None) -> None:
        """Adds a flag without a value that turns its field on.

        `translate_values` replaces the few switches that have no field.
        """
        names = [flag] if alias is None else [flag, alias]
        self._group.add_argument(
            *names, dest=field_name(flag), action="store_true", default=argparse.SUPPRESS, help=text
        )

    def off_switch(self, flag: str, field: str, text: str, *, alias: str | None = None) -> None:
        """Adds a flag without a value that turns `field` off."""
        assert self._fields[field].default is True, field
        names = [flag] if alias is None else [flag, alias]
        self._group.add_argument(
            *names, dest=field, action="store_false", default=argparse.SUPPRESS, help=text
        )

    def _default(self, field: str) -> str:
        if field not in self._fields:  # `translate_values` replaces it
            return ""
        default = self._fields[field].default
        if default is dataclasses.MISSING:
            return " (required)"
        return "" if default is None or default == () else f" (default: {default})"


def whole_number(text: str) -> int:
    """Returns the int of at most 64 bits that the text spells, as an argparse type."""
    try:
        return parse_whole_number(text)
    except ValueError as error:
        beyond = "beyond 64 bits" in str(error)
        raise argparse.ArgumentTypeError(
            str(error) if beyond else f"invalid int value: {shown(repr(text))}"
        ) from None


def field_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
