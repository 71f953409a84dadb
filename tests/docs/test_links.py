"""Every link of the pages leads somewhere: files, headings in them, and pictures. And the tests of
faults that a page lists are those that there are."""

import re
from functools import lru_cache

from tests.docs.marks import PAGES, ROOT, text_of
from tests.support.pairs import in_one_test

CHECKED = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").rglob("README.md"))]


def without_code(text):
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)


@lru_cache
def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    found = []
    for title in re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).replace("`", "").strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return frozenset(found)


def links(page):
    text = re.sub(r"`[^`\n]*`", "", without_code(page.read_text()))
    yield from re.findall(r'\]\(([^)\s]+)(?: "[^"]*")?\)', text)


@in_one_test("page", CHECKED)
def test_every_link_leads_somewhere(page):
    dead = []
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_the_index_has_every_page_and_every_page_is_reached():
    index = set(links(ROOT / "docs" / "README.md"))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= index


def test_reliability_names_tests_that_exist_and_every_file_of_faults():
    page = text_of("reliability")
    # Links such as [`faults/test_a.py`](../tests/faults/test_a.py "test_one, test_two").
    found = re.findall(
        r"\[`(\w+/test_\w+\.py)`\]\(\.\./tests/([\w/]+\.py)(?: \"([\w, ]+)\")?\)", page
    )
    assert len(found) == len(re.findall(r"\[`[^`]*test_", page)) > 0
    for shown, path, names in found:
        assert shown == path
        source = (ROOT / "tests" / path).read_text()
        assert not [one for one in names.split(", ") if one and f"def {one}(" not in source], path
    files = {f"faults/{path.name}" for path in (ROOT / "tests" / "faults").glob("test_*.py")}
    assert files and files <= {path for _, path, _ in found}
