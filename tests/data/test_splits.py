from __future__ import annotations

import pytest

from megatron_lite.config.checks import InputError
from megatron_lite.data.splits import parse_split, split_documents


@pytest.mark.parametrize(
    ("split", "documents", "expected"),
    [
        ("969, 30, 1", 1000, ((0, 969), (969, 999), (999, 1000))),
        ("969, 30, 1", 38, ((0, 37), (37, 38), (38, 38))),
        ("99,1,0", 250, ((0, 248), (248, 250), (250, 250))),  # 247.5 rounds to even
        ("1", 7, ((0, 7), (7, 7), (7, 7))),
        ("1,1", 7, ((0, 4), (4, 7), (7, 7))),
        ("0, 0.25, .75", 8, ((0, 0), (0, 2), (2, 8))),
        ("8e1,2e1", 10, ((0, 8), (8, 10), (10, 10))),
        ("969, 30, 1", 0, ((0, 0), (0, 0), (0, 0))),
    ],
)
def test_split_gives_the_ranges_worked_out_by_hand(
    split: str, documents: int, expected: tuple[tuple[int, int], ...]
) -> None:
    assert split_documents(split, documents) == expected


@pytest.mark.parametrize(
    "split",
    [
        "",
        "a",
        "1,2,3,4",
        "0,0,0",
        "1,-1,0",
        "nan",
        "inf,1",
        "1,,2",
        "969/30/1",
        "1;2",
        "1e308,1e308",
    ],
)
def test_a_bad_split_names_itself_and_the_rule(split: str) -> None:
    with pytest.raises(
        InputError,
        match=r"--split '.*' must be 1 to 3 numbers >= 0, not all 0, .* such as '969, 30, 1'",
    ):
        parse_split(split)
