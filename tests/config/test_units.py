"""Amounts of memory as texts."""

from __future__ import annotations

import pytest

from megatron_lite.config.units import parse_bytes


def test_a_number_with_a_unit_is_so_many_bytes() -> None:
    for text, expected in {
        "80GiB": 80 * 2**30,
        "80 gib": 80 * 2**30,
        "1.5GB": 1_500_000_000,
        "1B": 1,
        "1073741824": 2**30,
        "2TiB": 2**41,
    }.items():
        assert parse_bytes("--memory-budget", text, least=1) == expected


@pytest.mark.parametrize(
    "text", ["GiB", "-1GiB", "1e3GiB", "80G", "1GiB2", "", "1 2", "\u0663GiB", "1" * 16, "0GiB"]
)
def test_anything_else_is_refused_with_the_flag_and_the_text(text: str) -> None:
    with pytest.raises(ValueError, match=f"--memory-budget '{text}'"):
        parse_bytes("--memory-budget", text, least=1)
