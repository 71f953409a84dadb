"""Prints the entropy of a dataset's token ids:
`python -m megatron_lite.tools.unigram_entropy PREFIX`

The entropy is the loss, in nats per token, of a prediction by token frequency alone. A model that
has learned more than frequencies has a lower loss.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from megatron_lite.config.checks import InputError
from megatron_lite.config.parser import Parser
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.tools.command import exit_status

BLOCK = 1 << 22


def unigram_entropy(prefix: str) -> float:
    """Returns the entropy of the token ids of a dataset, in nats per token.

    It equals the loss of the best unigram model of the dataset. Raises InputError if the dataset
    holds no tokens.
    """
    tokens = IndexedDataset(prefix).tokens
    if not len(tokens):
        raise InputError(f"{prefix}.bin holds no tokens")
    blocks = range(0, len(tokens), BLOCK)
    largest = max(int(tokens[start : start + BLOCK].max()) for start in blocks)
    counts = np.zeros(largest + 1, dtype=np.int64)
    for start in blocks:
        counts += np.bincount(tokens[start : start + BLOCK], minlength=largest + 1)
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log(shares)).sum())


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m megatron_lite.tools.unigram_entropy",
        description="Prints the entropy of the token ids of a dataset, in nats per token.",
    )
    parser.add_argument("prefix", help="path of a .bin and .idx pair without the ending")
    args = parser.parse_args(argv)
    return exit_status(lambda: print(f"{unigram_entropy(args.prefix):.6f}"), parser.prog)


if __name__ == "__main__":
    sys.exit(main())
