"""A plain text file becomes documents by the command of the page."""

import json
import subprocess
from pathlib import Path

from tests.support.commands import ROOT
from tests.support.limits import HANG_S

PARAGRAPHS = ["A first one,\nof two lines.", "A 'second' one: \"quoted\"."]


def test_each_paragraph_of_a_plain_text_becomes_a_document(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    before = page[: page.index("< my.txt")]
    command = page[before.rindex("python -c") :].partition("\n```")[0]
    (tmp_path / "my.txt").write_text("\n\n".join([PARAGRAPHS[0], "", PARAGRAPHS[1]]) + "\n\n")
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=HANG_S)
    lines = (tmp_path / "my.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == PARAGRAPHS
