"""Each fault of the user: exit status 2 and one message with the value, the rule and the fix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pretrain_gpt
from megatron_lite.data.indexed_writer import IndexedDatasetWriter
from tests.support.commands import MOCK, SMALL_RUN


def _status(arguments: list[str]) -> int:
    try:
        return pretrain_gpt.main(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1


def _refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert _status([*SMALL_RUN, *arguments]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message and message.count("error:") == 1
    return message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tensor-model-parallel-size", "2", *MOCK], "start a multiple of 2 processes"),
        (["--vocab-size", "98"], "--data-path PREFIX or --mock-data"),
        ([*MOCK, "--load", "no/such/place"], "--allow-fresh-start"),
        (
            [
                "--mock-data",
                "--tokenizer-type",
                "HuggingFaceTokenizer",
                "--tokenizer-model",
                "no/tokenizer.json",
            ],
            "no/tokenizer.json",
        ),
        (
            [
                "--mock-data",
                "--tokenizer-type",
                "GPT2BPETokenizer",
                "--vocab-file",
                "no/vocab.json",
                "--merge-file",
                "no/merges.txt",
            ],
            "no/vocab.json",
        ),
        (["--data-path", "no/prefix", "--vocab-size", "98"], "no/prefix"),
    ],
)
def test_it_is_refused(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in _refused(arguments, capsys)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
        for document in range(40):
            writer.add_document(np.arange(30) + document)
    return str(tmp_path / "data")


def test_a_foreign_token_is_named_with_file_document_and_id(
    prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = _refused(["--data-path", prefix, "--split", "100,0,0", "--vocab-size", "40"], capsys)
    assert (
        f"{prefix}.bin: document" in message
        and "holds token id" in message
        and "the vocabulary has 41 ids" in message
    )


def test_a_truncated_bin_is_named(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(prefix + ".bin")
    path.write_bytes(path.read_bytes()[:-10])
    message = _refused(["--data-path", prefix, "--vocab-size", "98"], capsys)
    assert f"{prefix}.bin" in message and "2390" in message and "2400" in message
