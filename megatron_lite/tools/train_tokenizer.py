"""Trains a byte-level BPE tokenizer:
`python -m megatron_lite.tools.train_tokenizer --input corpus.jsonl --output DIR`

The tool writes DIR/tokenizer.json, for `--tokenizer-type HuggingFaceTokenizer --tokenizer-model
DIR`. The tokenizer can encode every text, since all 256 bytes are tokens. Id 0 is <|endoftext|>.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megatron_lite.config.checks import InputError
from megatron_lite.config.run_flags import Parser
from megatron_lite.data.durable_files import replacing
from megatron_lite.parallel.messages import told_on_terminal
from megatron_lite.tools.command import exit_status
from megatron_lite.tools.preprocess_data import add_input_flags, lines_of, parse_line

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m megatron_lite.tools.train_tokenizer",
        description="Trains a byte-level BPE tokenizer on the texts of a file of JSON lines.",
    )
    add_input_flags(parser)
    size = "number of tokens (default: 4096)"
    parser.add_argument("--vocab-size", type=int, default=4096, help=size)
    parser.add_argument("--output", required=True, help="folder for tokenizer.json")
    args = parser.parse_args(argv)
    return exit_status(lambda: train(args), parser.prog)


def train(args: argparse.Namespace) -> None:
    """Writes tokenizer.json into the folder --output, trained on the texts of --input.

    Raises InputError for a vocabulary below 257, a missing file or a bad line.
    """
    if args.vocab_size < SMALLEST_VOCABULARY:
        raise InputError(
            f"--vocab-size must be at least {SMALLEST_VOCABULARY}, the 256 bytes and the end of a "
            f"document (got {args.vocab_size})"
        )
    if args.max_line_bytes < 1:
        raise InputError(f"--max-line-bytes must be at least 1 (got {args.max_line_bytes})")
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    # All texts are read first, because the library would swallow the error of a bad line.
    texts = [
        text
        for line in lines_of(args.input, args.max_line_bytes)
        for text in parse_line(line.content, args.json_keys, f"{args.input}:{line.number}")
    ]
    if not any(texts):
        raise InputError(f"--input {args.input}: no text in it")
    with told_on_terminal(f"merging tokens of {len(texts)} texts, up to {args.vocab_size}"):
        tokenizer.train_from_iterator(
            texts, args.vocab_size, 0, show_progress=False, special_tokens=[END_OF_DOCUMENT]
        )
    os.makedirs(args.output, exist_ok=True)
    path = os.path.join(args.output, "tokenizer.json")
    with replacing(path) as tmp:
        tokenizer.save(tmp)
    print(f"{path}: {tokenizer.get_vocab_size()} tokens", flush=True)


if __name__ == "__main__":
    sys.exit(main())
