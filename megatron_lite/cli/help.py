"""The texts of --help: the topics, the flags of one topic, and single flags; and what becomes of
flags that set no field here.

With more than 200 flags, one text of all would hide what a reader looks for. `--help` alone is
short; `--help TOPIC` has the flags of a topic; `--help all` has them all.
"""

import argparse
import difflib
import re
import sys
from collections import ChainMap
from collections.abc import Iterable, Sequence

from megatron_lite.config.checks import LARGEST_TEXT, shown
from megatron_lite.config.input_file import read_input_text
from megatron_lite.config.invocation import training_command
from megatron_lite.config.megatron_flags import (
    BY_VALUE,
    DATA,
    NO_EFFECT,
    ONLY_VALUE,
    OTHER_WAYS,
    REFUSED,
    RENAMED,
    advice,
)
from megatron_lite.config.other_ways import FLAGS, without_launcher
from megatron_lite.config.run_flags import TOPICS as RUN_TOPICS
from megatron_lite.config.run_flags import Parser, help_columns, paragraph, run_fields

HELP = ("-h", "--help")
MOST_ADVICE = 50  # unknown flags of a script for which the nearest known one is looked for
# A topic has the name of its field in RunConfig, with dashes.
TOPICS = {
    "general": "print or measure instead of training; a run from a file",
    **{name.replace("_", "-"): topic for name, topic in RUN_TOPICS.items()},
}
LISTS = {
    "all": "all flags",
    "refused": "flags of Megatron that are refused, by the reason",
    "ignored": "flags of Megatron that are accepted and have no effect",
}
MOST_USED = (
    "--num-layers",
    "--hidden-size",
    "--num-attention-heads",
    "--seq-length",
    "--micro-batch-size",
    "--train-iters",
    "--lr",
    "--data-path",
    "--tensor-model-parallel-size",
    "--recompute-policy",
)
EXAMPLE = """--num-layers 4 --hidden-size 256 \\
      --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 \\
      --micro-batch-size 4 --train-iters 50 --lr 1e-3 --mock-data \\
      --vocab-size 1000 --recompute-policy '*:pointwise'"""


def print_help(parser: Parser, argv: Sequence[str], program: str) -> None:
    """Prints the help and exits with status 0, if the words ask for it.

    The word behind --help may be a topic, a flag, or a part of the names of flags. Exits with
    status 2 if it is none of them.
    """
    place = next((number for number, word in enumerate(argv) if word in HELP), None)
    if place is None:
        return
    text = help_text(parser, " ".join(argv[place + 1 : place + 2]), program)
    if text is None:
        word = argv[place + 1]
        near = difflib.get_close_matches(word, [*TOPICS, *LISTS], n=1)
        advice = f"did you mean --help {near[0]}?" if near else "--help alone lists the topics"
        parser.error(f"--help {shown(word)}: no topic, and no flag has it in its name: {advice}")
    print(text)
    sys.exit(0)


def print_fates(parser: Parser, argv: Sequence[str]) -> None:
    """Prints what becomes of each flag in the script of --check-line, and exits.

    What is behind a # in the script is not read. The status is 0 if all of its flags are taken, as
    far as their values are plain, else 1.
    """
    only = Parser(prog=parser.prog, add_help=False)
    only.add_argument("--check-line", required=True)
    path = only.parse_known_args(argv)[0].check_line
    try:
        text = read_input_text(path, LARGEST_TEXT)
    except (OSError, ValueError) as error:
        parser.error(f"--check-line {shown(str(error))}")
    code = re.sub(r"(?m)(^|\s)#.*$", "", text)
    lines = code.replace("\\\n", " ").splitlines()
    launches = " ".join(without_launcher(line.split())[1] for line in lines)
    found, launched = dict(FLAGS.findall(code)), dict(FLAGS.findall(launches))
    if not found:
        parser.error(f"--check-line {path}: no flag is in it; give a script that names flags")
    parsed, taken, faults, unknown = parser._option_string_actions, [], 0, 0
    for name, value in found.items():
        known = name if name in parsed else name.replace("_", "-")
        fate = fate_of(known, value)
        if fate is None and known in parsed:
            fault = _value_fault(parsed[known].dest, value)
            fate = fault and f"{name} {value} is refused: {fault}"
            if fate is None:
                taken.append(name)
                continue
        elif fate is None and name in launched:
            fate = f"{name} is read by the launcher"
        faults += fate is None or " is refused: " in fate
        unknown += fate is None
        near = advice(name, parsed) if unknown <= MOST_ADVICE else "--help lists the flags"
        print(paragraph(fate or f"{name} is unknown: {near}"))
    print(paragraph(f"taken as they are: {' '.join(taken) or 'none'}"))
    print(f"{len(found)} flags, of which {faults} are refused or unknown")
    sys.exit(bool(faults))


def _value_fault(field: str, value: str) -> str | None:
    """Returns why a field of the run may not have this value, if it has a list of values."""
    facts = ChainMap(dict(run_fields()), *OTHER_WAYS.values()).get(field)
    if not value or facts is None:
        return None
    known = {str(one).lower() for one in (*facts.choices, *facts.megatron)}
    if value in facts.refused or (known and value.lower() not in known):
        return facts.fault(value)
    return None


def help_text(parser: Parser, word: str, program: str) -> str | None:
    """Returns the text of `--help WORD`, or of `--help` for an empty word.

    The word may also be a flag of Megatron that is renamed, refused or has no effect. Returns None
    if it is none of these, no topic, and in no flag's name.
    """
    topic = word.lower().replace("_", "-")
    groups = parser.groups()
    texts = {
        name: _flags(f"{name} ({about})", groups[name])
        for name, about in TOPICS.items()
        if topic in ("all", name)
    }
    if texts:
        return "\n".join(texts.values())
    if not topic:
        return _overview(parser, program)
    if topic in LISTS:
        return f"{LISTS[topic]}:\n" + "\n".join(
            f"{paragraph(reason)}\n{paragraph(' '.join(flags), indent='  ')}"
            for reason, flags in listed(topic)
        )
    found = [
        action
        for action in _shown(parser._actions)
        if any(topic in name.lower().replace("_", "-") for name in action.option_strings)
    ]
    exact = [action for action in found if topic in action.option_strings]
    whole = topic.startswith("--") or not found
    if whole and not exact and (line := fate_of(topic)) is not None:
        return paragraph(line)
    return _flags(f"flags with {word} in their name", exact or found) if found else None


def _overview(parser: Parser, program: str) -> str:
    groups = parser.groups()
    used = [parser._option_string_actions[flag] for flag in MOST_USED]
    topics = "\n".join(
        f"  {name:15}{about} ({len(_shown(groups[name]))})" for name, about in TOPICS.items()
    )
    lists = "\n".join(f"  {name:15}{text}" for name, text in LISTS.items())
    return (
        f"usage: {program} FLAGS\n\n"
        "Trains a GPT. Flags have Megatron-LM's names, defaults and meaning.\n\n"
        f"  {' '.join(training_command())} {EXAMPLE}\n\n"
        "Add --explain-recompute to see the memory of the run instead of training.\n\n"
        f"{_flags('the flags used most', used)}\n"
        f"--help TOPIC has the flags of a topic (their number):\n{topics}\n{lists}\n\n"
        + paragraph(
            "--help --FLAG describes one flag; --help WORD all flags with WORD in their name."
        )
    )


def _shown(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    return [action for action in actions if action.help != argparse.SUPPRESS]


def _flags(title: str, actions: Iterable[argparse.Action]) -> str:
    """Returns the help of the flags under a title, as argparse formats it."""
    formatter = argparse.HelpFormatter("", max_help_position=28, width=help_columns())
    formatter.start_section(title)
    formatter.add_arguments(_shown(actions))
    formatter.end_section()
    return formatter.format_help()


def listed(kind: str) -> list[tuple[str, list[str]]]:
    """Returns the reasons of the flags that are "refused" or "ignored", each with its flags."""
    key, said = ("no effect", "no effect ") if kind == "ignored" else (kind, "")
    found = [
        (said + row["reason"], [name.partition("=")[0] for name in row["flags"]])
        for row in DATA[key]
    ]
    only = [f"{flag} {value}" for flag, value in ONLY_VALUE.items()]
    return found + [("accepted with this value:", only)] * (kind == "refused")


def fate_of(word: str, value: str = "") -> str | None:
    """Returns one line on a flag of Megatron that this program renames, refuses or ignores.

    word: the flag in lower case, with or without its two dashes. value: its value, if it is known.
    Returns None for any other word, and for a flag whose one legal value this is.
    """
    flag = word if word.startswith("--") else f"--{word}"
    if flag in RENAMED:
        return f"{flag} is an old spelling of {RENAMED[flag]}"
    if flag in BY_VALUE:
        known = ", ".join(f"{value}: {read or 'as here'}" for value, read in BY_VALUE[flag].items())
        if value and value not in BY_VALUE[flag]:
            return f"{flag} {value} is refused: it is read by its value ({known})"
        return f"{flag} is read by its value ({known})"
    if value and ONLY_VALUE.get(flag) == value:
        return None
    if flag in NO_EFFECT:
        return f"{flag} is accepted and has no effect {NO_EFFECT[flag]}"
    return f"{flag} is refused: {REFUSED[flag]}" if flag in REFUSED else None
