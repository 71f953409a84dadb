"""How the user started this process, and the commands that the user can type next.

    pretrain_gpt.py                      the script of a checkout
    megatron-lite train                  the command of an installed package
    python -m megatron_lite train        the package, installed or not

Only who typed `megatron-lite` is known to have that command. Everybody has the package, and Python.
Standard library only.
"""

import importlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checks import InputError

SCRIPT = "pretrain_gpt.py"
COMMAND = "megatron-lite"


def started() -> str:
    """Returns the name of the file that this process was started with."""
    return Path(sys.argv[0]).name


def subcommand(name: str) -> list[str]:
    """Returns the words that start a subcommand of `megatron-lite`."""
    return [COMMAND, name] if started() == COMMAND else ["python", "-m", "megatron_lite", name]


def training_command() -> list[str]:
    """Returns the words that start a training."""
    return ["python", SCRIPT] if started() == SCRIPT else subcommand("train")


COMMAND_WIDTH = 80  # columns of a line


def shell_lines(words: Sequence[str]) -> str:
    """Returns a command as lines of a shell, with as many flags a line as fit COMMAND_WIDTH.

    The words before -m are the launcher's, and keep their shell variables, such as $NODE_RANK.
    """
    place = words.index("-m") if "-m" in words else 0
    flags: list[str] = []  # each with its values; before them the program
    for number, word in enumerate(words):
        shown = word if number < place else shlex.quote(word)
        if word.startswith("--") or not flags:
            flags.append(shown)
        else:
            flags[-1] += f" {shown}"
    lines = flags[:1]
    for one in flags[1:]:
        if len(lines[-1]) + len(one) + 1 < COMMAND_WIDTH:
            lines[-1] += f" {one}"
        else:
            lines.append(f"    {one}")
    return " \\\n".join(lines)


CHECKOUT = Path(__file__).resolve().parents[2]


def install_advice(extra: str) -> str:
    """Returns the command that installs an extra, such as "plot"."""
    if (CHECKOUT / "setup.py").is_file():
        return f"pip install -e '.[{extra}]'{'' if Path.cwd() == CHECKOUT else f' (in {CHECKOUT})'}"
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
        raise MissingPackage(
            f"{needed_by} needs the package {module.partition('.')[0]}, which is not installed: "
            f"{install_advice(extra)}"
        ) from None
