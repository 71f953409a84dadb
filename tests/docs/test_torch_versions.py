"""One range of torch: in setup.py, in messages of the library, in the script and on the page."""

import re

from megatron_lite.parallel.torch_internals import FIRST_UNTRIED, OLDEST
from tests.docs import torch_versions
from tests.docs.marks import ROOT

SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def release(version):
    """Returns (2, 13) of "2.13" and of "2.13.0"."""
    return tuple(int(part) for part in version.split("."))[:2]


def test_setup_allows_the_range_that_messages_name_and_the_pinned_release_is_in_it():
    assert re.findall(r'"torch>=([\d.]+),<([\d.]+)"', SETUP) == [(OLDEST, FIRST_UNTRIED)]
    (pinned,) = re.findall(
        r"^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M
    )
    assert release(OLDEST) <= release(pinned) < release(FIRST_UNTRIED)


def test_the_recorded_results_are_of_the_ends_of_the_range_and_without_failures():
    rows = {release(row["torch"]): row for row in torch_versions.recorded()}
    major, minor = release(FIRST_UNTRIED)
    assert set(rows) == {release(OLDEST), (major, minor - 1)}
    for row in rows.values():
        assert row["failed"] == 0 < row["passed"]
