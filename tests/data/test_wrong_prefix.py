"""A --data-path that names no token files: the message has what to give, or the commands that make
them."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.data.data_paths import prefix_advice
from megatron_lite.data.indexed import IndexedDataset
from tests.support.commands import environment
from tests.support.limits import HANG_S


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


@pytest.mark.long
@pytest.mark.parametrize("name", ["a.txt", "it's $one.txt", "b.jsonl"])
def test_the_commands_make_the_token_files(folder: Path, name: str) -> None:
    text = "once upon a time " * 200
    plain = name.endswith(".txt")
    (folder / name).write_text(f"{text}\n\n{text}" if plain else f'{{"text": "{text}"}}\n')
    commands, _, flags = prefix_advice(name).partition("\n")[2].partition("\nand then train with\n")
    subprocess.run(
        ["bash", "-euc", commands], env=environment(), cwd=folder, timeout=HANG_S, check=True
    )
    name, prefix, *_, tokenizer = shlex.split(flags)
    assert name == "--data-path" and len(IndexedDataset(prefix)) == (2 if plain else 1)
    assert (folder / tokenizer).is_file()
