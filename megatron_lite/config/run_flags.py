"""The flags of a run, made from the facts of its fields (setting.py), in both directions.

`add_run_flags` gives a parser one flag for each field, and one for each of Megatron's other ways to
set a field. `flags_of` returns the command line of a configuration. The help, docs/flags.md and the
planner read the same table. Standard library only.
"""

import argparse
import dataclasses
import re
import shutil
import textwrap
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn, TypeVar

from .checks import Values, flag, input_faults, parse_whole_number, printable
from .layer_pattern import parse_window
from .megatron_flags import OTHER_WAYS, unread_faults
from .run import RunConfig
from .setting import Setting, settings_of

# The argparse parser of every program here: its faults are one line, without the usage.
#
# Standard library only.


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

    def __init__(self, title: str = "options", **settings: Any) -> None:
        """title: of the flags without a group of their own."""
        super().__init__(allow_abbrev=False, **settings)
        self.register("type", int, reader(parse_whole_number))
        self._optionals.title = title

    def groups(self) -> dict[str, list[argparse.Action]]:
        """Returns the actions by the title of their group."""
        return {group.title or "": group._group_actions for group in self._action_groups}

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Reads the words. The message about a word that no flag takes names the nearest flag."""
        found, unread = self.parse_known_args(args, namespace)
        if unread:
            self.error("; ".join(self.faults_of(unread)))
        return found

    def faults_of(self, unread: Sequence[str]) -> list[str]:
        """Returns the faults of the words that no flag takes."""
        return unread_faults(unread, supported_flags(self), self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2.

        argparse would print the usage first. With Megatron's many flags it would hide the message.
        """
        own = re.sub(r"argument \S+: (?=--)", "", message)  # our readers name the flag themselves
        self.exit(2, f"{self.prog}: error: {printable(own)}\n")


def supported_flags(parser: Parser) -> list[str]:
    """Returns all flags that set a field or ask for help, with their aliases."""
    return [
        name
        for action in parser._actions
        if not action.dest.startswith("--")
        for name in action.option_strings
    ]


def reader(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns the function as an argparse type: argparse then shows the text of its ValueError."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


Settings = TypeVar("Settings")
METAVARS: dict[Any, str] = {int: "N", float: "X"}
LONGEST_CHOICES = 32  # columns of choices that stand in the place of a value


# The topics of the help, by the field of RunConfig: what their flags are about.
TOPICS = {
    "model": "the shape and the operations of the model",
    "data": "the datasets, and the order of the samples",
    "tokenizer": "the tokenizer and the size of the vocabulary",
    "training": "batch sizes, length of the run, precision, evaluation",
    "optimizer": "AdamW and Muon, weight decay, clipping",
    "lr_schedule": "the learning rate, its warm-up and decay",
    "loss_scaling": "the loss scale of float16",
    "recompute": "what backward rebuilds, to save memory",
    "parallel": "tensor, sequence, pipeline and context parallelism",
    "data_parallel": "sharded optimizer states, gradients and weights",
    "checkpoint": "saving, loading and resuming",
    "logging": "the log, metrics, TensorBoard, Weights & Biases, timing",
    "profiling": "traces of kernels and of memory",
}


@cache
def topics() -> Mapping[str, type]:
    """Returns the config class of each topic, such as ModelConfig for "model", in the order of
    RunConfig's fields."""
    return typing.get_type_hints(RunConfig)


@cache
def run_fields() -> Mapping[str, Setting]:
    """Returns the facts about all fields of a run by name."""
    return {
        name: one
        for topic, kind in topics().items()
        for name, one in settings_of(kind, topic).items()
    }


def add_run_flags(
    parser: argparse.ArgumentParser, *, without: Collection[str] = (), hidden: bool = False
) -> None:
    """Adds the flags of a run, one group for each topic. A flag that is not given stores nothing.

    without: the fields whose flags mean something else in this tool. hidden: whether the help is
        silent about them.
    """
    for topic in TOPICS:
        group = parser.add_argument_group(topic.replace("_", "-"))
        other_ways = OTHER_WAYS.get(topic, {})
        for name, one in {**settings_of(topics()[topic], topic), **other_ways}.items():
            if name not in without:
                add_flag(group, one._replace(field=name), hidden=hidden)


def add_flag(
    group: argparse._ActionsContainer, field: Setting, *, hidden: bool = False
) -> argparse.Action:
    """Adds the flag of a field. Its help shows the choices, if they are long, and the default."""
    default, text = field.default, field.help
    options: Values = dict(dest=field.field, default=argparse.SUPPRESS)
    if field.kind is bool:
        options["action"] = "store_false" if default is True else "store_true"
        if default is None:  # neither on nor off, so that each has a flag
            options["action"] = argparse.BooleanOptionalAction
    else:
        choices = ",".join(map(str, (*field.choices, *field.megatron)))
        metavar = field.metavar or METAVARS.get(field.parse or field.kind, "TEXT")
        if len(choices) > LONGEST_CHOICES:
            metavar, text = "NAME", f"{text}; one of {choices.replace(',', ', ')}"
        elif choices:
            metavar = f"{{{choices}}}"
        options |= dict(
            type=reader(field.parse) if field.parse else field.kind,
            metavar=metavar,
            nargs=field.nargs,
        )
        if field.is_required:
            text += " (required)"
        elif default not in (None, ()):
            words = default if isinstance(default, tuple) else (default,)
            text += f" (default: {' '.join(map(str, words))})"
    options["help"] = argparse.SUPPRESS if hidden else text.replace("%", "%%")
    names = [field.flag, *filter(None, [field.alias])]
    return group.add_argument(*names, **options)


def add_settings(parser: argparse.ArgumentParser, *kinds: type) -> None:
    """Adds the flags of a tool's settings. Those without a default must be given."""
    for kind in kinds:
        for field in settings_of(kind).values():
            add_flag(parser, field).required = field.is_required


def taken(kind: Callable[..., Settings], args: argparse.Namespace) -> Settings:
    """Returns the settings of a class from parsed flags. Raises InputError if a rule is broken."""
    with input_faults():
        return _made(kind, vars(args))


def _made(kind: Callable[..., Settings], values: Values) -> Settings:
    return kind(**{name: value for name, value in values.items() if name in settings_of(kind)})


def flag_of(field: str) -> str:
    """Returns the flag that sets the field to another value than its default."""
    found = run_fields().get(field)
    return found.flag if found else flag(field)


def flags_of(config: RunConfig) -> list[str]:
    """Returns the words of a command line that `parse_args` parses to an equal configuration.

    Fields with their default values are left out.
    """
    return [word for words in changed_settings(config).values() for word in words]


def flag_words(field: str, value: Any) -> list[str]:
    """Returns the words of a command line that give the field this value, not its default."""
    one = run_fields()[field]
    parse, name = one.parse, one.flag
    if isinstance(value, bool):
        return [name if value or one.default is not None else f"--no-{name[2:]}"]
    words = [*map(str, value if isinstance(value, tuple) else [value])]
    if parse and isinstance(value, tuple):
        text = ",".join(words)
        words = [text if parse is parse_window else f"[{text}]"]
    # argparse would take a word that begins with a dash for a flag.
    is_like_flag = len(words) == 1 and words[0].startswith("-")
    return [f"{name}={words[0]}"] if is_like_flag else [name, *words]


def build_run(values: Values) -> RunConfig:
    """Returns the run of these values by field. Other names are not read.

    Raises ValueError if a rule is broken, and TypeError if a field without a default is missing.
    """
    return RunConfig(**{topic: _made(kind, values) for topic, kind in topics().items()})


def changed_settings(config: RunConfig) -> dict[str, list[str]]:
    """Returns the words of each setting that differs from its default, by field.

    A setting that its topic derives from others, such as --kv-channels, counts only if its value is
    not the derived one.
    """
    changed = {}
    for name, field in run_fields().items():
        values = getattr(config, field.topic)
        value = getattr(values, name)
        if value != field.default and not is_derived(values, name, field.default):
            changed[name] = flag_words(name, value)
    return changed


def is_derived(values: Any, name: str, default: Any) -> bool:
    """Returns whether the topic gives the field its value itself if it is left at the default."""
    try:
        return bool(dataclasses.replace(values, **{name: default}) == values)
    except (ValueError, TypeError):
        return False
