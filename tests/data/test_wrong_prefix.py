"""A --data-path that names no token files: the message has what to give, or the commands that make
them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.data.indexed import IndexedDataset


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("prefix", "file", "answer"),
    [
        ("data.bin", "data.bin", "leave the ending out: --data-path data"),
        ("data", "data_text_document.idx", "did you mean --data-path data_text_document?"),
        ("a b.jsonl", "a b.jsonl", "preprocess_data --input 'a b.jsonl' --output-prefix 'a b' "),
    ],
)
def test_the_answer_has_what_to_give(folder: Path, prefix: str, file: str, answer: str) -> None:
    (folder / file).write_text("words")
    with pytest.raises(InputError, match=re.escape(answer)):
        IndexedDataset(prefix)
