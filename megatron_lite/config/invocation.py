"""How the user started this program, and the commands that the user can therefore type next.

The command line finds the name of the program once (cli/, __main__.py) and hands it down as a plain
text, with which messages begin:

    pretrain_gpt.py                      the script of a checkout
    megatron-lite train                  the command of an installed package
    python -m megatron_lite train        the package, installed or not
    python -m megatron_lite.tools.plan   one tool of the package

Only who typed `megatron-lite` is known to have that command. Everybody has the package, and Python.
"""

from __future__ import annotations

from typing import NamedTuple

SCRIPT = "pretrain_gpt.py"
COMMAND = "megatron-lite"
MODULE = ("-m", "megatron_lite")


TRAINING = (SCRIPT, f"{COMMAND} train", f"{' '.join(('python', *MODULE))} train")


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
