"""Tokenizers of the optional packages sentencepiece and tiktoken, compared with megatron-core's."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import SENTENCEPIECE_TYPES, TokenizerConfig
from megatron_lite.data import tokenizer_files
from megatron_lite.data.tokenizers import build_tokenizer, resolve_vocabulary

TEXTS = (
    "The quick brown fox, 12345 times!\n\n  And   again\t.",
    "naïve Straße 東京 🙂 HTTPServer's",
    "",
    " leading </s> and <s> trailing ",
    "x" * 50,
)
SPECIAL = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of 300 pieces."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog 123"] * 50),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sentences") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("kind", SENTENCEPIECE_TYPES)
def test_sentencepiece_equals_megatron_core(sentences: Path, kind: str) -> None:
    library = pytest.importorskip("megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer")
    oracle = library.SentencePieceTokenizer(str(sentences))
    ours = build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(sentences)))
    assert (ours.vocab_size, ours.eod) == (oracle.vocab_size, oracle.eos_id)
    for text in TEXTS:
        ids = ours.tokenize(text)
        assert ids == oracle.text_to_ids(text)
        assert ours.detokenize(ids) == oracle.ids_to_text(ids)
    assert ours.detokenize(ours.tokenize("the fox 東京")) == "the fox 東京"


def entries(*more: bytes) -> list[dict[str, Any]]:
    """The bytes and more tokens."""
    tokens = [*(bytes([number]) for number in range(256)), *more]
    return [
        {
            "rank": number,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode(errors="replace"),
        }
        for number, token in enumerate(tokens)
    ]


MORE = (b"th", b"the", b" q", b"12", b"  ", b"\n\n", b"HT", b"xx", b"xxxx")


def _written(folder: Path, content: object) -> Path:
    path = folder / "t.json"
    path.write_text(json.dumps(content))
    return path


def _config(path: Path, **fields: Any) -> TokenizerConfig:
    return TokenizerConfig(
        **{
            "tokenizer_type": "TikTokenizer",
            "tokenizer_model": str(path),
            "vocab_size": 256 + len(MORE) + 10,
            "tiktoken_num_special_tokens": 10,
            **fields,
        }
    )


@pytest.mark.parametrize("pattern", [None, "v1", "v2"])
@pytest.mark.parametrize("special", [None, [*SPECIAL, "<more>"]])
@pytest.mark.parametrize("cut", [0, 2])
def test_tiktoken_equals_megatron_core(
    tmp_path: Path, pattern: str | None, special: list[str] | None, cut: int
) -> None:
    pytest.importorskip("tiktoken")
    library = pytest.importorskip("megatron.core.tokenizers.text.libraries.tiktoken_tokenizer")
    path, size = _written(tmp_path, entries(*MORE)), 256 + len(MORE) + 10 - cut
    oracle = library.TikTokenTokenizer(
        str(path),
        special_tokens=special,
        num_special_tokens=10,
        vocab_size=size,
        **({} if pattern is None else {"pattern": pattern}),
    )
    ours = build_tokenizer(
        _config(
            path,
            vocab_size=size,
            tiktoken_pattern=pattern,
            tokenizer_special_tokens=tuple(special or ()),
        )
    )
    assert (ours.vocab_size, ours.eod) == (oracle.vocab_size, oracle.eod) == (size, 2)
    for text in (*TEXTS, "a<SPECIAL_9><more>b"):
        ids = ours.tokenize(text)
        assert ids == oracle.text_to_ids(text)
        assert ours.detokenize(ids) == text


def test_the_files_of_tiktoken_travel_too(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    config = _config(_written(tmp_path, entries(*MORE)))
    assert resolve_vocabulary(config) == config
    assert tokenizer_files.files_of(config) == {"tiktoken.json": tmp_path / "t.json"}
    (tmp_path / "t.json").rename(tmp_path / "tiktoken.json")
    assert build_tokenizer(tokenizer_files.read_from(config, tmp_path)).eod == 2


def _changed(number: int, **fields: object) -> list[dict[str, Any]]:
    return [{**entry, **(fields if entry["rank"] == number else {})} for entry in entries(*MORE)]


@pytest.mark.parametrize(
    ("content", "fields", "message"),
    [
        ({}, {}, "the text must be a list"),
        ([1], {"vocab_size": 11}, "entry 0 must be an object"),
        (_changed(3, rank=4), {}, "entry 3 must be a whole number from 3 to 3"),
        (_changed(3, token_bytes="!"), {}, "not a tokenizer that can be read"),
        (_changed(3, token_bytes="QQ=="), {}, "entry 3 must be the byte 3"),
        (_changed(260, token_bytes="dGg="), {}, "a token is listed twice"),
        (entries(), {}, "256 tokens, but .* give --vocab-size 266 or less"),
        (entries(*MORE), {"vocab_size": 10}, "must be at least the 7 named .* --vocab-size 10"),
    ],
)
def test_a_list_of_tokens_that_does_not_fit_is_refused(
    tmp_path: Path, content: object, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        build_tokenizer(_config(_written(tmp_path, content), **fields))
