"""Whole runs in every layout over data-parallel ranks: their checkpoints, their evaluations and
their figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.config.run import RunConfig
from tests.support.layouts import LAYOUTS
from tests.support.pairs import only
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run

UNTIED = dict(untie_embeddings_and_output_weights=True)


def _config(layout: str, *, bf16: bool = False, iterations: int = 6, **options: Any) -> RunConfig:
    """Evaluates and saves at iteration 3 of 6, in this order."""
    training = dict(
        train_iters=iterations,
        bf16=bf16,
        eval_interval=3,
        exit_interval=options.pop("exit_interval", None),
    )
    return tiny_run(data_parallel=LAYOUTS[layout], training=training, **options)


def _run(rank: int, world_size: int, *configs: RunConfig) -> list[str | None]:
    """What was wrong with the bytes that each run kept."""
    return [run_to_end(config).activation_bytes.fault for config in configs]


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize(
    ("layout", "bf16"),
    [
        ("zero1, overlap", True),
        pytest.param("fsdp2, memory-efficient", True, marks=pytest.mark.long),
        pytest.param("fsdp2", False, marks=pytest.mark.long),
    ],
)
def test_three_iterations_a_restart_and_three_more_equal_six(
    tmp_path: Path, layout: str, bf16: bool
) -> None:
    """Weights, moments, master weights, random-number streams (dropout is on) and every logged
    loss. The kept bytes are as predicted: gathered weights are none of them."""
    model = UNTIED if layout == "fsdp2" else {}
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")

    def config(name: str, exit_interval: int | None = None, **checkpoint: Any) -> RunConfig:
        return _config(
            layout,
            bf16=bf16,
            model=model,
            metrics=tmp_path / f"{name}.jsonl",
            exit_interval=exit_interval,
            checkpoint=checkpoint,
        )

    runs = (
        config("whole", save=whole, save_interval=3),
        config("parts", 3, save=parts),
        config("parts", save=parts, load=parts),
    )
    assert run_ranks(_run, 2, *runs, detail=False) == [[None] * 3] * 2
    assert rows(tmp_path / "parts.jsonl") == rows(tmp_path / "whole.jsonl")
    assert step_bytes(tmp_path / "whole", 3) == step_bytes(tmp_path / "parts", 3)
    assert len(step_bytes(tmp_path / "whole", 6)) == 4 and step_bytes(
        tmp_path / "whole", 6
    ) == step_bytes(tmp_path / "parts", 6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("bf16", "tp_size"), [(False, 1), pytest.param(True, 2, marks=pytest.mark.long)]
)
def test_a_checkpoint_is_the_same_file_whatever_layout_loads_and_saves_it(
    tmp_path: Path, bf16: bool, tp_size: int
) -> None:
    """Saved by replicas, then loaded and saved again, without a step between, by each layout after
    the other."""

    def config(layout: str, save: Path, load: Path | None) -> RunConfig:
        return _config(
            layout,
            bf16=bf16,
            iterations=2,
            tp_size=tp_size,
            checkpoint=dict(save=str(save), load=None if load is None else str(load)),
        )

    names = [name for name in LAYOUTS if name != "replicated"]
    folders = [tmp_path / str(number) for number in range(len(names) + 2)]
    order = ["replicated", *names, "replicated"]
    runs = [
        config(layout, folder, load)
        for layout, folder, load in zip(order, folders, [None, *folders], strict=False)
    ]
    run_ranks(_run_all, 2 * tp_size, runs, detail=False)
    expected = step_bytes(folders[0], 2)
    assert len(expected) == 4 * tp_size
    for layout, folder in zip(order, folders, strict=True):
        assert step_bytes(folder, 2) == expected, layout


def _run_all(rank: int, world_size: int, configs: list[RunConfig]) -> None:
    for config in configs:
        run_to_end(config)


@pytest.mark.runs(daily=1, ci=4)
@pytest.mark.parametrize(
    "policy", only(["*:full/2", "*:pointwise@host", "*:core_attn+mlp", "*:ops(matmul)"], 0, 1)
)
def test_kept_bytes_are_as_predicted_with_recomputation_and_sharded_weights(policy: str) -> None:
    config = replace(
        _config("fsdp2, memory-efficient", iterations=1, model=UNTIED),
        recompute=RecomputeConfig(recompute_policy=policy, recompute_verify=True),
    )
    assert run_ranks(_run, 2, config, detail=False) == [[None]] * 2
