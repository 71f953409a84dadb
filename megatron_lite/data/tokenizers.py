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

import base64
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.config import checks
from megatron_lite.config.checks import InputError, flag, input_faults, parse_json
from megatron_lite.config.data_settings import (
    READ_FILES,
    SENTENCEPIECE_TYPES,
    SPECIAL_TOKENS,
    TokenizerConfig,
)
from megatron_lite.config.invocation import module_of_extra

from .tokenizer_files import LARGEST_ID, contents_of, merges_of, read_files

END_OF_DOCUMENT = ("<|endoftext|>", "</s>")
USUAL_VOCABULARY = 2**17  # of tiktoken
WORD = r"[^\r\n\p{L}\p{N}]?"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# How a text is split before its pieces are encoded: --tiktoken-pattern.
PATTERNS = {
    "v1": WORD + r"+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": f"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class Tokenizer(NamedTuple):
    """A tokenizer: text to token ids and back.

    vocab_size: 1 + the largest id.
    end: the id that ends a document, or why there is none.
    encode: that of a library.
    detokenize: returns the text of ids.
    backend: the tokenizer of the library `tokenizers`; None for those of other libraries.
    """

    vocab_size: int
    end: int | str
    encode: Callable[[str], Sequence[int]]
    detokenize: Callable[[Sequence[int]], str]
    backend: Any = None

    @property
    def eod(self) -> int:
        """The id that ends a document. Raises InputError if there is none."""
        if isinstance(self.end, str):
            raise InputError(self.end)
        return self.end

    @property
    def fewest_ids(self) -> int:
        """The least V of its models. Tokens that were added may lie beyond, such as the image's of
        Gemma 3 1B or a <pad>: no embedding has them."""
        if self.backend is None:
            return self.vocab_size
        own = self.backend.get_vocab(with_added_tokens=False).values()
        return 1 + max([*own, self.end if isinstance(self.end, int) else 0])

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of a text. Raises ValueError for text that UTF-8 cannot encode, or that
        the NullTokenizer does not take."""
        check_encodes(text)
        return [*self.encode(text)]


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Returns the tokenizer that the flags name.

    Raises InputError if its files are missing or cannot be read, or its library is missing.
    """
    # The config has checked the type, and that the fields which it needs are given.
    return TOKENIZERS[str(config.tokenizer_type)](config)


def resolve_vocabulary(config: TokenizerConfig) -> TokenizerConfig:
    """Returns the config with its `vocab_size` filled in.

    Raises InputError if the given size, or --padded-vocab-size, cannot hold every id of the
    tokenizer but added ones.
    """
    tokenizer = build_tokenizer(config)
    least = tokenizer.fewest_ids
    if config.vocab_size is not None and config.vocab_size < least:
        raise InputError(
            f"--vocab-size {config.vocab_size} is smaller than the {least} ids of --tokenizer-type "
            f"{config.tokenizer_type}: leave --vocab-size out, or give at least {least}"
        )
    with input_faults():
        return replace(config, vocab_size=config.vocab_size or tokenizer.vocab_size)


def check_encodes(text: str) -> None:
    """Raises ValueError if the text contains half of a surrogate pair.

    JSON can spell one, and a byte that is not UTF-8 arrives from a shell as one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"character {error.start + 1} of the text is {text[error.start]!a}, which is no "
            "Unicode character: correct the text, it must be UTF-8"
        ) from None


def _null(config: TokenizerConfig) -> Tokenizer:
    """Returns a tokenizer of texts that consist of ids.

    The ids of a text are below --vocab-size. The end of a document is one more id: that number.
    """
    eod = config.vocab_size or 0
    if eod > LARGEST_ID:
        raise InputError(
            f"--vocab-size {eod} is more ids than a dataset can hold: give at most {LARGEST_ID}"
        )

    def encode(text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(
                f"--tokenizer-type NullTokenizer takes token ids with spaces between them: {error}"
            ) from None
        for token in ids:
            if not 0 <= token < eod:
                raise ValueError(
                    f"token id {token} is not in [0, {eod}): give ids below --vocab-size {eod}, "
                    "or data and model a larger one"
                )
        return ids

    return Tokenizer(eod + 1, eod, encode, lambda ids: " ".join(map(str, ids)))


def _hugging_face(config: TokenizerConfig) -> Tokenizer:
    """Returns the tokenizer of a tokenizer.json or of its folder.

    A document ends with the eos_token of tokenizer_config.json. If the vocabulary has no such
    token, it ends with <|endoftext|> or </s>.
    """
    (file,), contents = _read(config)
    library = _imported("tokenizers")
    tokenizer = _parsed(file, library.Tokenizer.from_buffer, contents)
    beside = file.with_name("tokenizer_config.json")
    named = [_eos_token(beside)] if os.path.lexists(beside) else []
    return _of_library(file, tokenizer, (*filter(None, named), *END_OF_DOCUMENT))


def _gpt2(config: TokenizerConfig) -> Tokenizer:
    """Returns the byte-level BPE tokenizer of GPT-2's two files.

    A document ends with <|endoftext|>. In a text, these characters are ordinary characters.
    """
    files, (vocabulary, merges) = _read(config)
    library = _imported("tokenizers")
    words = parse_json(vocabulary)
    pairs = merges_of(merges.decode("utf-8-sig"))
    source = " and ".join(map(str, files))
    tokenizer = _parsed(source, library.ByteLevelBPETokenizer, (words, pairs))
    return _of_library(files[0], tokenizer, END_OF_DOCUMENT[:1])


def _of_library(source: object, tokenizer: Any, ends: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer of the `tokenizers` library. The first token of `ends` that it has ends a
    document.

    A text's ids include what the tokenizer's own post-processor adds; some tokenizers begin a text
    with a special token.
    """
    ids = tokenizer.get_vocab(with_added_tokens=True)
    # A tokenizer.json can ask for truncation and padding. Both would change documents silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    none = (
        f"{source} has no end-of-document token (looked for {', '.join(ends)}): name one as "
        "eos_token in a tokenizer_config.json beside it"
    )
    return Tokenizer(
        _size(source, 1 + max(ids.values(), default=-1)),
        next((int(ids[token]) for token in ends if token in ids), none),
        lambda text: tokenizer.encode(text).ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        tokenizer,
    )


def _sentencepiece(config: TokenizerConfig) -> Tokenizer:
    """Returns the tokenizer of a SentencePiece model, such as Llama 2's, or of its folder.

    Its ids are the model's own, without a token for the start of a text. A document ends with the
    model's end-of-sentence token.
    """
    (file,), contents = _read(config)
    library = _imported("sentencepiece")
    # The processor would take any folder or longer text for a path as well.
    read = _parsed(
        file, lambda content: library.SentencePieceProcessor(model_proto=content), contents
    )
    end = int(read.eos_id())
    none = f"{file} has no end-of-sentence token, which ends a document: train it with an eos_id"
    return Tokenizer(
        _size(file, int(read.get_piece_size())),
        end if end >= 0 else none,
        read.encode_as_ids,
        read.decode_ids,
    )


def _tiktoken(config: TokenizerConfig) -> Tokenizer:
    """Returns a tokenizer of the tiktoken library, from a JSON list of tokens as Megatron has it.

        ids 0 .. N-1      special tokens: the named ones, then <SPECIAL_7>, <SPECIAL_8> ..
        ids N .. V-1      the tokens of the file, in its order, of which the first 256 are the bytes

    N is --tiktoken-num-special-tokens and V is --vocab-size. Where a text has the characters of a
    special token, they become that token.
    """
    (file,), contents = _read(config)
    size = config.vocab_size or USUAL_VOCABULARY
    named = config.tokenizer_special_tokens or SPECIAL_TOKENS
    count = config.tiktoken_num_special_tokens
    if not len(named) <= count < size:
        raise InputError(
            f"--tiktoken-num-special-tokens {count} must be at least the {len(named)} named "
            f"special tokens and below --vocab-size {size}"
        )
    names = (*named, *(f"<SPECIAL_{i}>" for i in range(len(named), count)))
    if len(set(names)) < len(names):
        raise InputError("--tokenizer-special-tokens: two special tokens have one name")
    ranks = _parsed(file, lambda content: _ranks(content, size - count, first=count), contents)
    encoding = _imported("tiktoken").Encoding(
        name=file.name,
        pat_str=PATTERNS[config.tiktoken_pattern or "v2"],
        mergeable_ranks=ranks,
        special_tokens={name: number for number, name in enumerate(names)},
    )
    return Tokenizer(
        size,
        named.index("</s>"),
        lambda text: encoding.encode(text, allowed_special="all"),
        encoding.decode,
    )


TOKENIZERS = {
    "HuggingFaceTokenizer": _hugging_face,
    "GPT2BPETokenizer": _gpt2,
    "NullTokenizer": _null,
    **dict.fromkeys(SENTENCEPIECE_TYPES, _sentencepiece),
    "TikTokenizer": _tiktoken,
}


def _read(config: TokenizerConfig) -> tuple[list[Path], list[bytes]]:
    """Returns the paths of the tokenizer's files and their checked contents."""
    files = read_files(config)
    for field, file in zip(READ_FILES[str(config.tokenizer_type)], files.values(), strict=True):
        if not file.exists():
            raise InputError(
                f"{flag(field)} {file}: no such file (tokenizers are read from local files, never "
                "downloaded)"
            )
    try:
        contents = contents_of(files)
    except OSError as error:
        named = " and ".join(map(str, files.values()))
        raise InputError(f"{named}: cannot be read ({error})") from error
    return [*files.values()], [*contents.values()]


def _parsed(source: object, parse: Callable[..., Any], contents: Sequence[Any]) -> Any:
    """Returns what a library makes of a file's contents. Raises InputError, with its reason."""
    try:
        return parse(*contents)
    except Exception as error:  # the libraries raise nothing more specific
        raise InputError(f"{source}: not a tokenizer that can be read ({error})") from error


def _size(source: object, size: int) -> int:
    if size == 0:
        raise InputError(f"{source}: a vocabulary without tokens")
    return size


def _imported(name: str) -> Any:
    return module_of_extra(name, "tokenizers", needed_by="this tokenizer")


def _eos_token(path: Path) -> str | None:
    content = contents_of({path.name: path})[path.name]
    token = parse_json(content, strict=False).get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    if name is not None and not isinstance(name, str):
        raise InputError(f"{path}: eos_token must be a text (got {checks.quoted(name)})")
    with input_faults(f"{path}: "):
        check_encodes(name or "")
    return name


def _ranks(content: bytes, count: int, *, first: int) -> dict[bytes, int]:
    """Returns the ids of the first `count` tokens of a file; the first one has the id `first`."""
    entries = checks.as_list(parse_json(content), "the text")
    if len(entries) < count:
        raise ValueError(
            f"{len(entries)} tokens, but --vocab-size and --tiktoken-num-special-tokens leave room "
            f"for {count}: give --vocab-size {len(entries) + first} or less"
        )
    ranks = {}
    for number, entry in enumerate(entries[:count]):
        where = f"entry {number}"
        values = checks.as_object(entry, where)
        if values.keys() != {"rank", "token_bytes", "token_str"} or values["rank"] != number:
            raise ValueError(f"{where} must have rank {number}, token_bytes and token_str")
        token = base64.b64decode(values["token_bytes"], validate=True)
        if number < 256 and token != bytes([number]):
            raise ValueError(f"{where} must be the byte {number}")
        ranks[token] = first + number
    if len(ranks) < count:
        raise ValueError("a token is listed twice")
    return ranks
