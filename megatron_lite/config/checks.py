"""Helpers for the rules of the config classes.

Every error message names the value, the rule and the fix.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

LONGEST_SHOWN = 60
Entry = TypeVar("Entry")


class InputError(ValueError):
    """A fault in the user's input that is found after the flags were parsed.

    The input is a file, a directory or a launch. `pretrain_gpt.py` and the tools print the message
    as one line and exit with status 2, without a traceback.
    """


class ContradictionError(ValueError):
    """Settings that exclude each other, or one that lacks what it needs.

    fields: the settings that may be left out. A command line leaves out those of them that a file
        supplies (cli/flags.py). All other broken rules are faults of the user.
    """

    def __init__(self, text: str, fields: str) -> None:
        super().__init__(text)
        self.fields = fields.split()


class PeerError(InputError):
    """A fault that another rank met and reports. This rank only knows that it exists."""


@contextmanager
def input_faults(before: str = "", after: str = "") -> Iterator[None]:
    """Turns a rule that is broken inside the block (ValueError) into an InputError.

    before, after: what its message adds. An InputError is raised unchanged: it names its input.
    """
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{before}{error}{after}") from error


def flag(field: str) -> str:
    """Returns the flag of a config field: `num_layers` -> `--num-layers`."""
    return "--" + field.replace("_", "-")


def chosen(what: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """Returns table[name].

    Raises ValueError for a name without an entry: no code may treat a new choice as an old one.

    what: the flag or property that was set, for the error message.
    """
    if name not in table:
        raise ValueError(
            f"{what} {name} is not implemented here, only {', '.join(table)}: choose one of them"
        )
    return table[name]


def resolve(config: Any, field: str, value: Any) -> None:
    """Gives a field of a frozen config its derived value if it is None.

    Only `__post_init__` and `check_rules` may call this.
    """
    if getattr(config, field) is None:
        object.__setattr__(config, field, value)


def quoted(value: object) -> str:
    """Returns the value for an error message: only its beginning if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python prints no such whole number or list
        return "a value of several thousand digits or brackets"
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + ".."
