"""A plain text file becomes documents by the commands that the error and the page print."""

import json
import subprocess
from pathlib import Path

import pytest

from megatron_lite.tools.jsonl import PLAIN_TEXT_ADVICE
from tests.support.commands import ROOT
from tests.support.limits import HANG_S

PARAGRAPHS = ["A first one,\nof two lines.", "A 'second' one: \"quoted\"."]


def _of_the_error() -> str:
    command = PLAIN_TEXT_ADVICE[PLAIN_TEXT_ADVICE.index("python -c") :]
    return command.replace("FILE.txt", "my.txt").replace("FILE.jsonl", "my.jsonl")


def _of_the_page() -> str:
    page = (ROOT / "docs" / "data.md").read_text()
    before = page[: page.index("< my.txt")]
    return page[before.rindex("python -c") :].partition("\n```")[0]


@pytest.mark.parametrize("command", [_of_the_error(), _of_the_page()], ids=["error", "page"])
def test_each_paragraph_of_a_plain_text_becomes_a_document(command: str, tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("\n\n".join([PARAGRAPHS[0], "", PARAGRAPHS[1]]) + "\n\n")
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=HANG_S)
    lines = (tmp_path / "my.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == PARAGRAPHS
