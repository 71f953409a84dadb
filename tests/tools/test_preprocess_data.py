from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.tools import preprocess_data, train_tokenizer
from megatron_lite.tools.jsonl import write_documents

ERROR = "python -m megatron_lite.tools.preprocess_data: error: "

DOCUMENTS = ["3 1 4", "", "1 5 9 2 6", "5"]


def write_jsonl(path: Path, texts: list[str] = DOCUMENTS) -> str:
    path.write_text("".join(json.dumps({"text": text, "title": text[:1]}) + "\n" for text in texts))
    return str(path)


def preprocess(
    tmp_path: Path,
    *flags: str,
    source: str | None = None,
    vocab_size: int = 50,
    block_bytes: int = preprocess_data.BLOCK_BYTES,
) -> int:
    source = source or write_jsonl(tmp_path / "in.jsonl")
    return preprocess_data.main(
        [
            "--input",
            source,
            "--output-prefix",
            str(tmp_path / "out"),
            "--tokenizer-type",
            "NullTokenizer",
            "--vocab-size",
            str(vocab_size),
            *flags,
        ],
        block_bytes=block_bytes,
    )


def sequences(prefix: Path) -> list[list[int]]:
    indexed = IndexedDataset(str(prefix))
    return [indexed.get(number).tolist() for number in range(len(indexed))]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"in.jsonl"}


def test_documents_are_written_in_order_under_megatrons_name(tmp_path: Path) -> None:
    assert preprocess(tmp_path) == 0
    assert files(tmp_path) == {"out_text_document.bin", "out_text_document.idx"}
    assert sequences(tmp_path / "out_text_document") == [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
    assert IndexedDataset(str(tmp_path / "out_text_document")).document_indices.tolist() == [
        0,
        1,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("flag", ["--json-keys", "--json-key"])
def test_each_key_gets_a_dataset(tmp_path: Path, flag: str) -> None:
    assert preprocess(tmp_path, flag, "title", "text") == 0
    assert sequences(tmp_path / "out_title_document") == [[3], [1], [5]]
    assert sequences(tmp_path / "out_text_document") == [[3, 1, 4], [1, 5, 9, 2, 6], [5]]


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize("partitions", [1, 2])
def test_workers_do_not_change_a_byte(tmp_path: Path, partitions: int) -> None:
    source = write_jsonl(
        tmp_path / "in.jsonl", [" ".join(map(str, range(number % 13, 50))) for number in range(200)]
    )
    written = []
    for workers in (partitions, 2 * partitions):
        assert (
            preprocess(
                tmp_path,
                *("--workers", str(workers), "--partitions", str(partitions)),
                source=source,
                block_bytes=40,
            )
            == 0
        )
        written.append(
            [(tmp_path / f"out_text_document.{ending}").read_bytes() for ending in ("bin", "idx")]
        )
    assert written[0] == written[1]


def test_partitions_deal_the_lines_out_in_turn(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [str(number) for number in range(8)])
    assert preprocess(tmp_path, "--workers", "3", "--partitions", "3", source=source) == 0
    assert [row[0] for row in sequences(tmp_path / "out_text_document")] == [0, 3, 6, 1, 4, 7, 2, 5]


BAD_LINES = {
    "To be, or not": "not a line of JSON (Expecting value: line 1 column 1 (char 0)): each line",
    "{not json": r"in.jsonl:3: not a line of JSON (Expecting property name",
    '"a string"': r"""in.jsonl:3: expected an object such as {"text": "..."}, found str""",
    '{"body": "1"}': "in.jsonl:3: expected a string under 'text', found only body (--json-keys",
    '{"text": 7}': "in.jsonl:3: expected a string under 'text', found int",
    '{"text": "1 x"}': "in.jsonl:3: --tokenizer-type NullTokenizer takes token ids",
    '{"text": "50"}': "in.jsonl:3: token id 50 is not in [0, 50)",
    '{"text": "99999999999999999999"}': (
        "in.jsonl:3: token id 99999999999999999999 is not in [0, 50)"
    ),
    '{"text": "a \\ud800 b"}': (
        r"in.jsonl:3: character 3 of the text is '\ud800', which is no "
        r"Unicode character"
    ),
    "[" * 100_000: "in.jsonl:3: not a line of JSON (",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=[line[:20] for line in BAD_LINES])
def test_a_bad_line_is_named_and_leaves_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "1"}\n\n' + line + '\n{"text": "2"}\n')
    assert preprocess(tmp_path, source=str(source)) == 2
    error = capsys.readouterr().err
    assert error.startswith(ERROR) and BAD_LINES[line] in error and error.count("\n") == 1
    assert files(tmp_path) == set()


def test_a_bad_line_in_a_worker_ends_the_run_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["1"] * 20 + ["x"] + ["1"] * 20)
    assert preprocess(tmp_path, "--workers", "2", source=source, block_bytes=1) == 2
    assert "in.jsonl:21: " in capsys.readouterr().err
    assert files(tmp_path) == set()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--input", "none"), "--input none: no such file"),
        (
            ("--json-keys", "text", "title", "text"),
            "--json-keys text title text: a key is given twice",
        ),
        (
            ("--vocab-size", "2147483648"),
            "--vocab-size 2147483648 is more ids than a dataset can hold: give at most 2147483647",
        ),
        (("--vocab-size", "9" * 18), f"--vocab-size must be at most {2**48} (got {'9' * 18})"),
        (("--workers", "0"), "--workers must be at least 1"),
        (("--workers", "3", "--partitions", "2"), "--workers 3 is not divisible by --partitions 2"),
        (
            ("--tokenizer-type", "HuggingFaceTokenizer"),
            "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model",
        ),
        (
            ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "none"),
            "--tokenizer-model none: no such file",
        ),
    ],
)
def test_bad_flags_are_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert preprocess(tmp_path, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{ERROR}{message}") and error.count("\n") == 1
    assert files(tmp_path) == set()


@pytest.mark.parametrize("flags", [(), ("--append-eod",), ("--json-keys", "title", "text")])
def test_an_input_of_empty_texts_is_an_error_and_leaves_no_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "", "title": "1"}\n{"text": " ", "title": "2"}\n')
    assert preprocess(tmp_path, *flags, source=str(source)) == 2
    assert (
        "in.jsonl: no tokens in it, every text under 'text' is empty\n" in capsys.readouterr().err
    )
    assert files(tmp_path) == set()


def test_own_tokenizer_end_to_end(tmp_path: Path) -> None:
    """Train it, tokenize with it, and read the texts back from the .bin."""
    pytest.importorskip("tokenizers")
    from tests.data.test_tokenizers import hugging_face

    texts = ["the cat sat on the mat\n", "naïve 東京 🙂 the hat", "a\tb"] * 5
    write_documents(str(tmp_path / "in.jsonl"), texts)
    tokenizer_folder = tmp_path / "tokenizer"
    for _ in range(2):  # the same file each time
        assert (
            train_tokenizer.main(
                [
                    "--input",
                    str(tmp_path / "in.jsonl"),
                    "--vocab-size",
                    "270",
                    "--output",
                    str(tokenizer_folder),
                ]
            )
            == 0
        )
        before = (tokenizer_folder / "tokenizer.json").read_bytes()
    assert (tokenizer_folder / "tokenizer.json").read_bytes() == before
    tokenizer = hugging_face(tokenizer_folder)
    assert (tokenizer.vocab_size, tokenizer.eod) == (270, 0)
    assert len(tokenizer.tokenize("the the the")) < 8
    assert (
        preprocess(
            tmp_path,
            "--append-eod",
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            str(tokenizer_folder),
            source=str(tmp_path / "in.jsonl"),
        )
        == 0
    )
    read = sequences(tmp_path / "out_text_document")
    assert [tokenizer.detokenize(ids) for ids in read] == [text + "<|endoftext|>" for text in texts]
    assert all(ids.count(0) == 1 for ids in read)
