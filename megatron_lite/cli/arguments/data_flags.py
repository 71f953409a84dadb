"""The flags of DataConfig and TokenizerConfig."""

from __future__ import annotations

import argparse

from megatron_lite.cli.arguments.flag_group import FlagGroup
from megatron_lite.config.data_settings import (
    DATALOADER_TYPES,
    TIKTOKEN_PATTERNS,
    TOKENIZER_TYPES,
    DataConfig,
    TokenizerConfig,
)


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    group = FlagGroup(parser, "data", DataConfig)
    group.value("--seq-length", int, "tokens of a sample")
    group.value(
        "--data-path",
        str,
        "prefix of PREFIX.bin and PREFIX.idx; several, or weight and prefix in turn, are blended",
        nargs="*",
    )
    group.switch("--mock-data", "made-up token ids instead of a dataset")
    group.value("--split", str, "shares of the documents for training, validation and test")
    group.switch("--eod-mask-loss", "leave tokens that end a document out of the loss")
    group.switch(
        "--reset-position-ids", "let learned positions begin at 0 after the end of a document"
    )
    group.switch("--reset-attention-mask", "let no token read an earlier document")
    group.value("--data-cache-path", str, "directory of the sample and blend indices")
    group.value(
        "--data-args-path", str, "file with the words of --data-path, for lists that are too long"
    )
    for split in ("train", "valid", "test"):
        group.value(
            f"--{split}-data-path",
            str,
            f"the same as --data-path for the {split} split alone, without --split",
            nargs="*",
        )
    group.value(
        "--per-split-data-args-path",
        str,
        'JSON file {"train": [..], "valid": [..], "test": [..]} with the words of these three',
    )
    group.value(
        "--dataloader-type",
        str,
        "order of the samples: in the order of the index, or (cyclic) shuffled anew in each pass",
        values=DATALOADER_TYPES,
    )
    group.off_switch(
        "--no-data-sharding",
        "data_sharding",
        "with --dataloader-type cyclic, shuffle all samples together instead of a range for each "
        "data-parallel rank",
    )


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    group = FlagGroup(parser, "tokenizer", TokenizerConfig)
    group.value(
        "--tokenizer-type",
        str,
        "derived: GPT2BPETokenizer with --vocab-file and --merge-file, else NullTokenizer",
        values=TOKENIZER_TYPES,
    )
    group.value(
        "--tokenizer-model",
        str,
        "tokenizer.json or its directory, for HuggingFaceTokenizer; a SentencePiece model, for "
        "Llama2Tokenizer and the like; a JSON list of tokens, for TikTokenizer",
    )
    group.value("--vocab-file", str, "vocab.json, for GPT2BPETokenizer")
    group.value("--merge-file", str, "merges.txt, for GPT2BPETokenizer")
    group.value(
        "--tiktoken-pattern",
        str,
        "how TikTokenizer splits a text (v2 if omitted)",
        values=TIKTOKEN_PATTERNS,
    )
    group.value("--tiktoken-num-special-tokens", int, "special tokens of TikTokenizer")
    group.value(
        "--tokenizer-special-tokens",
        str,
        "names of its first special tokens, if they are not the usual ones",
        nargs="+",
    )
    group.value("--vocab-size", int, "token ids before padding; derived from the tokenizer's files")
    group.value(
        "--make-vocab-size-divisible-by",
        int,
        "each rank's rows of the embedding are padded to a multiple of it",
    )
