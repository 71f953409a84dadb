"""Continues a text: `python -m megatron_lite.tools.generate --load DIR --prompt TEXT`.

The model and the tokenizer are those of the checkpoint. The tensor-parallel size is the number of
ranks that were started (torchrun --nproc_per_node N), at any parallel size of the checkpoint. The
tool has no key-value cache: each new token runs the model over the whole context again. The context
is the last --seq-length tokens, the length that the model saw in training. A longer text loses its
oldest tokens, and positions count from the first token that is left.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_lite.config.checks import require_at_least
from megatron_lite.config.parallel import DISTRIBUTED_BACKENDS
from megatron_lite.config.parser import Parser
from megatron_lite.tools.command import exit_status, rank_0_speaks

if TYPE_CHECKING:
    from megatron_lite.tools.sampling import Sampling

PROGRAM = "python -m megatron_lite.tools.generate"


def parse(
    argv: Sequence[str] | None, program: str = PROGRAM
) -> tuple[argparse.Namespace, Sampling]:
    """Returns the flags and the sampling that they ask for.

    Ends the process with status 2 if they break a rule.
    """
    parser = Parser(
        prog=program,
        allow_abbrev=False,
        description="Continues texts with the model of a checkpoint, on as many tensor-parallel "
        "ranks as are started.",
    )
    parser.add_argument(
        "--load", required=True, metavar="DIR", help="checkpoint directory, the --save of a run"
    )
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="which checkpoint in it; default: the latest"
    )
    parser.add_argument(
        "--prompt",
        required=True,
        action="append",
        metavar="TEXT",
        help="text to continue; may be given several times; - reads standard input",
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--greedy", action="store_true", help="take the likeliest token each time")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="below 1: sharper, above 1: flatter; default: 1.0",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="draw from the K likeliest tokens; default: 0, all"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the likeliest tokens that together reach P; default: 0.9",
    )
    parser.add_argument("--seed", type=int, default=1234, help="default: 1234")
    for file in ("tokenizer-model", "vocab-file", "merge-file"):
        parser.add_argument(
            f"--{file}",
            metavar="PATH",
            help="another file of the tokenizer than the one in the checkpoint",
        )
    parser.add_argument(
        "--distributed-backend",
        choices=DISTRIBUTED_BACKENDS,
        default="auto",
        help="gloo keeps to the CPU",
    )
    args = parser.parse_args(argv)
    # Imported late: the module imports torch, which --help does not need.
    from megatron_lite.tools.sampling import Sampling

    given = {
        name: getattr(args, name)
        for name in ("temperature", "top_k", "top_p")
        if getattr(args, name) is not None
    }
    if args.greedy and given:
        parser.error(
            "--greedy takes the likeliest token: leave out --temperature, --top-k and --top-p"
        )
    if args.prompt.count("-") > 1:
        parser.error("--prompt - is given twice, but standard input can be read once")
    try:
        require_at_least(args, 1, "max_new_tokens")
        return args, Sampling(greedy=args.greedy, **given)
    except ValueError as error:
        parser.error(str(error))


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Runs the command line. Returns the exit status."""
    with rank_0_speaks():
        args, sampling = parse(argv, program)
    from megatron_lite.tools.generation import run

    return exit_status(lambda: run(args, sampling, program), program)


if __name__ == "__main__":
    sys.exit(main())
