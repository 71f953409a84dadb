"""Turns text into token ids and back, with tokenizers that have Megatron's names.

    NullTokenizer          text that is token ids already, with spaces between them
    HuggingFaceTokenizer   a tokenizer.json, or its folder, as `save_pretrained` writes it
    GPT2BPETokenizer       GPT-2's vocab.json and merges.txt
    Llama2Tokenizer        a SentencePiece model; Megatron has two more names for it
    TikTokenizer           a JSON list of tokens

All files are local; nothing is ever downloaded. All but the first use a library: `tokenizers`,
`sentencepiece` or `tiktoken`. It is imported only when it is needed, so that a run on prepared data
works without it.
"""

from __future__ import annotations

import base64
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from megatron_lite.config import plain
from megatron_lite.config.checks import InputError, chosen
from megatron_lite.config.data_settings import SENTENCEPIECE_TYPES, TokenizerConfig
from megatron_lite.config.input_file import read_input
from megatron_lite.config.invocation import install_advice
from megatron_lite.config.plain import parse_json
from megatron_lite.data.tokenizer_files import LARGEST_ID, MOST_BYTES, contents_of, merges_of

END_OF_DOCUMENT = ("<|endoftext|>", "</s>")
USUAL_VOCABULARY = 2**17  # of tiktoken
# The tokens that every vocabulary of tiktoken has, in this order unless
# --tokenizer-special-tokens names them.
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
WORD = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# How a text is split before its pieces are encoded: --tiktoken-pattern.
PATTERNS = {
    "v1": WORD + r"+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": f"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class MissingPackage(InputError):
    """The library of a tokenizer is not installed."""


class Tokenizer(Protocol):
    """A tokenizer: text to token ids and back.

    vocab_size: 1 + the largest id.
    eod: the id that ends a document. Raises InputError if the tokenizer has none.
    tokenize: raises InputError for text that UTF-8 cannot encode.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int: ...

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Returns the tokenizer that the flags name.

    Raises InputError if its files are missing or cannot be read, or its library is missing.
    """
    # The config has checked that the fields which a type needs are given.
    return chosen("--tokenizer-type", str(config.tokenizer_type), TOKENIZERS)(config)


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
        for token in ids:
            if not 0 <= token < self.eod:
                raise InputError(
                    f"token id {token} is not in [0, {self.eod}): give a larger --vocab-size"
                )
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class _LibraryTokenizer:
    """A tokenizer of the `tokenizers` library. The first token of `ends` that it has ends a
    document.

    A text's ids include what the tokenizer's own post-processor adds; some tokenizers begin a text
    with a special token.
    """

    def __init__(self, source: str, tokenizer: Any, ends: Sequence[str]) -> None:
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise InputError(f"{source}: a vocabulary without tokens")
        # A tokenizer.json can ask for truncation and padding. Both would change documents silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._source, self._tokenizer, self._ends = source, tokenizer, ends
        self.vocab_size = 1 + max(ids)

    @property
    def eod(self) -> int:
        for token in self._ends:
            number = self._tokenizer.token_to_id(token)
            if number is not None:
                return int(number)
        raise InputError(
            f"{self._source} has no end-of-document token (looked for {', '.join(self._ends)}): "
            "name one as eos_token in a tokenizer_config.json beside it"
        )

    def tokenize(self, text: str) -> list[int]:
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
        file = _file_of("--tokenizer-model", path, "tokenizer.json")
        library = _imported("tokenizers")
        content = contents_of([("tokenizer.json", Path(file))])["tokenizer.json"]
        try:
            tokenizer = library.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises nothing more specific
            raise _unreadable(file, error) from error
        config = os.path.join(os.path.dirname(file), "tokenizer_config.json")
        named = _eos_token(config) if os.path.lexists(config) else None
        super().__init__(file, tokenizer, (named, *END_OF_DOCUMENT) if named else END_OF_DOCUMENT)


class GPT2BPETokenizer(_LibraryTokenizer):
    """A byte-level BPE tokenizer from GPT-2's two files.

    A document ends with <|endoftext|>. In a text, these characters are ordinary characters.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        vocab_file = _file_of("--vocab-file", vocab_file, "vocab.json")
        merge_file = _file_of("--merge-file", merge_file, "merges.txt")
        library = _imported("tokenizers")
        contents = contents_of([("vocab.json", Path(vocab_file)), ("merges.txt", Path(merge_file))])
        merges = merges_of(contents["merges.txt"].decode("utf-8-sig"))
        try:
            model = library.models.BPE(parse_json(contents["vocab.json"], longest=None), merges)
        except Exception as error:  # the library raises nothing more specific
            raise _unreadable(f"{vocab_file} and {merge_file}", error) from error
        tokenizer = library.Tokenizer(model)
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        super().__init__(vocab_file, tokenizer, END_OF_DOCUMENT[:1])


class SentencePieceTokenizer:
    """A tokenizer from a SentencePiece model, such as Llama 2's tokenizer.model, or its folder.

    Its ids are the model's own, without a token for the start of a text. A document ends with the
    model's end-of-sentence token.
    """

    def __init__(self, path: str) -> None:
        self._source = _file_of("--tokenizer-model", path, "tokenizer.model")
        library = _imported("sentencepiece")
        content = contents_of([("tokenizer.model", Path(self._source))])["tokenizer.model"]
        try:
            # The processor would take any folder or longer text for a path as well.
            self._processor: Any = library.SentencePieceProcessor(model_proto=content)
            self.vocab_size = int(self._processor.get_piece_size())
        except Exception as error:  # the library raises nothing more specific
            raise _unreadable(self._source, error) from error
        if self.vocab_size == 0:
            raise InputError(f"{self._source}: a vocabulary without tokens")

    @property
    def eod(self) -> int:
        number = int(self._processor.eos_id())
        if number < 0:
            raise InputError(
                f"{self._source} has no end-of-sentence token, which ends a document: train it "
                "with an eos_id"
            )
        return number

    def tokenize(self, text: str) -> list[int]:
        check_encodes(text)
        return [int(number) for number in self._processor.encode_as_ids(text)]

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode_ids([int(number) for number in ids]))


class TikTokenizer:
    """A tokenizer of the tiktoken library, from a JSON list of tokens, as Megatron reads it.

        ids 0 .. N-1      special tokens: the named ones, then <SPECIAL_7>, <SPECIAL_8> ..
        ids N .. V-1      the tokens of the file, in its order, of which the first 256 are the bytes

    N is --tiktoken-num-special-tokens and V is --vocab-size. Where a text has the characters of a
    special token, they become that token.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        file = _file_of("--tokenizer-model", str(config.tokenizer_model), "tiktoken.json")
        self.vocab_size = config.vocab_size or USUAL_VOCABULARY
        named = config.tokenizer_special_tokens or SPECIAL_TOKENS
        count = config.tiktoken_num_special_tokens
        if not len(named) <= count < self.vocab_size:
            raise InputError(
                f"--tiktoken-num-special-tokens {count} must be at least the {len(named)} named "
                f"special tokens and below --vocab-size {self.vocab_size}"
            )
        self.eod = named.index("</s>")
        names = (*named, *(f"<SPECIAL_{i}>" for i in range(len(named), count)))
        if len(set(names)) < len(names):
            raise InputError("--tokenizer-special-tokens: two special tokens have one name")
        try:
            ranks = _ranks(read_input(file, MOST_BYTES), self.vocab_size - count, first=count)
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{file}: no list of tokens for TikTokenizer ({error})") from error
        self._encoding: Any = _imported("tiktoken").Encoding(
            name=os.path.basename(file),
            pat_str=PATTERNS[config.tiktoken_pattern or "v2"],
            mergeable_ranks=ranks,
            special_tokens={name: number for number, name in enumerate(names)},
        )

    def tokenize(self, text: str) -> list[int]:
        check_encodes(text)
        return list(self._encoding.encode(text, allowed_special="all"))

    def detokenize(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode([int(number) for number in ids]))


TOKENIZERS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "HuggingFaceTokenizer": lambda config: HuggingFaceTokenizer(str(config.tokenizer_model)),
    "GPT2BPETokenizer": lambda config: GPT2BPETokenizer(
        str(config.vocab_file), str(config.merge_file)
    ),
    "NullTokenizer": lambda config: NullTokenizer(config.vocab_size or 0),
    **dict.fromkeys(
        SENTENCEPIECE_TYPES, lambda config: SentencePieceTokenizer(str(config.tokenizer_model))
    ),
    "TikTokenizer": TikTokenizer,
}


def _file_of(flag: str, path: str, name: str) -> str:
    """Returns the path of a file, which may be given as its folder."""
    file = os.path.join(path, name) if os.path.isdir(path) else path
    if not os.path.exists(file):
        raise InputError(
            f"{flag} {file}: no such file (tokenizers are read from local files, never downloaded)"
        )
    return file


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingPackage(
            f"this tokenizer needs the {name} package: {install_advice('tokenizers')}"
        ) from None


def _unreadable(source: str, error: Exception) -> InputError:
    return InputError(f"{source}: not a tokenizer that can be read ({error})")


def _eos_token(path: str) -> str | None:
    try:
        token = plain.parse_object(read_input(path, MOST_BYTES)).get("eos_token")
        name = token.get("content") if isinstance(token, dict) else token
        if name is not None and not isinstance(name, str):
            raise ValueError(f"eos_token must be a text (got {plain.quoted(name)})")
        check_encodes(name or "")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {error}") from error
    return name


def _ranks(content: bytes, count: int, *, first: int) -> dict[bytes, int]:
    """Returns the ids of the first `count` tokens of a file; the first one has the id `first`."""
    entries = plain.as_list(parse_json(content, longest=None), "the text")
    if len(entries) < count:
        raise ValueError(
            f"{len(entries)} tokens, but --vocab-size and --tiktoken-num-special-tokens leave room "
            f"for {count}: give --vocab-size {len(entries) + first} or less"
        )
    ranks: dict[bytes, int] = {}
    for number, entry in enumerate(entries[:count]):
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
        ranks[token] = first + number
    if len(ranks) < count:
        raise ValueError("a token is listed twice")
    return ranks
