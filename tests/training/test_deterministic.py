"""--deterministic-mode: no run reads uninitialised memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lite.config.recompute import RecomputeConfig
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run


@pytest.fixture(autouse=True)
def torchs_settings() -> Iterator[None]:
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize("policy", ["*:none", "*:full", "*:core_attn+layernorm+mlp"])
@pytest.mark.parametrize("training", [dict(bf16=True), dict(loss_chunk_size=7)], ids=str)
def test_no_figure_depends_on_memory_that_nothing_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: dict[str, Any], policy: str
) -> None:
    """torch fills new tensors with NaN and the largest integers in the first run, and the run turns
    that off in the second."""

    def run(name: str) -> dict[str, bytes]:
        config = tiny_run(
            metrics=tmp_path / name,
            training=dict(deterministic_mode=True, train_iters=4, **training),
            checkpoint=dict(save=str(tmp_path / f"c{name}")),
        )
        run_to_end(replace(config, recompute=RecomputeConfig(recompute_policy=policy)))
        return step_bytes(tmp_path / f"c{name}", 4)

    plain = run("plain")
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert torch.are_deterministic_algorithms_enabled()
    with monkeypatch.context() as patch:
        poisoned = SimpleNamespace(fill_uninitialized_memory=True)
        patch.setattr(torch.utils, "deterministic", poisoned)
        torch._C._set_deterministic_fill_uninitialized_memory(True)
        assert torch.empty(3).isnan().all()
        weights = run("poisoned")
    assert weights == plain
    assert rows(tmp_path / "poisoned") == rows(tmp_path / "plain")
