"""docs/convert.md names exactly the families and the flags that exist."""

from __future__ import annotations

import re
from pathlib import Path

from arguments import build_parser, supported_flags
from megatron_lite.config.hf_families import FAMILIES, REASONS
from megatron_lite.tools.convert import parser

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "convert.md").read_text()


def test_the_table_has_every_family_in_order() -> None:
    assert re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE) == list(FAMILIES)
    assert not FAMILIES.keys() & REASONS.keys()


def test_every_flag_in_the_text_exists() -> None:
    known = {flag for action in parser().actions for flag in action.option_strings}
    found = set(re.findall(r"--[a-z][\w-]+", TEXT)) - {"--nproc_per_node"}
    assert found <= known | set(supported_flags(build_parser())) and len(found) > 8
