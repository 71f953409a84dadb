"""The budgets of the code: no count of tests/counts.py is above its own."""

import pytest

from tests.counts import BUDGETS, ROOT, counts


@pytest.mark.long
def test_no_count_is_above_its_budget():
    found = {name: n for name, n in counts(ROOT) if not name.startswith("bytes of ")}
    assert found.keys() == BUDGETS.keys()
    assert {name: value for name, value in found.items() if value > BUDGETS[name]} == {}
    assert all(value > 0 for name, value in found.items() if name.startswith(("own", "tokens")))
