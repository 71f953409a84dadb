"""Every link of the pages leads somewhere: files, headings in them, and pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from tests.docs.marks import PAGES, ROOT

CHECKED = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").rglob("README.md"))]


def without_code(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)


@lru_cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: list[str] = []
    for title in re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "").strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return frozenset(found)


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", "", without_code(page.read_text()))
    yield from re.findall(r'\]\(([^)\s]+)(?: "[^"]*")?\)', text)


@pytest.mark.parametrize("page", CHECKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_the_index_has_every_page_and_every_page_is_reached() -> None:
    index = set(links(ROOT / "docs" / "README.md"))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= index


def test_the_readme_leads_to_the_index() -> None:
    assert "docs/README.md" in set(links(ROOT / "README.md"))
