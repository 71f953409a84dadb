import base64
import io
import json
from dataclasses import replace

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.config.data_settings import SENTENCEPIECE_TYPES, TokenizerConfig
from megatron_lite.data import tokenizer_files
from megatron_lite.data.tokenizers import build_tokenizer, resolve_vocabulary

TEXT = "low lower\nnewest — naïve 東京 🙂 <|endoftext|>"


def hugging_face(path):
    return build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path))
    )


def gpt2(folder):
    names = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return build_tokenizer(TokenizerConfig(tokenizer_type="GPT2BPETokenizer", **names))


def byte_characters():
    """GPT-2's letter for each byte 0..255: printable bytes stand for themselves, the others move up
    past 255."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    moved = iter(range(256, 512))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]


def write_gpt2(folder):
    """256 bytes, three merges, and the end of a document: ids 0-255, 256 "lo", 257 "low", 258 "er",
    259."""
    tokens = [*byte_characters(), "lo", "low", "er", "<|endoftext|>"]
    (folder / "vocab.json").write_text(
        json.dumps({token: number for number, token in enumerate(tokens)})
    )
    (folder / "merges.txt").write_text("#version: 0.2\nl o\nlo w\ne r\n")
    return gpt2(folder)


def write_hugging_face(folder, *, truncation=False):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {token: number for number, token in enumerate(["a", "b", "c", "ab", "Ġ"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<x>", "</s>"])
    if truncation:
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_gpt2_merges_in_the_order_of_the_file(tmp_path):
    tokenizer = write_gpt2(tmp_path)
    letter = {character: byte for byte, character in enumerate(byte_characters())}
    assert tokenizer.tokenize("low lower") == [257, letter["Ġ"], 257, 258]
    assert tokenizer.tokenize("é") == list("é".encode())
    assert (tokenizer.vocab_size, tokenizer.eod) == (260, 259)


def test_gpt2_gives_every_text_back(tmp_path):
    tokenizer = write_gpt2(tmp_path)
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    # only the tool writes the end of a document, never the text
    assert 259 not in tokenizer.tokenize(TEXT)
    assert tokenizer.detokenize([257, 259]) == "low<|endoftext|>"


@pytest.mark.parametrize("path", [".", "tokenizer.json"])
def test_hugging_face_reads_a_folder_or_a_file(tmp_path, path):
    tokenizer = hugging_face(write_hugging_face(tmp_path) / path)
    assert tokenizer.tokenize("abc ab") == [3, 2, 4, 3]
    assert tokenizer.detokenize([3, 2, 4, 3, 6]) == "abc ab</s>"
    assert (tokenizer.vocab_size, tokenizer.eod) == (7, 6)


def test_truncation_and_padding_of_the_file_do_not_touch_documents(tmp_path):
    assert hugging_face(write_hugging_face(tmp_path, truncation=True)).tokenize("abcab") == [
        3,
        2,
        3,
    ]
    assert hugging_face(tmp_path).tokenize("a") == [0]


@pytest.mark.parametrize(
    "eos_token, eod", [("<x>", 5), ({"content": "<x>", "lstrip": False}, 5), (None, 6)]
)
def test_eos_token_of_the_tokenizer_config_ends_a_document(tmp_path, eos_token, eod):
    write_hugging_face(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    assert hugging_face(tmp_path).eod == eod


@pytest.mark.parametrize("content", [r'{"eos_token": "\ud800"}', "[]", "{"])
def test_a_tokenizer_config_that_cannot_be_read_is_named(tmp_path, content):
    write_hugging_face(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(InputError, match=r"tokenizer_config\.json: "):
        hugging_face(tmp_path)


def test_vocabulary_is_the_tokenizers_unless_a_larger_one_is_given(tmp_path):
    def config(vocab_size):
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
    with pytest.raises(InputError, match="--padded-vocab-size 6 is below the 7 ids"):
        resolve_vocabulary(replace(config(None), padded_vocab_size=6))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    assert resolve_vocabulary(config(5)).vocab_size == 5  # added tokens may lie beyond


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: not a tokenizer that can be read"):
        hugging_face(tmp_path)
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(InputError, match=r"vocab\.json: no such file"):
        gpt2(tmp_path)


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "TikTokenizer"])
def test_a_file_that_cannot_be_read_is_an_error_of_the_input(kind):
    with pytest.raises(InputError, match="/proc/self/mem: cannot be read"):
        build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model="/proc/self/mem"))


TEXTS = (
    "The quick brown fox, 12345 times!\n\n  And   again\t.",
    "naïve Straße 東京 🙂 HTTPServer's",
    "",
    " leading </s> and <s> trailing ",
    "x" * 50,
)
SPECIAL = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
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
def test_sentencepiece_equals_megatron_core(sentences, kind):
    library = pytest.importorskip("megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer")
    oracle = library.SentencePieceTokenizer(str(sentences))
    ours = build_tokenizer(TokenizerConfig(tokenizer_type=kind, tokenizer_model=str(sentences)))
    assert (ours.vocab_size, ours.eod) == (oracle.vocab_size, oracle.eos_id)
    for text in TEXTS:
        ids = ours.tokenize(text)
        assert ids == oracle.text_to_ids(text)
        assert ours.detokenize(ids) == oracle.ids_to_text(ids)
    assert ours.detokenize(ours.tokenize("the fox 東京")) == "the fox 東京"


def entries(*more):
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


def _written(folder, content):
    path = folder / "t.json"
    path.write_text(json.dumps(content))
    return path


def _config(path, **fields):
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
def test_tiktoken_equals_megatron_core(tmp_path, pattern, special, cut):
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


def test_the_files_of_tiktoken_travel_too(tmp_path):
    pytest.importorskip("tiktoken")
    config = _config(_written(tmp_path, entries(*MORE)))
    assert resolve_vocabulary(config) == config
    assert tokenizer_files.files_of(config) == {"tiktoken.json": tmp_path / "t.json"}
    (tmp_path / "t.json").rename(tmp_path / "tiktoken.json")
    assert build_tokenizer(tokenizer_files.read_from(config, tmp_path)).eod == 2


def _changed(number, **fields):
    return [{**entry, **(fields if entry["rank"] == number else {})} for entry in entries(*MORE)]


@pytest.mark.parametrize(
    "content, fields, message",
    [
        ({}, {}, "the text must be a list"),
        (_changed(3, rank=4), {}, "entry 3 must have rank 3"),
        (_changed(3, token_bytes="QQ=="), {}, "entry 3 must be the byte 3"),
        (_changed(260, token_bytes="dGg="), {}, "a token is listed twice"),
        (entries(), {}, "256 tokens, but .* give --vocab-size 266 or less"),
        (entries(*MORE), {"vocab_size": 10}, "must be at least the 7 named .* --vocab-size 10"),
    ],
)
def test_a_list_of_tokens_that_does_not_fit_is_refused(tmp_path, content, fields, message):
    with pytest.raises(InputError, match=message):
        build_tokenizer(_config(_written(tmp_path, content), **fields))
