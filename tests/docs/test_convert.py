"""docs/convert.md names exactly the families and the flags that exist."""

from __future__ import annotations

import re
from pathlib import Path

from arguments import build_parser, supported_flags
from megatron_lite.config.hf_families import FAMILIES, REASONS
from megatron_lite.tools.convert import parser

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "convert.md").read_text()

OF_OTHERS = {
    "--nproc_per_node",
    "--ckpt-format",
    "--dist-ckpt-optim-fully-reshardable",
    "--transformer-impl",
    "--no-load-rng",
    "--override-opt_param-scheduler",
    "--no-load-optim",
}


def test_the_table_has_every_family_in_order() -> None:
    families = TEXT.partition("## Hugging Face")[2].partition("## Megatron-LM")[0]
    assert re.findall(r"^\| `(\w+)` \|", families, re.MULTILINE) == list(FAMILIES)
    assert not FAMILIES.keys() & REASONS.keys()


def test_every_flag_in_the_text_exists() -> None:
    known = {flag for action in parser().actions for flag in action.option_strings}
    found = set(re.findall(r"--[a-z][\w-]+", TEXT)) - OF_OTHERS
    assert found <= known | set(supported_flags(build_parser())) and len(found) > 8
