"""Trains a byte-level BPE tokenizer:
`python -m megatron_lite.tools.train_tokenizer --input corpus.jsonl --output DIR`

The tool writes DIR/tokenizer.json, for `--tokenizer-type HuggingFaceTokenizer --tokenizer-model
DIR`. The tokenizer can encode every text, since all 256 bytes are tokens. Id 0 is <|endoftext|>.
"""

import os
import sys

from megatron_lite.config.checks import InputError
from megatron_lite.config.run_flags import add_settings, taken
from megatron_lite.config.setting import required, setting
from megatron_lite.data.durable_files import replacing
from megatron_lite.parallel.messages import told_on_terminal

from .command import tool
from .preprocess_data import InputSettings, lines_of, parse_line

END_OF_DOCUMENT = "<|endoftext|>"


main = tool(
    "python -m megatron_lite.tools.train_tokenizer",
    "Trains a byte-level BPE tokenizer on the texts of a file of JSON lines.",
    lambda parser: add_settings(parser, TokenizerSettings),
    lambda args: train(taken(TokenizerSettings, args)),
)


class TokenizerSettings(InputSettings):
    """What is trained."""

    vocab_size: int = setting(
        "number of tokens", 4096, least=257, why="the 256 bytes and the end of a document"
    )
    output: str = required("folder for tokenizer.json")


def train(args: TokenizerSettings) -> None:
    """Writes tokenizer.json into the folder --output, trained on the texts of --input.

    Raises InputError for a missing file or a bad line.
    """
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    # All texts are read first, because the library would swallow the error of a bad line.
    texts = [
        text
        for number, line in lines_of(args.input, args.max_line_bytes)
        for text in parse_line(line, args.json_keys, f"{args.input}:{number}")
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
