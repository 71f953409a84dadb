"""Trains a byte-level BPE tokenizer:
`python -m megatron_lite.tools.train_tokenizer --input corpus.jsonl --output DIR`

The tool writes DIR/tokenizer.json, for `--tokenizer-type HuggingFaceTokenizer --tokenizer-model
DIR`. The tokenizer can encode every text, since all 256 bytes are tokens. Id 0 is <|endoftext|>.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_lite.config.checks import InputError
from megatron_lite.config.parser import Parser
from megatron_lite.data.durable_files import replacing
from megatron_lite.parallel.messages import told_on_terminal
from megatron_lite.tools.command import exit_status
from megatron_lite.tools.jsonl import MAX_LINE_BYTES, add_max_line_bytes, lines_of, parse_line

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # the bytes and the end of a document


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m megatron_lite.tools.train_tokenizer",
        allow_abbrev=False,
        description="Trains a byte-level BPE tokenizer on the texts of a file of JSON lines.",
    )
    parser.add_argument("--input", required=True, help="file with one JSON object per line")
    parser.add_argument(
        "--json-keys",
        "--json-key",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys whose texts are read (default: text)",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=4096, help="number of tokens (default: 4096)"
    )
    parser.add_argument("--output", required=True, help="folder for tokenizer.json")
    add_max_line_bytes(parser)
    args = parser.parse_args(argv)
    return exit_status(
        lambda: train(
            args.input, args.json_keys, args.vocab_size, args.output, args.max_line_bytes
        ),
        parser.prog,
    )


def train(
    source: str,
    keys: Sequence[str],
    vocab_size: int,
    output: str,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> None:
    """Writes output/tokenizer.json, trained on the texts under `keys` of the file `source`.

    Raises InputError for a vocabulary below 257, a missing file or a bad line.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(
            f"--vocab-size must be at least {SMALLEST_VOCABULARY}: 256 bytes and {END_OF_DOCUMENT} "
            f"(got {vocab_size})"
        )
    if max_line_bytes < 1:
        raise InputError(f"--max-line-bytes must be at least 1 (got {max_line_bytes})")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    # All texts are read first, because the library would swallow the error of a bad line.
    texts = [
        text
        for line in lines_of(source, max_line_bytes)
        for text in parse_line(line.content, keys, f"{source}:{line.number}")
    ]
    with told_on_terminal(f"merging tokens of {len(texts)} texts, up to {vocab_size}"):
        tokenizer.train_from_iterator(texts, trainer)
    os.makedirs(output, exist_ok=True)
    path = os.path.join(output, "tokenizer.json")
    with replacing(path) as tmp, open(tmp, "w", encoding="utf-8") as file:
        file.write(tokenizer.to_str(pretty=True))
    print(f"{path}: {tokenizer.get_vocab_size()} tokens", flush=True)


if __name__ == "__main__":
    sys.exit(main())
