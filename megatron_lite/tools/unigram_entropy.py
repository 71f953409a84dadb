"""Prints the entropy of a dataset's token ids:
`python -m megatron_lite.tools.unigram_entropy PREFIX`

The entropy is the loss, in nats per token, of a prediction by token frequency alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_lite.config.all_faults import Parser
from megatron_lite.data.entropy import unigram_entropy
from megatron_lite.tools.command import exit_status


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m megatron_lite.tools.unigram_entropy",
        allow_abbrev=False,
        description="Prints the entropy of the token ids of a dataset, in nats per token.",
    )
    parser.add_argument("prefix", help="path of a .bin and .idx pair without the ending")
    args = parser.parse_args(argv)
    return exit_status(lambda: print(f"{unigram_entropy(args.prefix):.6f}"), parser.prog)


if __name__ == "__main__":
    sys.exit(main())
