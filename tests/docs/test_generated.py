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


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_what_commands_print_is_not_stale(page):
    if any(block.kind in ("output of", "printed") for block in blocks(page)):
        assert difference(page) == ""


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
