"""The files of a source's tokenizer, checked against its model before they are copied."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from megatron_lite.config.checks import InputError
from megatron_lite.convert.weights import Described
from megatron_lite.data.tokenizer_files import TOKEN_IDS, config_of, contents_of
from megatron_lite.data.tokenizers import MissingPackage, build_tokenizer


class StoredTokenizer(NamedTuple):
    """contents: of the files, by name. end: the id that ends a document; None if it is not known,
    because the tokenizer has none or its library is not installed."""

    contents: dict[str, bytes]
    end: int | None


def stored_tokenizer(described: Described) -> StoredTokenizer:
    """Returns the tokenizer of a source, without TOKEN_IDS.

    Raises InputError if a file is not what its name says, or if a word has no id of the model.
    """
    files = [path for path in described.tokenizer if path.name != TOKEN_IDS]
    contents = contents_of(((path.name, path) for path in files), described.true_vocab_size)
    if not files:
        return StoredTokenizer({}, None)
    config = config_of(files, files[0].parent, described.true_vocab_size)
    if config.tokenizer_type == "NullTokenizer":
        return StoredTokenizer(contents, None)
    try:
        tokenizer = build_tokenizer(config)
    except MissingPackage:
        return StoredTokenizer(contents, None)
    if tokenizer.vocab_size > described.true_vocab_size:
        raise InputError(
            f"{files[0].parent}: the tokenizer has {tokenizer.vocab_size} ids and the model "
            f"{described.true_vocab_size}: they belong to different models"
        )
    try:
        return StoredTokenizer(contents, tokenizer.eod)
    except InputError:
        return StoredTokenizer(contents, None)


def json_bytes(values: Any) -> bytes:
    """Returns the text of a JSON file."""
    return (json.dumps(values, indent=2) + "\n").encode()
