"""Every figure and every block of output on the pages is made by a command, and is not stale."""

import pytest

from tests.docs import figures
from tests.docs.generate import difference, is_quick
from tests.docs.marks import COMMANDS, PAGES, ROOT, blocks

BLOCKS = [block for page in PAGES for block in blocks(page)]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_what_is_made_of_results_and_of_the_package_is_not_stale(page):
    assert difference(page, is_quick) == ""


COMMAND_PAGES = [page for page in PAGES if "output of" in {one.kind for one in blocks(page)}]
# Pages that show the same command stand in one test, so that it runs once.
SHARED = [page for page in COMMAND_PAGES if page.name in ("README.md", "planning.md")]


@pytest.mark.long
@pytest.mark.parametrize(
    "pages", [SHARED, *([page] for page in COMMAND_PAGES if page not in SHARED)]
)
def test_what_commands_print_is_not_stale(pages):
    assert [difference(page) for page in pages] == [""] * len(pages)


@pytest.mark.long
@pytest.mark.parametrize("path", figures.FILES, ids=lambda path: path.name)
def test_a_picture_is_not_stale(path):
    assert path.read_text(encoding="utf-8") == figures.FILES[path]()


def test_every_block_has_a_mark_that_fits_it():
    assert len(BLOCKS) > 40
    wrong = [
        block.name
        for block in BLOCKS
        if not block.kind
        or (block.language in COMMANDS) is not (block.kind in ("run", "not run"))
        or (block.kind in ("not run", "not output") and not block.value)
    ]
    assert wrong == []
