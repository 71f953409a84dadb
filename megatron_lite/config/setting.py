"""A field of a configuration that is a flag too: its help, its choices and its bounds in one place.

    seed: int = setting("seed of initial weights", 1234, least=0, below=2**32)

run_flags.py makes the parsers, the help, the command line of a run and docs/flags.md from these
facts, and `Settings` checks the values. `from_plain` builds config classes from JSON. Standard
library only.
"""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from .checks import MOST_SIZE, Values, as_object, flag, quoted, shown


class ContradictionError(ValueError):
    """Settings that exclude each other, or one that lacks what it needs.

    fields: the settings that may be left out. A command line leaves out those of them that a file
        supplies (cli/flags.py). All other broken rules are faults of the user.
    """

    def __init__(self, text: str, fields: str) -> None:
        super().__init__(text)
        self.fields = fields.split()


def resolve(config: Any, field: str, value: Any) -> None:
    """Gives a field of a frozen config its derived value if it is None.

    Only `__post_init__` and `check_rules` may call this.
    """
    if getattr(config, field) is None:
        object.__setattr__(config, field, value)


class Setting(NamedTuple):
    """The facts about a flag.

    help: its help. % and the default are added to it (run_flags.py).
    name: its spelling, if that is not the field's name with dashes. A flag of a field that is True
        turns the field off.
    alias: a second spelling.
    choices: the values that the field may have. Empty: any value. A text has words for them.
    megatron: Megatron's other values, and the choice that each stands for.
    nargs: the number of values on the command line, as argparse has it.
    metavar: what stands for the value in the help. Empty: its type, or its choices.
    parse: reads the text of the flag. None: the type of the field does.
    refused: other values that Megatron has, with the rest of the sentence that refuses each.
    least, most, above, below: the bounds of the value, which must be finite.
    upto, multiple_of: a field, and fields, of any topic: the value may not be above it, and must be
        a multiple of each.
    why: the reason for the bounds, and for the exclusions or else the needs.
    needs, excludes: conditions that must hold, or must not, unless the field has its default.
        Blanks stand between several, and between several fields of multiple_of.
    without, unless: the condition without which, and the one with which, the flag has no effect. A
        notice says so, and the reason behind a colon.

    A condition names a field of any topic: "load", "optimizer=muon", "tokenizer_type=A/B" for one
    of two values, or "pipeline_model_parallel_size>1".

    `settings_of` adds what the class says about the field:

    field: its name.
    kind: the type of its value, or of each of several.
    default: its default; MISSING: it must be given.
    topic: the field of RunConfig whose class has it.
    """

    help: str
    name: str = ""
    alias: str = ""
    choices: Collection[str] = ()
    megatron: Mapping[str, str] = {}
    refused: Mapping[str, str] = {}
    nargs: str | int | None = None
    metavar: str = ""
    parse: Callable[[str], Any] | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    upto: str = ""
    multiple_of: str = ""
    why: str = ""
    needs: str = ""
    excludes: str = ""
    without: str = ""
    unless: str = ""
    field: str = ""
    kind: Any = bool
    default: Any = False
    topic: str = ""

    @property
    def flag(self) -> str:
        """The flag that sets the field to another value than its default."""
        return self.name or flag(self.field)

    @property
    def is_required(self) -> bool:
        """Tells whether the field has no default."""
        return self.default is dataclasses.MISSING

    def with_value(self, value: Any) -> str:
        """Returns the flag with a value, for a message."""
        words = value if isinstance(value, tuple) else () if isinstance(value, bool) else (value,)
        return shown(" ".join(map(str, (self.flag, *words))))

    @property
    def reason(self) -> str:
        """The end of a sentence: `why` behind a colon."""
        return self.why and f": {self.why}"

    def fault(self, value: Any) -> str | None:
        """Returns why the field may not have the value, or None."""
        flag = self.flag
        if value in self.refused:
            return f"{flag} {value} {self.refused[value]}"
        if self.choices and value not in self.choices:
            return f"{flag} must be one of {', '.join(map(str, self.choices))} (got {value!r})"
        if value == "":  # as an unset shell variable makes it
            return f"{flag} is empty: give a value, or leave the flag out"
        if self.most is self.below is None and type(value) is int and value > MOST_SIZE:
            return f"{flag} must be at most {MOST_SIZE} (got {value})"
        rules = {
            f"at least {self.least}": self.least is None or value >= self.least,
            f"above {self.above}": self.above is None or value > self.above,
            f"below {self.below}": self.below is None or value < self.below,
            f"at most {self.most}": self.most is None or value <= self.most,
        }
        if isinstance(value, float) and not math.isfinite(value):
            rules["finite"] = False
        if all(rules.values()):
            return None
        return (
            f"{flag} must be {' and '.join(rule for rule in rules if 'None' not in rule)} "
            f"(got {value}){self.reason}"
        )


def setting(
    help: str, default: Any = None, choices: str | Collection[Any] = (), **facts: Any
) -> Any:
    """Returns a field of a config class with the facts of `Setting`."""
    facts["choices"] = choices.split() if isinstance(choices, str) else choices
    return dataclasses.field(default=default, metadata={"setting": Setting(help, **facts)})


# A field without a default; one that is False unless its flag is given; one that is at least 1.
required = partial(setting, default=dataclasses.MISSING)
switch = partial(setting, default=False)
count = partial(setting, least=1)
# A field that is a share, and not the whole; one that has several values, or none.
share = partial(setting, least=0.0, below=1.0)
several = partial(setting, default=(), nargs="+")


@cache
def settings_of(config_class: Any, topic: str = "") -> Mapping[str, Setting]:
    """Returns the facts about each field of a config class, which has the values of a topic."""
    kinds = typing.get_type_hints(config_class)
    return {
        one.name: one.metadata["setting"]._replace(
            field=one.name, kind=_kind(kinds[one.name]), default=one.default, topic=topic
        )
        for one in dataclasses.fields(config_class)
    }


def _kind(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return _kind(typing.get_args(hint)[0])
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint


class Condition(NamedTuple):
    """Whether a condition holds; None if its field is not known. text: its flags."""

    field: str
    holds: bool | None
    text: str


@cache
def _alternatives(text: str) -> tuple[list[tuple[str, str, str]], str]:
    """Returns the field, the sign and the value of each alternative, and the flags of all."""
    found = re.findall(r"(\w+)([=>]?)([^|]*)", text)
    said = " or ".join(f"{flag(field)}{sign}{value}" for field, sign, value in found)
    return found, said.replace("=", " ").replace(">", " > ").replace("/", " or ")


def condition(text: str, values: Values) -> Condition:
    """Returns what a condition of `Setting` says about the values of fields."""
    alternatives, said = _alternatives(text)
    known = [(values[field], *test) for field, *test in alternatives if field in values]
    holds = any(
        found > int(value) if sign == ">" else str(found) in value.split("/") if sign else found
        for found, sign, value in known
    )
    unknown = len(known) < len(alternatives)
    return Condition(alternatives[0][0], None if unknown and not holds else holds, said)


if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: bool) -> Callable[[type], type]:
        return lambda kind: kind


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Settings:
    """A frozen dataclass with keyword arguments, whose fields are made by the functions above."""

    __dataclass_fields__: ClassVar[Values]

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self: Any) -> None:
        """Raises ValueError for a field that breaks a bound, is none of its choices or lacks what
        it needs. Lists, which argparse makes, become tuples."""
        for name, one in settings_of(self.__class__).items():
            value = getattr(self, name)
            if isinstance(value, list):
                value = vars(self)[name] = tuple(value)
            for each in value if isinstance(value, tuple) else () if value is None else [value]:
                if fault := one.fault(each):
                    raise ValueError(fault)
        check_relations([self])
        self.check_rules()

    def check_rules(self) -> None:
        """Raises ValueError for values that break another rule, and sets derived ones."""


def check_relations(configs: Sequence[Any]) -> None:
    """Raises ValueError for a field that is above another, that another does not divide, that
    lacks what it needs, or that is beside what it excludes. A rule about a field that no config has
    is left to the caller with all of them."""
    values = {name: value for config in configs for name, value in vars(config).items()}
    for config in configs:
        for one in settings_of(config.__class__).values():
            name, default, value = one.field, one.default, values[one.field]
            for other in (one.upto, *one.multiple_of.split()):
                number = values.get(other)
                if value is None or number is None:
                    continue
                if value > number if other == one.upto else value % number:
                    rule = "is above" if other == one.upto else "is not divisible by"
                    raise ValueError(
                        f"{one.with_value(value)} {rule} {flag(other)} {number}{one.reason}"
                    )
            is_given = value != default and (value, default) != (False, None)  # off needs nothing
            needs = one.needs.split()
            for text in (*needs, *one.excludes.split()) if is_given else ():
                found = condition(text, values)
                if text in needs and found.holds is False:
                    raise ContradictionError(
                        f"{one.with_value(value)} needs {found.text}"
                        f"{'' if one.excludes else one.reason}",
                        name,
                    )
                if text not in needs and found.holds:
                    raise ContradictionError(
                        f"{one.with_value(value)} excludes {found.text}{one.reason}. Leave one of "
                        "them out",
                        f"{name} {'' if '>' in text else found.field}",  # a size is no alternative
                    )


types_of = cache(typing.get_type_hints)  # it evaluates texts, and a run has 13 classes


def from_plain(cls: type, values: Any, where: str, ignored: Collection[str] = ()) -> Any:
    """Returns the config class built from a JSON object.

    where: the path of the object in the file, for error messages.
    ignored: fields that an older version had, and that have no effect any more.
    """
    given = as_object(values, where).items()
    values = {name: value for name, value in given if name not in ignored}
    hints = types_of(cls)
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(
            f"{where}: unknown field {shown(', '.join(unknown))} (known: "
            f"{', '.join(sorted(hints))})"
        )
    missing = sorted(
        one.name
        for one in dataclasses.fields(cls)
        if one.name not in values and one.default is one.default_factory is dataclasses.MISSING
    )
    if missing:
        raise ValueError(f"{where}: missing field {', '.join(missing)}")
    return cls(
        **{
            name: _value(hints[name], value, f"{where}.{name}", ignored)
            for name, value in values.items()
        }
    )


def _value(hint: Any, value: Any, where: str, ignored: Collection[str]) -> Any:
    """Returns the JSON value as the type that the field's annotation `hint` names."""
    for kind in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
        if dataclasses.is_dataclass(kind) and (value is not None or kind is hint):
            return from_plain(typing.cast(type, kind), value, where, ignored)
        origin, inside = typing.get_origin(kind), typing.get_args(kind)
        # JSON has no tuple: a list stands for it.
        if origin is tuple and type(value) is list and {*map(type, value)} <= {inside[0]}:
            return tuple(value)
        if origin is Mapping and type(value) is dict:
            return {
                name: _value(inside[1], one, f"{where}[{quoted(name)}]", ignored)
                for name, one in value.items()
            }
        if type(value) is kind or kind is Any:
            return value
        if kind is float and type(value) is int:  # may be written without a decimal point
            return float(value)
    raise ValueError(
        f"{where}: expected {str(hint) if typing.get_args(hint) else hint.__name__}, got "
        f"{quoted(value)}"
    )
