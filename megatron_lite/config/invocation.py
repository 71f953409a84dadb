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
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.config.checks import InputError

SCRIPT = "pretrain_gpt.py"
COMMAND = "megatron-lite"
MODULE = ("-m", "megatron_lite")


def started() -> str:
    """Returns the name of the file that this process was started with."""
    return Path(sys.argv[0]).name


def subcommand(name: str) -> list[str]:
    """Returns the words that start a subcommand of `megatron-lite`."""
    return [COMMAND, name] if started() == COMMAND else ["python", *MODULE, name]


def training_command() -> list[str]:
    """Returns the words that start a training."""
    return ["python", SCRIPT] if started() == SCRIPT else subcommand("train")


COMMAND_WIDTH = 80  # columns of a line


# What stands for white space within words while lines are wrapped.
SPACES, KEPT = " \t\n\r\v\f", "\0\1\2\3\4\5"
TO_KEPT, FROM_KEPT = str.maketrans(SPACES, KEPT), str.maketrans(KEPT, SPACES)


def shell_lines(words: Sequence[str]) -> str:
    """Returns a command as lines of a shell, with as many flags a line as fit COMMAND_WIDTH.

    The words before -m are the launcher's, and keep their shell variables, such as $NODE_RANK.
    """
    place = words.index("-m") if "-m" in words else 0
    text = ""
    for number, word in enumerate(words):
        shown = word if number < place else shlex.quote(word)
        # Lines break before flags alone.
        text += (" " if word.startswith("--") else KEPT[0]) + shown.translate(TO_KEPT)
    rows = textwrap.wrap(
        text[1:],
        COMMAND_WIDTH - 1,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return " \\\n".join(rows).translate(FROM_KEPT)


CHECKOUT = Path(__file__).resolve().parents[2]


def install_advice(extra: str) -> str:
    """Returns the command that installs an extra, such as "plot"."""
    if (CHECKOUT / "setup.py").is_file():
        at = "" if Path.cwd() == CHECKOUT else f" (in {CHECKOUT})"
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
