import json
from unittest import mock

import pytest

from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.tools import preprocess_data, train_tokenizer
from tests.support.commands import ended

ERROR = "python -m megatron_lite.tools.preprocess_data: error: "

HF = "--tokenizer-type HuggingFaceTokenizer"
DOCUMENTS = ["3 1 4", "", "1 5 9 2 6", "5"]
IDS = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]


def write_jsonl(path, texts=DOCUMENTS):
    path.write_text("".join(json.dumps({"text": text, "title": text[:1]}) + "\n" for text in texts))
    return str(path)


def preprocess(tmp_path, flags="", *, source=None, block_bytes=preprocess_data.BLOCK_BYTES):
    source = source or write_jsonl(tmp_path / "in.jsonl")
    fixed = f"--input {source} --output-prefix {tmp_path}/out --tokenizer-type NullTokenizer"
    with mock.patch.object(preprocess_data, "BLOCK_BYTES", block_bytes):
        return ended(preprocess_data.main, f"{fixed} --vocab-size 50 {flags}")


def fault(found, tmp_path):
    """The one line of a run that has left no files."""
    assert found.status == 2 and found.err.startswith(ERROR) and found.err.count("\n") == 1
    assert files(tmp_path) == set()
    return found.err


def sequences(prefix):
    indexed = IndexedDataset(str(prefix))
    return [indexed.get(number).tolist() for number in range(len(indexed))]


def files(folder):
    return {path.name for path in folder.iterdir()} - {"in.jsonl"}


def test_documents_are_written_in_order_under_megatrons_name(tmp_path):
    assert preprocess(tmp_path).status == 0
    assert files(tmp_path) == {"out_text_document.bin", "out_text_document.idx"}
    assert sequences(tmp_path / "out_text_document") == IDS
    indexed = IndexedDataset(str(tmp_path / "out_text_document"))
    assert indexed.document_indices.tolist() == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("flag", ["--json-keys", "--json-key"])
def test_each_key_gets_a_dataset(tmp_path, flag):
    assert preprocess(tmp_path, f"{flag} title text").status == 0
    assert sequences(tmp_path / "out_title_document") == [[3], [1], [5]]
    assert sequences(tmp_path / "out_text_document") == IDS


def test_workers_do_not_change_a_byte(tmp_path):
    source = write_jsonl(
        tmp_path / "in.jsonl", [" ".join(map(str, range(number % 13, 50))) for number in range(200)]
    )
    written = []
    for workers in (1, 2):
        flags = f"--workers {workers}"
        assert preprocess(tmp_path, flags, source=source, block_bytes=40).status == 0
        written.append(
            [(tmp_path / f"out_text_document.{ending}").read_bytes() for ending in ("bin", "idx")]
        )
    assert written[0] == written[1]


BAD_LINES = {
    "To be, or not": "not a line of JSON (Expecting value: line 1 column 1 (char 0)): each line",
    "{not json": r"in.jsonl:3: not a line of JSON (Expecting property name",
    '"a string"': r"""in.jsonl:3: expected an object such as {"text": "..."}, found str""",
    '{"body": "1"}': "in.jsonl:3: expected a string under 'text', found only body (--json-keys",
    '{"text": 7}': "in.jsonl:3: expected a string under 'text', found int",
    '{"text": "1 x"}': "in.jsonl:3: --tokenizer-type NullTokenizer takes token ids",
    '{"text": "50"}': "in.jsonl:3: token id 50 is not in [0, 50): give ids below",
    '{"text": "99999999999999999999"}': (
        "in.jsonl:3: token id 99999999999999999999 is not in [0, 50)"
    ),
    '{"text": "a \\ud800 b"}': (
        r"in.jsonl:3: character 3 of the text is '\ud800', which is no "
        r"Unicode character"
    ),
    "[" * 100_000: "in.jsonl:3: not a line of JSON (",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named_and_leaves_no_files(tmp_path, line):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1"}\n\n' + line + '\n{"text": "2"}\n')
    assert BAD_LINES[line] in fault(preprocess(tmp_path, source=str(source)), tmp_path)


def test_a_bad_line_in_a_worker_ends_the_run_too(tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ["1"] * 20 + ["x"] + ["1"] * 20)
    found = preprocess(tmp_path, "--workers 2", source=source, block_bytes=1)
    assert "in.jsonl:21: " in fault(found, tmp_path)
    (tmp_path / "in.jsonl").write_bytes(b"\x1f\x8b\x08")
    assert "is compressed: give" in fault(preprocess(tmp_path, source=source), tmp_path)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--input none", "--input none: no such file"),
        ("--json-keys text title text", "--json-keys text title text: a key is given twice"),
        (
            "--vocab-size 2147483648",
            "--vocab-size 2147483648 is more ids than a dataset can hold: give at most 2147483647",
        ),
        (f"--vocab-size {'9' * 18}", f"--vocab-size must be at most {2**48} (got {'9' * 18})"),
        ("--workers 0", "--workers must be at least 1"),
        (HF, f"{HF} needs --tokenizer-model"),
        (f"{HF} --tokenizer-model none", "--tokenizer-model none: no such file"),
    ],
)
def test_bad_flags_are_one_line_and_status_2(tmp_path, flags, message):
    assert fault(preprocess(tmp_path, flags), tmp_path).startswith(f"{ERROR}{message}")


@pytest.mark.parametrize("flags", ["", "--append-eod", "--json-keys title text"])
def test_an_input_of_empty_texts_is_an_error_and_leaves_no_files(tmp_path, flags):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "", "title": "1"}\n{"text": " ", "title": "2"}\n')
    error = fault(preprocess(tmp_path, flags, source=str(source)), tmp_path)
    assert "in.jsonl: no tokens in it, every text under 'text' is empty\n" in error


@pytest.mark.parametrize("content", ["", '{"text": ""}\n'])
def test_no_tokenizer_is_made_of_nothing(tmp_path, content):
    pytest.importorskip("tokenizers")
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    found = ended(train_tokenizer.main, f"--input {source} --vocab-size 270 --output {tmp_path}")
    assert found.status == 2 and f"--input {source}: no text in it" in found.err
    assert not (tmp_path / "tokenizer.json").exists()


def test_own_tokenizer_end_to_end(tmp_path):
    """Train it, tokenize with it, and read the texts back from the .bin."""
    pytest.importorskip("tokenizers")
    from tests.data.test_tokenizers import hugging_face

    texts = ["the cat sat on the mat\n", "naïve 東京 🙂 the hat", "a\tb"] * 5
    source, folder = write_jsonl(tmp_path / "in.jsonl", texts), tmp_path / "tokenizer"
    training = f"--input {source} --vocab-size 270 --output {folder}"
    files = []
    for _ in range(2):  # the same file each time
        assert ended(train_tokenizer.main, training).status == 0
        files.append((folder / "tokenizer.json").read_bytes())
    assert files[0] == files[1]
    tokenizer = hugging_face(folder)
    assert (tokenizer.vocab_size, tokenizer.eod) == (270, 0)
    assert len(tokenizer.tokenize("the the the")) < 8
    flags = f"--append-eod {HF} --tokenizer-model {folder}"
    assert preprocess(tmp_path, flags, source=source).status == 0
    read = sequences(tmp_path / "out_text_document")
    assert [tokenizer.detokenize(ids) for ids in read] == [text + "<|endoftext|>" for text in texts]
    assert all(ids.count(0) == 1 for ids in read)
