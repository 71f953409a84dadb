"""docs/reliability.md names tests that exist, and leaves out no file of faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Links such as [`faults/test_a.py`](../tests/faults/test_a.py "test_one, test_two").
LINKS = re.findall(
    r"\[`(\w+/test_\w+\.py)`\]\(\.\./tests/([\w/]+\.py)(?: \"([\w, ]+)\")?\)",
    (ROOT / "docs" / "reliability.md").read_text(),
)
NAMED = [(path, name) for path, _, names in LINKS for name in names.split(", ")]


def test_a_link_leads_to_the_file_that_it_shows() -> None:
    assert LINKS and all(shown == target for shown, target, _ in LINKS)
    text = (ROOT / "docs" / "reliability.md").read_text()
    assert len(LINKS) == len(re.findall(r"\[`[^`]*test_", text))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_is_named_exists(path: str, name: str) -> None:
    source = (ROOT / "tests" / path).read_text()
    assert not name or f"def {name}(" in source


def test_every_file_of_fault_tests_is_named() -> None:
    files = {f"faults/{path.name}" for path in (ROOT / "tests" / "faults").glob("test_*.py")}
    assert files and files <= {path for path, _ in NAMED}
