"""Amounts of memory as texts."""

from __future__ import annotations

import pytest

from megatron_lite.config.units import parse_bytes


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
    "text", ["GiB", "-1GiB", "1e3GiB", "80G", "1GiB2", "", "1 2", "\u0663GiB", "1" * 16]
)
def test_anything_else_is_refused_with_the_flag_and_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="--memory-budget .*such as 40GiB"):
        parse_bytes("--memory-budget", text)


def test_an_amount_below_the_least_is_refused() -> None:
    assert parse_bytes("--memory-budget", "1B", least=1) == 1
    with pytest.raises(ValueError, match="--memory-budget '0GiB' must be at least 1 bytes"):
        parse_bytes("--memory-budget", "0GiB", least=1)
