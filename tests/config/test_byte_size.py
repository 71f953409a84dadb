"""Amounts of memory as texts."""

from __future__ import annotations

import pytest

from megatron_lite.config.byte_size import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("512MiB", 512 * 2**20),
        ("1B", 1),
        ("1073741824", 2**30),
        ("0", 0),
        ("2TiB", 2**41),
    ],
)
def test_a_number_with_a_unit_is_so_many_bytes(text: str, expected: int) -> None:
    assert parse_bytes("--memory-budget", text) == expected


@pytest.mark.parametrize(
    "text",
    ["80", "GiB", "-1GiB", "1e3GiB", "80G", "0.1B", "0GiB", "9999999TiB", "1GiB2", "", "٣GiB"],
)
def test_anything_else_is_refused_with_the_flag_and_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="--memory-budget .*such as 40GiB"):
        parse_bytes("--memory-budget", text)
