"""A run that stops and is resumed leaves the same bytes as one that does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpointing.step_files import METADATA
from megatron_lite.config.data_settings import DataConfig
from megatron_lite.config.optimizer_settings import LossScaleConfig, OptimizerConfig
from tests.support.layouts import LAYOUTS
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run
from tests.training.test_experts import MODEL as EXPERTS

LAST, STOP = 6, 3
MUON = OptimizerConfig(optimizer="muon", muon_nesterov=True)
SEQUENCE = dict(tensor_model_parallel_size=2, sequence_parallel=True)
# by name: the ranks, their sizes, options of tiny_run, and fields of its config
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "alone": (1, {}, dict(training=dict(skip_update_on_spike=9.0)), {}),
    "bf16, tp2 sp dp2": (4, SEQUENCE, dict(training=dict(bf16=True)), {}),
    "experts, tp2 sp": (2, SEQUENCE, dict(model=EXPERTS), {}),
    "zero1": (2, {}, dict(data_parallel=LAYOUTS["zero1, overlap"], training=dict(bf16=True)), {}),
    "fsdp2": (
        2,
        {},
        dict(
            data_parallel=LAYOUTS["fsdp2, memory-efficient"],
            model=dict(untie_embeddings_and_output_weights=True),
        ),
        {},
    ),
    "muon": (1, {}, dict(training=dict(bf16=True)), dict(optimizer=MUON)),
    "the loss scale goes up and down": (
        2,
        dict(tensor_model_parallel_size=2),
        dict(training=dict(fp16=True)),
        dict(
            loss_scaling=LossScaleConfig(
                initial_loss_scale=2.0**20, loss_scale_window=1.0, hysteresis=1
            )
        ),
    ),
    "experts, pp2": (2, dict(pipeline_model_parallel_size=2), dict(model=EXPERTS), {}),
    "muon, tp2 sp dp2": (
        4,
        SEQUENCE,
        dict(data_parallel=LAYOUTS["zero1"], training=dict(bf16=True)),
        dict(optimizer=MUON),
    ),
    "shuffled samples": (
        1,
        {},
        {},
        dict(data=DataConfig(seq_length=16, mock_data=True, dataloader_type="cyclic")),
    ),
}


@pytest.mark.runs(daily=2, ci=5)
@pytest.mark.parametrize("name", CASES)
def test_three_iterations_a_restart_and_three_more_equal_six(tmp_path: Path, name: str) -> None:
    """Weights, moments, master weights, random-number streams (dropout is on) and every logged
    loss, over an evaluation. The kept bytes are as predicted."""
    ranks, sizes, options, fields = CASES[name]
    training = dict(train_iters=LAST, eval_interval=STOP, **options.get("training", {}))

    def run(folder: str, stop: int | None, **checkpoint: Any) -> None:
        config = tiny_run(
            **dict(options, training=dict(training, exit_interval=stop)),
            metrics=tmp_path / f"{folder}.jsonl",
            checkpoint=dict(save=str(tmp_path / folder), **checkpoint),
        )
        parallel = replace(config.parallel, **sizes)
        run_to_end(replace(config, parallel=parallel, **fields))

    def work(rank: int, world_size: int) -> None:
        run("whole", None, save_interval=STOP)
        run("parts", STOP)
        run("parts", None, load=str(tmp_path / "parts"))

    run_ranks(work, ranks, detail=False) if ranks > 1 else work(0, 1)
    whole = rows(tmp_path / "whole.jsonl")
    assert rows(tmp_path / "parts.jsonl") == whole and len(whole) == LAST
    for row in whole:
        assert row["activation_bytes_predicted"] == row["activation_bytes_measured"]
    for step in (STOP, LAST):
        expected, found = (step_bytes(tmp_path / folder, step) for folder in ("whole", "parts"))
        assert expected == found != {}
        metadata = [
            json.loads((tmp_path / folder / f"iter_{step:07d}" / METADATA).read_text())
            for folder in ("whole", "parts")
        ]
        assert metadata[0] == metadata[1]
        if name == "alone":
            assert metadata[0]["mean_loss"]["count"] == step
    if "loss scale" in name:
        resumed = whole[STOP:]
        assert any(row["skipped"] for row in resumed)
        assert len({row["loss_scale"] for row in resumed}) > 1
