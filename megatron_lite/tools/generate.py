"""Continues a text: `python -m megatron_lite.tools.generate --load DIR --prompt TEXT`.

The model and the tokenizer are those of the checkpoint. The tensor-parallel size is the number of
ranks that were started (torchrun --nproc_per_node N), at any parallel size of the checkpoint. The
tool has no key-value cache: each new token runs the model over the whole context again. The context
is the last --seq-length tokens, the length that the model saw in training. A longer text loses its
oldest tokens, and positions count from the first token that is left.

This module reads the command line, without torch. generation.py does the work.
"""

import argparse
import sys

from megatron_lite.config.checks import InputError, flag
from megatron_lite.config.run_flags import Parser, add_flag, add_settings, run_fields, taken
from megatron_lite.config.setting import Settings, count, setting, switch

from .command import tool


def _add_flags(parser: Parser) -> None:
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="checkpoint directory, the --save of a run")
    add("--prompt", required=True, metavar="TEXT", help="text to continue")
    add("--seed", type=int, default=1234, help="default: 1234")
    add_settings(parser, Sampling)
    add_flag(parser, run_fields()["distributed_backend"])


def _generate(args: argparse.Namespace) -> None:
    others = " and ".join(flag(name) for name in ("temperature", "top_k", "top_p") if name in args)
    if "greedy" in args and others:
        raise InputError(f"--greedy takes the likeliest token: leave out {others}")
    args.sampling = taken(Sampling, args)
    # Imported late: the module imports torch, which --help does not need.
    from .generation import run

    run(args)


main = tool(
    "python -m megatron_lite.tools.generate",
    "Continues a text with the model of a checkpoint, on as many tensor-parallel ranks as are "
    "started.",
    _add_flags,
    _generate,
)


class Sampling(Settings):
    """The rule that chooses the next token.

    The order is: divide by the temperature, keep the top_k likeliest tokens (0: all), then keep the
    fewest of those whose probabilities reach top_p. `greedy` takes the likeliest token instead.
    """

    max_new_tokens: int = count("most tokens of a continuation", 64)
    greedy: bool = switch("take the likeliest token each time")
    temperature: float = setting(
        "below 1: sharper, above 1: flatter",
        1.0,
        above=0,
        why="use --greedy for the likeliest token",
    )
    top_k: int = setting("draw from the K likeliest tokens; 0: all", 0, least=0)
    top_p: float = setting(
        "draw from the likeliest tokens that together reach P",
        0.9,
        above=0,
        most=1,
        why="1 keeps every token",
    )


if __name__ == "__main__":
    sys.exit(main())
