"""docs/convert.md names exactly the families and the flags that exist."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_lite.config.hf_families import FAMILIES, REASONS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "convert.md").read_text()


def test_the_table_has_every_family_in_order() -> None:
    families = TEXT.partition("## Hugging Face")[2].partition("## Megatron-LM")[0]
    assert re.findall(r"^\| `(\w+)` \|", families, re.MULTILINE) == list(FAMILIES)
    assert not FAMILIES.keys() & REASONS.keys()
