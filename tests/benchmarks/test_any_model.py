"""The benchmark of recomputation on models that are not ours runs, and counts what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import any_model


@pytest.mark.slow
def test_every_engine_is_timed_and_keeps_less_than_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "any_model.json"
    sizes = [
        "--num-layers",
        "2",
        "--hidden-size",
        "16",
        "--num-attention-heads",
        "2",
        "--vocab-size",
        "64",
        "--seq-length",
        "64",
    ]
    assert any_model.main([*sizes, "--repeats", "1", "--device", "cpu", "--json", str(file)]) == 0
    rows = {row["engine"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows.keys() == any_model.ENGINES.keys() and all(
        name in capsys.readouterr().out for name in ["ours, full"]
    )
    none = rows[any_model.NONE]["kept_bytes"]
    assert all(row["kept_bytes"] < none for name, row in rows.items() if name != any_model.NONE)
    # of 2 layers; torch keeps them too, where nobody counts
    states = 2 * torch.get_rng_state().numel()
    assert rows["ours, full"]["kept_bytes"] - states <= rows["torch, full"]["kept_bytes"]
