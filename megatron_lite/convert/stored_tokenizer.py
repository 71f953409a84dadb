"""The files of a source's tokenizer, checked against its model before they are copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_lite.config.checks import InputError
from megatron_lite.convert.weights import Described
from megatron_lite.data.tokenizer_files import TOKEN_IDS, config_of, contents_of
from megatron_lite.data.tokenizers import MissingPackage, build_tokenizer


def stored_tokenizer(described: Described) -> tuple[dict[str, bytes], int | None]:
    """Returns the tokenizer files of a source by name, without TOKEN_IDS, and the id that ends a
    document. The id is None if the tokenizer has none or its library is not installed.

    Raises InputError if a file is not what its name says, or if a word has no id of the model.
    """
    files = [path for path in described.tokenizer if path.name != TOKEN_IDS]
    contents = contents_of(((path.name, path) for path in files), described.true_vocab_size)
    return contents, _end(files, described.true_vocab_size) if files else None


def _end(files: list[Path], vocab_size: int) -> int | None:
    config = config_of(files, files[0].parent, vocab_size)
    if config.tokenizer_type == "NullTokenizer":
        return None
    try:
        tokenizer = build_tokenizer(config)
    except MissingPackage:
        return None
    if tokenizer.vocab_size > vocab_size:
        raise InputError(
            f"{files[0].parent}: the tokenizer has {tokenizer.vocab_size} ids and the model "
            f"{vocab_size}: they belong to different models"
        )
    try:
        return tokenizer.eod
    except InputError:
        return None


def json_bytes(values: Any) -> bytes:
    """Returns the text of a JSON file."""
    return (json.dumps(values, indent=2) + "\n").encode()
