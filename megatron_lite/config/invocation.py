"""How the user started this program, and the commands that the user can type next.

The command line finds the name of the program once (cli/, __main__.py) and hands it down as a plain
text, with which messages begin:

    pretrain_gpt.py                      the script of a checkout
    megatron-lite train                  the command of an installed package
    python -m megatron_lite train        the package, installed or not
    python -m megatron_lite.tools.plan   one tool of the package

Only who typed `megatron-lite` is known to have that command. Everybody has the package, and Python.
Standard library only.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.config.checks import InputError

SCRIPT = "pretrain_gpt.py"
COMMAND = "megatron-lite"
MODULE = ("-m", "megatron_lite")


class Invocation(NamedTuple):
    """The start of a run from a command line.

    program: the name of the program, as above.
    printed: the notices that the terminal has already.
    """

    program: str = SCRIPT
    printed: tuple[str, ...] = ()


BY_SCRIPT = Invocation()


def as_typed(program: str) -> str:
    """Returns the words to type before the flags of the program."""
    return f"python {program}" if program == SCRIPT else program


def subcommand(program: str, name: str) -> list[str]:
    """Returns the words that start a subcommand of `megatron-lite` beside the program."""
    own = program.split()[0] == COMMAND
    return [COMMAND, name] if own else ["python", *MODULE, name]


def training_command(program: str, num_ranks: int = 1) -> list[str]:
    """Returns the words that start a training on some ranks of this machine.

    The script stays the script. Any other program names a subcommand or a tool of the package.
    """
    if num_ranks > 1:
        launcher = ["torchrun", "--nproc-per-node", str(num_ranks)]
        return [*launcher, *([SCRIPT] if program == SCRIPT else [*MODULE, "train"])]
    return ["python", SCRIPT] if program == SCRIPT else subcommand(program, "train")


COMMAND_WIDTH = 80  # columns of a line


def shell_lines(words: Sequence[str], program: str = "-m") -> str:
    """Returns a command as lines of a shell, with as many flags a line as fit COMMAND_WIDTH.

    program: the word with which the program begins, such as -m of `-m megatron_lite train`. The
        words before it are the launcher's, and keep their shell variables, such as $NODE_RANK.
    """
    place = words.index(program) if program in words else 0
    items: list[str] = []  # a flag with its values
    for number, word in enumerate(words):
        shown = word if number < place else shlex.quote(word)
        if word.startswith("--") or not items:
            items.append(shown)
        else:
            items[-1] += f" {shown}"
    rows = items[:1]
    for item in items[1:]:
        if len(rows[-1]) + len(item) > COMMAND_WIDTH - len("  \\"):
            rows.append(f"    {item}")
        else:
            rows[-1] += f" {item}"
    return " \\\n".join(rows)


CHECKOUT = Path(__file__).resolve().parents[2]


def install_advice(extra: str, root: Path = CHECKOUT) -> str:
    """Returns the command that installs an extra, such as "plot".

    root: the folder of the package's own folder. It is a checkout if it has a setup.py.
    """
    if (root / "setup.py").is_file():
        at = "" if root == Path.cwd() else f" (in {root})"
        return f"pip install -e '.[{extra}]'{at}"
    return f"pip install './FILE.whl[{extra}]', with the wheel that was installed for FILE.whl"


class MissingPackage(InputError):
    """An optional package is not installed."""


def module_of_extra(module: str, extra: str, *, needed_by: str) -> Any:
    """Imports a module of an optional package, at the time when it is needed.

    needed_by: what needs it, such as "--wandb-project demo".
    Raises MissingPackage that names the package and the extra if it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise MissingPackage(
            f"{needed_by} needs the package {package}, which is not installed: "
            f"{install_advice(extra)}"
        ) from None
