from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import TokenizerConfig
from megatron_lite.data.tokenizers import Tokenizer, build_tokenizer, resolve_vocabulary

TEXT = "low lower\nnewest — naïve 東京 🙂 <|endoftext|>"


def hugging_face(path: Path | str) -> Tokenizer:
    return build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path))
    )


def gpt2(folder: Path) -> Tokenizer:
    names = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return build_tokenizer(TokenizerConfig(tokenizer_type="GPT2BPETokenizer", **names))


def byte_characters() -> list[str]:
    """GPT-2's letter for each byte 0..255: printable bytes stand for themselves, the others move up
    past 255."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    moved = iter(range(256, 512))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]


def write_gpt2(folder: Path) -> Tokenizer:
    """256 bytes, three merges, and the end of a document: ids 0-255, 256 "lo", 257 "low", 258 "er",
    259."""
    tokens = [*byte_characters(), "lo", "low", "er", "<|endoftext|>"]
    (folder / "vocab.json").write_text(
        json.dumps({token: number for number, token in enumerate(tokens)})
    )
    (folder / "merges.txt").write_text("#version: 0.2\nl o\nlo w\ne r\n")
    return gpt2(folder)


def write_hugging_face(
    folder: Path, *, special: str | None = "</s>", truncation: bool = False
) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {token: number for number, token in enumerate(["a", "b", "c", "ab", "Ġ"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if special:
        tokenizer.add_special_tokens(["<x>", special])
    if truncation:
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_gpt2_merges_in_the_order_of_the_file(tmp_path: Path) -> None:
    tokenizer = write_gpt2(tmp_path)
    letter = {character: byte for byte, character in enumerate(byte_characters())}
    assert tokenizer.tokenize("low lower") == [257, letter["Ġ"], 257, 258]
    assert tokenizer.tokenize("é") == list("é".encode())
    assert (tokenizer.vocab_size, tokenizer.eod) == (260, 259)


def test_gpt2_gives_every_text_back(tmp_path: Path) -> None:
    tokenizer = write_gpt2(tmp_path)
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    # only the tool writes the end of a document, never the text
    assert 259 not in tokenizer.tokenize(TEXT)
    assert tokenizer.detokenize([257, 259]) == "low<|endoftext|>"


@pytest.mark.parametrize("path", [".", "tokenizer.json"])
def test_hugging_face_reads_a_folder_or_a_file(tmp_path: Path, path: str) -> None:
    tokenizer = hugging_face(write_hugging_face(tmp_path) / path)
    assert tokenizer.tokenize("abc ab") == [3, 2, 4, 3]
    assert tokenizer.detokenize([3, 2, 4, 3, 6]) == "abc ab</s>"
    assert (tokenizer.vocab_size, tokenizer.eod) == (7, 6)


def test_truncation_and_padding_of_the_file_do_not_touch_documents(tmp_path: Path) -> None:
    assert hugging_face(write_hugging_face(tmp_path, truncation=True)).tokenize("abcab") == [
        3,
        2,
        3,
    ]
    assert hugging_face(tmp_path).tokenize("a") == [0]


@pytest.mark.parametrize("eos_token", ["<x>", {"content": "<x>", "lstrip": False}])
def test_eos_token_of_the_tokenizer_config_ends_a_document(
    tmp_path: Path, eos_token: object
) -> None:
    write_hugging_face(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    assert hugging_face(tmp_path).eod == 5


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, r'{"eos_token": "\ud800"}', "[]", "{"],
    ids=["nesting", "surrogate", "list", "broken"],
)
def test_a_tokenizer_config_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    write_hugging_face(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(InputError, match=r"tokenizer_config\.json: "):
        hugging_face(tmp_path)


def test_vocabulary_is_the_tokenizers_unless_a_larger_one_is_given(tmp_path: Path) -> None:
    def config(vocab_size: int | None) -> TokenizerConfig:
        return TokenizerConfig(
            tokenizer_type="HuggingFaceTokenizer",
            tokenizer_model=str(tmp_path),
            vocab_size=vocab_size,
        )

    write_hugging_face(tmp_path)
    assert [resolve_vocabulary(config(size)).vocab_size for size in (None, 7, 9)] == [7, 7, 9]
    with pytest.raises(
        InputError,
        match="--vocab-size 6 is smaller than the 7 ids of --tokenizer-type HuggingFaceTokenizer",
    ):
        resolve_vocabulary(config(6))


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer that can be read"):
        hugging_face(tmp_path)
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(InputError, match=r"vocab\.json: no such file"):
        gpt2(tmp_path)


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "TikTokenizer"])
def test_a_file_that_cannot_be_read_is_an_error_of_the_input(kind: str) -> None:
    with pytest.raises(InputError, match="/proc/self/mem: cannot be read"):
        build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model="/proc/self/mem"))
