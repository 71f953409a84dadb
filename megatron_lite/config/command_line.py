"""A command as lines of a shell. Standard library only."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

COMMAND_WIDTH = 80  # columns of a line


def shell_lines(words: Sequence[str], program: str = "-m") -> str:
    """Returns a command as lines of a shell, with one flag of the program a line.

    program: the word with which the program begins, such as -m of `-m megatron_lite train`.

    The words before the program are the launcher's, and keep their shell variables, such as
    $NODE_RANK. They stand on one line if it has at most 78 columns.
    """
    place = words.index(program) if program in words else 0
    launcher = " ".join(words[:place])
    if len(launcher) > 76:  # and " \\"
        launcher = launcher.replace(" --", " \\\n  --")
    rows = [launcher] if place else []
    for word in words[place:]:
        if not rows or word == program or word.startswith("--"):
            rows.append(shlex.quote(word))
        else:
            rows[-1] += f" {shlex.quote(word)}"
    return " \\\n  ".join(rows)


def filled_lines(words: Sequence[str]) -> str:
    """Returns a command as lines of a shell, with as many flags a line as fit COMMAND_WIDTH."""
    items: list[str] = []  # a flag with its values
    for word in words:
        if word.startswith("--") or not items:
            items.append(shlex.quote(word))
        else:
            items[-1] += f" {shlex.quote(word)}"
    rows = items[:1]
    for item in items[1:]:
        if len(rows[-1]) + len(item) + len("  \\") > COMMAND_WIDTH:
            rows.append(f"    {item}")
        else:
            rows[-1] += f" {item}"
    return " \\\n".join(rows)
