"""docs/adding.md names files and tables that exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding.md").read_text()
TABLES = {
    "NORM_VECTORS": "config.model",
    "ACTIVATIONS": "config.model",
    "NORMS": "model.norm",
    "APEX_NORMS": "model.norm",
    "STATISTICS": "description.norms",
    "PAIRS": "model.activations",
    "REGIONS": "config.regions",
    "RULES": "optim.optimizer",
    "OPTIMIZERS": "config.optimizer_settings",
    "OptimizerConfig": "config.optimizer_settings",
    "FAMILIES": "config.hf_families",
    "LAYOUTS": "convert.hf_tensors",
}


def test_every_path_exists() -> None:
    paths = {
        path
        for path in re.findall(r"`((?:megatron_lite|tests)/[\w/.]*)`", PAGE)
        if "NAME" not in path
    }
    assert len(paths) > 8
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_where_the_page_says(name: str) -> None:
    module = TABLES[name]
    assert f"`{name}`" in PAGE and f"megatron_lite/{module.replace('.', '/')}.py" in PAGE
    assert hasattr(import_module(f"megatron_lite.{module}"), name)
