"""TikTokenizer: byte-pair encoding from a JSON list of tokens, as Megatron reads it.

    ids 0 .. N-1      special tokens: the named ones, then <SPECIAL_7>, <SPECIAL_8> ..
    ids N .. V-1      the tokens of the file, in its order, of which the first 256 are the bytes

N is --tiktoken-num-special-tokens and V is --vocab-size. The package tiktoken is optional:
`pip install -e '.[tokenizers]'`.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from typing import Any

from megatron_lite.config import plain
from megatron_lite.config.checks import InputError
from megatron_lite.config.input_file import read_input
from megatron_lite.config.invocation import install_advice
from megatron_lite.data.tokenizer_files import MOST_BYTES
from megatron_lite.data.tokenizers import MissingPackage, check_encodes, require_files

USUAL_VOCABULARY = 2**17
# The tokens that every vocabulary has, in this order unless --tokenizer-special-tokens names them.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
WORD = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# How a text is split before its pieces are encoded: --tiktoken-pattern.
PATTERNS = {
    "v1": WORD + r"+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": f"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class TikTokenizer:
    """A tokenizer of the tiktoken library.

    Where a text has the characters of a special token, they become that token.
    path: a JSON list of objects with rank, token_bytes (base64) and token_str, or its folder.
    vocab_size: V; None: 131072. num_special_tokens: N. special_tokens: the names of the first of
    them; an empty tuple: SPECIAL_TOKENS.
    Raises InputError if the package is missing, or if the file or the numbers do not fit.
    """

    def __init__(
        self,
        path: str,
        *,
        pattern: str | None,
        vocab_size: int | None,
        num_special_tokens: int,
        special_tokens: Sequence[str] = (),
    ) -> None:
        file = os.path.join(path, "tiktoken.json") if os.path.isdir(path) else path
        require_files("--tokenizer-model", file)
        self.vocab_size = vocab_size or USUAL_VOCABULARY
        named = tuple(special_tokens) or SPECIAL_TOKENS
        if not len(named) <= num_special_tokens < self.vocab_size:
            raise InputError(
                f"--tiktoken-num-special-tokens {num_special_tokens} must be at least the "
                f"{len(named)} named special tokens and below --vocab-size {self.vocab_size}"
            )
        self.eod = named.index("</s>")
        names = (*named, *(f"<SPECIAL_{i}>" for i in range(len(named), num_special_tokens)))
        if len(set(names)) < len(names):
            raise InputError("--tokenizer-special-tokens: two special tokens have one name")
        ranks = _ranks(file, self.vocab_size - num_special_tokens, first=num_special_tokens)
        try:
            import tiktoken
        except ImportError:
            raise MissingPackage(
                f"this tokenizer needs the tiktoken package: {install_advice('tokenizers')}"
            ) from None
        self._encoding: Any = tiktoken.Encoding(
            name=os.path.basename(file),
            pat_str=PATTERNS[pattern or "v2"],
            mergeable_ranks=ranks,
            special_tokens={name: number for number, name in enumerate(names)},
        )

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of the text. Raises InputError for text that UTF-8 cannot encode."""
        check_encodes(text)
        return list(self._encoding.encode(text, allowed_special="all"))

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode([int(number) for number in ids]))


def _ranks(file: str, count: int, *, first: int) -> dict[bytes, int]:
    """Returns the ids of the first `count` tokens of a file; the first one has the id `first`."""
    try:
        entries = plain.as_list(json.loads(read_input(file, MOST_BYTES)), "the text")
        if len(entries) < count:
            raise ValueError(
                f"{len(entries)} tokens, but --vocab-size and --tiktoken-num-special-tokens leave "
                f"room for {count}: give --vocab-size {len(entries) + first} or less"
            )
        ranks: dict[bytes, int] = {}
        for number, entry in enumerate(entries[:count]):
            ranks[_token(entry, number)] = first + number
        if len(ranks) < count:
            raise ValueError("a token is listed twice")
        return ranks
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: no list of tokens for TikTokenizer ({error})") from error


def _token(entry: object, number: int) -> bytes:
    where = f"entry {number}"
    values = plain.as_object(entry, where)
    if values.keys() != {"rank", "token_bytes", "token_str"}:
        raise ValueError(f"{where} must have the fields rank, token_bytes and token_str")
    plain.as_whole(values["rank"], f"the rank of {where}", number, number)
    if not isinstance(values["token_bytes"], str):
        raise ValueError(f"the token_bytes of {where} must be base64")
    token = base64.b64decode(values["token_bytes"], validate=True)
    if number < 256 and token != bytes([number]):
        raise ValueError(f"{where} must be the byte {number}")
    return token
