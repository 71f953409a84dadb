"""A byte-level BPE tokenizer of one's own: `python -m megatron_lite.tools.train_tokenizer --input corpus.jsonl --output DIR`

Writes DIR/tokenizer.json for `--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR`. Every text can be encoded, since
all 256 bytes are tokens; id 0 is <|endoftext|>.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

from megatron_lite.config.checks import InputError
from megatron_lite.tools.command import exit_status
from megatron_lite.tools.jsonl import parse_line

END_OF_DOCUMENT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # the bytes and the end of a document


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m megatron_lite.tools.train_tokenizer", allow_abbrev=False,
                                     description="Trains a byte-level BPE tokenizer on the texts of a file of JSON lines.")
    parser.add_argument("--input", required=True, help="file with one JSON object per line")
    parser.add_argument("--json-key", default="text", help="key whose text is read (default: text)")
    parser.add_argument("--vocab-size", type=int, default=4096, help="number of tokens (default: 4096)")
    parser.add_argument("--output", required=True, help="folder for tokenizer.json")
    args = parser.parse_args(argv)
    return exit_status(lambda: train(args.input, args.json_key, args.vocab_size, args.output))


def train(source: str, key: str, vocab_size: int, output: str) -> None:
    """Writes output/tokenizer.json. InputError: a vocabulary below 257, no file, a bad line."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise InputError(f"--vocab-size must be at least {SMALLEST_VOCABULARY}: 256 bytes and {END_OF_DOCUMENT} "
                         f"(got {vocab_size})")
    if not os.path.isfile(source):
        raise InputError(f"--input {source}: no such file (one JSON object per line)")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    texts = list(_texts(source, key))  # read first: the library would swallow the error of a bad line
    tokenizer.train_from_iterator(texts, trainer)
    os.makedirs(output, exist_ok=True)
    path = os.path.join(output, "tokenizer.json")
    tmp = f"{path}.tmp-{os.getpid()}"
    tokenizer.save(tmp)
    os.replace(tmp, path)
    print(f"{path}: {tokenizer.get_vocab_size()} tokens", flush=True)


def _texts(source: str, key: str) -> Iterator[str]:
    with open(source, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield from parse_line(line, [key], f"{source}:{number}")


if __name__ == "__main__":
    sys.exit(main())
