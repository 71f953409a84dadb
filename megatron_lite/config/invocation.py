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


def training_command(num_ranks: int = 1) -> list[str]:
    """Returns the words that start a training on some ranks of this machine.

    The script stays the script. Any other program names a subcommand of the package.
    """
    own = [SCRIPT] if started() == SCRIPT else [*MODULE, "train"]
    if num_ranks > 1:
        return ["torchrun", "--nproc-per-node", str(num_ranks), *own]
    return subcommand("train") if started() == COMMAND else ["python", *own]


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
