"""A field of a configuration that is a flag too: its help, its choices and its bounds in one place.

    seed: int = setting("seed of initial weights", 1234, least=0, below=2**32)

run_flags.py makes the parsers, the help, the command line of a run and docs/flags.md from these
facts, and `check_settings` checks the values. Standard library only.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_lite.config.checks import ContradictionError, flag


class Setting(NamedTuple):
    """The facts about a flag.

    help: its help. % and the default are added to it (run_flags.py).
    name: its spelling, if that is not the field's name with dashes. A flag of a field that is True
        turns the field off.
    alias: a second spelling.
    choices: the values that the field may have. Empty: any value.
    megatron: Megatron's other values, and the choice that each stands for.
    nargs: the number of values on the command line, as argparse has it.
    parse: reads the text of the flag. None: the type of the field does.
    refused: other values that Megatron has, with the rest of the sentence that refuses each.
    least, above, below: the bounds of the value, which must be finite.
    why: the end of the sentence about a value beyond them.
    is_path: whether an empty text is a fault, as an unset shell variable makes it.
    needs: the setting of the same topic without which the default alone is legal: "load",
        "optimizer=muon" or "pipeline_model_parallel_size>1".
    without: the setting of any topic without which the flag has no effect, as a notice says.
    """

    help: str
    name: str = ""
    alias: str = ""
    choices: Sequence[str] = ()
    megatron: Mapping[str, str] = {}
    refused: Mapping[str, str] = {}
    nargs: str | int | None = None
    parse: Callable[[str], Any] | None = None
    least: float | None = None
    above: float | None = None
    below: float | None = None
    why: str = ""
    is_path: bool = False
    needs: str = ""
    without: str = ""

    def fault(self, flag: str, value: Any) -> str | None:
        """Returns why the field may not have the value, or None."""
        if value in self.refused:
            return f"{flag} {value} {self.refused[value]}"
        if self.choices and value not in self.choices:
            return f"{flag} must be one of {', '.join(map(str, self.choices))} (got {value!r})"
        if self.is_path and value == "":
            return f"{flag} is empty: give a path, or leave the flag out"
        rules = {
            f"at least {self.least}": self.least is None or value >= self.least,
            f"above {self.above}": self.above is None or value > self.above,
            f"below {self.below}": self.below is None or value < self.below,
        }
        if isinstance(value, float) and not math.isfinite(value):
            rules["finite"] = False
        if all(rules.values()):
            return None
        broken = " and ".join(rule for rule in rules if "None" not in rule)
        return f"{flag} must be {broken} (got {value}){self.why}"


def setting(help: str, default: Any = None, **facts: Any) -> Any:
    """Returns a field of a config class with the facts of `Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(help, **facts)})


def required(help: str, **facts: Any) -> Any:
    """Returns a field without a default."""
    return setting(help, dataclasses.MISSING, **facts)


def switch(help: str, **facts: Any) -> Any:
    """Returns a field that is False unless its flag is given."""
    return setting(help, False, **facts)


def settings_of(config_class: Any) -> dict[str, Setting]:
    """Returns the facts about each field of a config class."""
    return {one.name: one.metadata["setting"] for one in dataclasses.fields(config_class)}


def spelling(field: str, facts: Setting) -> str:
    """Returns the flag of a field."""
    return facts.name or flag(field)


def unmet(need: str, config: Any) -> str | None:
    """Returns the flag that another setting needs, with its value; None if the config has it."""
    name, sign, value = re.split("([=>]|$)", need, maxsplit=1)
    found = getattr(config, name)
    if found > int(value) if sign == ">" else found == value if sign else found:
        return None
    return " ".join(filter(None, (flag(name), sign.replace("=", ""), value)))


def check_settings(config: Any) -> None:
    """Raises ValueError for a field that breaks a bound, is none of its choices or lacks what it
    needs.

    Lists, which argparse makes, become tuples. Only `__post_init__` may call this.
    """
    for one in dataclasses.fields(config):
        facts, value = one.metadata["setting"], getattr(config, one.name)
        name = spelling(one.name, facts)
        if isinstance(value, list):
            object.__setattr__(config, one.name, tuple(value))
        elif not isinstance(value, tuple | types.NoneType) and (fault := facts.fault(name, value)):
            raise ValueError(fault)
        if facts.needs and value != one.default and (missing := unmet(facts.needs, config)):
            shown = "" if isinstance(value, bool) else f" {value}"
            raise ContradictionError(f"{name}{shown} needs {missing}", one.name)
