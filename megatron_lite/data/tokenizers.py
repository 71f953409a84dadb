"""Turns text into token ids and back, with tokenizers that have Megatron's names.

    NullTokenizer          text that is token ids already, with spaces between them
    HuggingFaceTokenizer   a tokenizer.json, or its folder, as `save_pretrained` writes it
    GPT2BPETokenizer       GPT-2's vocab.json and merges.txt
    Llama2Tokenizer        a SentencePiece model (sentencepiece_tokenizer.py)
    TikTokenizer           a JSON list of tokens (tiktoken_tokenizer.py)

All files are local; nothing is ever downloaded. All but the first use a library: `tokenizers`,
`sentencepiece` or `tiktoken`. It is imported only when it is needed, so that a run on prepared data
works without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron_lite.config.checks import InputError, chosen
from megatron_lite.config.data_settings import SENTENCEPIECE_TYPES, TokenizerConfig
from megatron_lite.config.input_file import read_input
from megatron_lite.data.tokenizer_files import LARGEST_ID, MOST_BYTES, contents_of, merges_of

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = ("<|endoftext|>", "</s>")


class MissingPackage(InputError):
    """The library of a tokenizer is not installed."""


class Tokenizer(Protocol):
    """A tokenizer: text to token ids and back.

    vocab_size: 1 + the largest id.
    eod: the id that ends a document. Raises InputError if the tokenizer has none.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int: ...

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Returns the tokenizer that the flags name.

    Raises InputError if its files are missing or cannot be read.
    """
    assert config.tokenizer_type is not None
    return chosen("--tokenizer-type", config.tokenizer_type, TOKENIZERS)(config)


def _sentencepiece(config: TokenizerConfig) -> Tokenizer:
    from megatron_lite.data.sentencepiece_tokenizer import SentencePieceTokenizer

    return SentencePieceTokenizer(str(config.tokenizer_model))


def _tiktoken(config: TokenizerConfig) -> Tokenizer:
    from megatron_lite.data.tiktoken_tokenizer import TikTokenizer

    return TikTokenizer(
        str(config.tokenizer_model),
        pattern=config.tiktoken_pattern,
        vocab_size=config.vocab_size,
        num_special_tokens=config.tiktoken_num_special_tokens,
        special_tokens=config.tokenizer_special_tokens,
    )


# The config has checked that the fields which a type needs are given.
TOKENIZERS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "HuggingFaceTokenizer": lambda config: HuggingFaceTokenizer(str(config.tokenizer_model)),
    "GPT2BPETokenizer": lambda config: GPT2BPETokenizer(
        str(config.vocab_file), str(config.merge_file)
    ),
    "NullTokenizer": lambda config: NullTokenizer(config.vocab_size or 0),
    **dict.fromkeys(SENTENCEPIECE_TYPES, _sentencepiece),
    "TikTokenizer": _tiktoken,
}


def resolve_vocabulary(config: TokenizerConfig) -> TokenizerConfig:
    """Returns the config with its `vocab_size` filled in.

    A config of the NullTokenizer is returned unchanged.
    Raises InputError if the given size cannot hold every id of the tokenizer.
    """
    size = build_tokenizer(config).vocab_size
    if config.tokenizer_type == "NullTokenizer":
        return config
    if config.vocab_size is not None and config.vocab_size < size:
        raise InputError(
            f"--vocab-size {config.vocab_size} is smaller than the {size} ids of --tokenizer-type "
            f"{config.tokenizer_type}: leave --vocab-size out, or give at least {size}"
        )
    return replace(config, vocab_size=config.vocab_size or size)


def check_encodes(text: str) -> None:
    """Raises InputError if the text contains half of a surrogate pair.

    JSON can spell one, and a byte that is not UTF-8 arrives from a shell as one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {error.start + 1} of the text is {text[error.start]!a}, which is no "
            "Unicode character: correct the text, it must be UTF-8"
        ) from None


class NullTokenizer:
    """A tokenizer of texts that consist of ids.

    The ids of a text must be below the `vocab_size` that the constructor takes. The end of a
    document is one more id: that `vocab_size`.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size > LARGEST_ID:
            raise InputError(
                f"--vocab-size {vocab_size} is more ids than a dataset can hold: give at most "
                f"{LARGEST_ID}"
            )
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of the text. Raises InputError for a word that is not a valid id."""
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise InputError(
                f"--tokenizer-type NullTokenizer takes token ids with spaces between them: {error}"
            ) from None
        outside = [token for token in ids if not 0 <= token < self.eod]
        if outside:
            raise InputError(
                f"token id {outside[0]} is not in [0, {self.eod}): give a larger --vocab-size"
            )
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids)


class _LibraryTokenizer:
    """A tokenizer of the `tokenizers` library.

    A subclass decides from which files it comes and which token ends a document.
    """

    def __init__(
        self, source: str, tokenizer: tokenizers.Tokenizer, end_of_document: Sequence[str]
    ) -> None:
        if tokenizer.get_vocab_size(with_added_tokens=True) == 0:
            raise InputError(f"{source}: a vocabulary without tokens")
        # A tokenizer.json can ask for truncation and padding. Both would change documents silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._source, self._tokenizer, self._end_of_document = source, tokenizer, end_of_document

    @property
    def vocab_size(self) -> int:
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def eod(self) -> int:
        for token in self._end_of_document:
            number = self._tokenizer.token_to_id(token)
            if number is not None:
                return int(number)
        raise InputError(
            f"{self._source} has no end-of-document token (looked for "
            f"{', '.join(self._end_of_document)}): name one as eos_token in a "
            "tokenizer_config.json beside it"
        )

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of the text.

        They include what the tokenizer's own post-processor adds; some tokenizers begin a text with
        a special token. Raises InputError for text that UTF-8 cannot encode.
        """
        check_encodes(text)
        return list(self._tokenizer.encode(text).ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


class HuggingFaceTokenizer(_LibraryTokenizer):
    """A tokenizer from a tokenizer.json or from its folder.

    A document ends with the eos_token of tokenizer_config.json. If the vocabulary has no such
    token, it ends with <|endoftext|> or </s>.
    """

    def __init__(self, path: str) -> None:
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        require_files("--tokenizer-model", file)

        content = contents_of([("tokenizer.json", Path(file))])["tokenizer.json"]

        def load() -> tokenizers.Tokenizer:
            from tokenizers import Tokenizer

            return Tokenizer.from_buffer(content)

        config = os.path.join(os.path.dirname(file), "tokenizer_config.json")
        named = _eos_token(config) if os.path.lexists(config) else None
        super().__init__(
            file, _load(file, load), (named, *END_OF_DOCUMENT) if named else END_OF_DOCUMENT
        )


class GPT2BPETokenizer(_LibraryTokenizer):
    """A byte-level BPE tokenizer from GPT-2's two files.

    A document ends with <|endoftext|>. In a text, these characters are ordinary characters.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        require_files("--vocab-file", vocab_file)
        require_files("--merge-file", merge_file)
        contents = contents_of([("vocab.json", Path(vocab_file)), ("merges.txt", Path(merge_file))])

        def load() -> tokenizers.Tokenizer:
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers

            vocabulary = json.loads(contents["vocab.json"])
            merges = merges_of(contents["merges.txt"].decode("utf-8-sig"))
            tokenizer = Tokenizer(models.BPE(vocabulary, merges))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            return tokenizer

        super().__init__(
            vocab_file, _load(f"{vocab_file} and {merge_file}", load), END_OF_DOCUMENT[:1]
        )


def require_files(flag: str, path: str) -> None:
    """Raises InputError if nothing has this path."""
    if not os.path.exists(path):
        raise InputError(
            f"{flag} {path}: no such file (tokenizers are read from local files, never downloaded)"
        )


def _load(source: str, load: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    try:
        return load()
    except ImportError:
        raise MissingPackage(
            "this tokenizer needs the tokenizers package: pip install tokenizers"
        ) from None
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"{source}: not a tokenizer that can be read ({error})") from error


def _eos_token(path: str) -> str | None:
    content = read_input(path, MOST_BYTES)
    try:
        token = json.loads(content).get("eos_token")
        name = token.get("content") if isinstance(token, dict) else token
        if isinstance(name, str):
            check_encodes(name)
    except (ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: not a JSON object of UTF-8 text ({error})") from error
    if name is not None and not isinstance(name, str):
        raise InputError(
            f"{path}: eos_token must be a string, or an object with a string under content "
            f"(found {token!r})"
        )
    return name
