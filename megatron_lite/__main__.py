"""The command `megatron-lite`, which is also `python -m megatron_lite`.

Each subcommand is a program that has a file of its own. Only that file is imported, so the help and
the planner start without torch.
"""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from megatron_lite import __version__
from megatron_lite.parallel.signals import ctrl_c_raises, open_streams, safe_output

# The module whose `main(argv, program)` runs a subcommand and returns the exit status, and what
# the subcommand does.
SUBCOMMANDS = {
    "train": ("cli.pretrain", "trains a GPT, as pretrain_gpt.py of a checkout does"),
    "plan": ("tools.plan", "finds the fastest layout and recompute policy that fits"),
    "fit": ("tools.fit", "finds the recompute policy of a transformers model on a GPU"),
    "explain": ("cli.explanation", "prints what each layer of a run keeps and rebuilds"),
    "convert": ("tools.convert", "converts weights from and to Hugging Face and Megatron"),
    "generate": ("tools.generate", "continues a text with the model of a checkpoint"),
    "preprocess": ("tools.preprocess_data", "converts text to the token files of --data-path"),
    "plot": ("tools.plot_memory", "draws the files of --memory-timeline side by side"),
    "report": ("tools.report", "makes a page of the curves of a run"),
}


def main(argv: Sequence[str] | None = None, started: str | None = None) -> int:
    """Runs the command line and returns the exit status. A wrong command line has the status 2.

    started: the path of the program that was started. Its messages begin with the command.
    """
    command = _command(sys.argv[0] if started is None else started)
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        return _print(help_text(command))
    if words[0] == "--version":
        return _print(f"megatron-lite {__version__}")
    if words[0] not in SUBCOMMANDS:
        near = difflib.get_close_matches(words[0], SUBCOMMANDS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"give one of {', '.join(SUBCOMMANDS)}"
        print(f"{command}: error: no subcommand {words[0][:80]!r}: {meant}", file=sys.stderr)
        return 2
    if argv is None:
        open_streams()
    program = f"{command} {words[0]}"
    try:
        run = import_module(f"megatron_lite.{SUBCOMMANDS[words[0]][0]}").main
        ctrl_c_raises()
        return int(run(words[1:], program))
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        print(
            f"{program}: error: it needs PyTorch, which this Python lacks: install it with "
            f"`{sys.executable} -m pip install torch`",
            file=sys.stderr,
        )
        return 2


def help_text(command: str) -> str:
    """Returns the text of --help."""
    rows = "\n".join(f"  {name:12}{about}" for name, (_, about) in SUBCOMMANDS.items())
    return (
        f"usage: {command} SUBCOMMAND ...\n\n"
        "Trains GPT models on several GPUs or CPUs, and recomputes activations to save\n"
        "memory.\n\n"
        f"subcommands:\n{rows}\n\n"
        f"`{command} SUBCOMMAND --help` describes the flags of one.\n"
        "On several ranks:\n"
        "  torchrun --nproc-per-node N -m megatron_lite train ...\n"
        "--version prints the version. Further tools run as\n"
        "python -m megatron_lite.tools.NAME: calibrate, train_tokenizer,\n"
        "translate_recompute."
    )


def _command(started: str) -> str:
    """Returns the words that started this program, for its messages."""
    return "python -m megatron_lite" if Path(started).stem == "__main__" else "megatron-lite"


def _print(text: str) -> int:
    with safe_output():
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
