"""benchmarks/two_cards.sh, rehearsed over gloo."""

import pytest

from benchmarks.two_cards import LAYOUTS, POLICIES, main


@pytest.mark.weekly
def test_every_layout_equals_one_rank(capsys):
    assert main(["--device", "cpu", "--steps", "3"]) == 0
    printed = capsys.readouterr().out
    for layout in LAYOUTS:
        assert printed.count(f"{layout:18}") == len(POLICIES)
    assert printed.count("as predicted") >= 3 * len(LAYOUTS)
    assert "refused: pretrain_gpt.py: error: --recompute-policy" in printed
