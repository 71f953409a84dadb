"""Runs in float16: the loss scale follows overflows, on every rank alike, through checkpoints, and
nothing else changes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpointing.step_files import METADATA
from megatron_lite.config.optimizer_settings import LossScaleConfig, LrScheduleConfig
from megatron_lite.config.run import RunConfig
from megatron_lite.model.gpt import GPTModel
from megatron_lite.training.step import TrainingError
from tests.support.ranks import run_ranks
from tests.support.runs import rows, run_to_end, step_bytes, tiny_run

NO_DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)
CALM = dict(initial_loss_scale=1024.0)  # overflows nowhere by itself


def fp16_run(
    scaling: dict[str, Any] = CALM, *, training: dict[str, Any] | None = None, **settings: Any
) -> RunConfig:
    config = tiny_run(training=dict(fp16=True, **(training or {})), **settings)
    return replace(config, loss_scaling=LossScaleConfig(**scaling))


def overflow_in(
    monkeypatch: pytest.MonkeyPatch, iterations: tuple[int, ...], *, num_microbatches: int
) -> None:
    """One element of one parameter's gradient is infinite in the first micro-batch of those
    iterations, in this process."""
    true_hidden_states, calls = GPTModel.hidden_states, []

    def hidden_states(self: GPTModel, *inputs: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) in [num_microbatches * (iteration - 1) + 1 for iteration in iterations]:

            def overflow(grad: torch.Tensor) -> torch.Tensor:
                handle.remove()
                return torch.where(torch.arange(grad.numel()).view_as(grad) == 3, math.inf, grad)

            bias = next(
                value
                for name, value in self.named_parameters()
                if name.endswith("mlp.linear_fc1.bias")
            )
            handle = bias.register_hook(overflow)
        return true_hidden_states(self, *inputs)

    monkeypatch.setattr(GPTModel, "hidden_states", hidden_states)


def _overflow_on_one(
    rank: int, world_size: int, axis: str, folder: Path, iterations: int
) -> tuple[Any, ...]:
    """Skipped iterations, the loss scale, and this rank's weights by name, where one rank's third
    step overflows."""
    sizes = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}
    config = fp16_run(
        dict(CALM, hysteresis=1),
        metrics=folder / f"{iterations}",
        training=dict(train_iters=iterations, eval_iters=0),
    )
    config = replace(
        config, parallel=replace(config.parallel, **({sizes[axis]: 2} if axis in sizes else {}))
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        if rank == (0 if axis == "pp" else 1):  # the stage that does not compute the loss
            overflow_in(monkeypatch, (3,), num_microbatches=2 if axis == "dp" else 4)
        trainer = run_to_end(config)
    assert trainer.optimizer.loss_scale is not None
    weights = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    return trainer.progress.skipped_iterations, trainer.optimizer.loss_scale.scale.item(), weights


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize(
    "axis",
    [pytest.param("dp", marks=pytest.mark.long), pytest.param("tp", marks=pytest.mark.long), "pp"],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all_halves_the_scale_and_training_recovers(
    tmp_path: Path, axis: str
) -> None:
    before = run_ranks(_overflow_on_one, 2, axis, tmp_path, 2, detail=False)
    skipped = run_ranks(_overflow_on_one, 2, axis, tmp_path, 3, detail=False)
    assert [rank[:2] for rank in before] == [(0, 1024.0)] * 2 and [
        rank[:2] for rank in skipped
    ] == [(1, 512.0)] * 2
    for (*_, old), (*_, new) in zip(before, skipped, strict=True):
        assert all(torch.equal(value, new[name]) for name, value in old.items())
    recovered = run_ranks(_overflow_on_one, 2, axis, tmp_path, 20, detail=False)
    assert [rank[:2] for rank in recovered] == [(1, 512.0)] * 2
    if axis == "dp":
        assert all(
            torch.equal(value, recovered[1][2][name]) for name, value in recovered[0][2].items()
        )
    written = rows(tmp_path / "20")
    assert [row["iteration"] for row in written if row["skipped"]] == [3]
    assert [row["loss_scale"] for row in written] == [1024.0] * 3 + [512.0] * 17
    assert written[2]["grad_norm"] is None and written[2]["lm_loss"] > 0.0
    assert written[-1]["lm_loss"] < 0.8 * written[0]["lm_loss"]


def test_losses_stay_near_those_of_float32(tmp_path: Path) -> None:
    """Values are rounded to 11 bits, and the errors of 20 steps add up: 1%. The scale is not in the
    loss."""
    run_to_end(tiny_run(metrics=tmp_path / "fp32", model=NO_DROPOUT))
    run_to_end(
        fp16_run(
            dict(initial_loss_scale=2.0**15, loss_scale_window=5),
            metrics=tmp_path / "fp16",
            model=NO_DROPOUT,
        )
    )
    expected, found = rows(tmp_path / "fp32"), rows(tmp_path / "fp16")
    assert not any(row["skipped"] for row in found)
    assert {row["loss_scale"] for row in found} == {2.0**15, 2.0**16, 2.0**17, 2.0**18}
    for key, off in (("lm_loss", 0.01), ("grad_norm", 0.1)):
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=off)
    assert expected[-1]["lm_loss"] < 0.8 * expected[0]["lm_loss"]


# falls to where it fits, then goes up and down
RESTLESS = dict(initial_loss_scale=2.0**24, loss_scale_window=3)


def _run(
    rank: int, world_size: int, folder: Path, metrics: Path, exit_interval: int | None, load: bool
) -> None:
    run_to_end(
        fp16_run(
            RESTLESS,
            tp_size=2,
            sequence_parallel=True,
            metrics=metrics,
            training=dict(exit_interval=exit_interval, train_iters=30),
            checkpoint=dict(save=str(folder), load=str(folder) if load else None),
        )
    )


@pytest.mark.long
def test_a_resumed_run_leaves_the_same_bytes_and_the_same_scale(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_ranks(_run, 2, whole, tmp_path / "whole.jsonl", None, False, detail=False)
    run_ranks(_run, 2, parts, tmp_path / "parts.jsonl", 16, False, detail=False)
    run_ranks(_run, 2, parts, tmp_path / "parts.jsonl", None, True, detail=False)
    expected = rows(tmp_path / "whole.jsonl")
    assert rows(tmp_path / "parts.jsonl") == expected
    assert step_bytes(parts, 30) == step_bytes(whole, 30)
    metadata = [
        json.loads((folder / "iter_0000030" / METADATA).read_text()) for folder in (whole, parts)
    ]
    assert metadata[0] == metadata[1] and metadata[0]["loss_scale"] is not None
    resumed = expected[16:]
    assert (
        any(row["skipped"] for row in resumed) and len({row["loss_scale"] for row in resumed}) > 1
    )


def test_a_checkpoint_goes_on_in_another_precision(tmp_path: Path) -> None:
    """The masters are taken over unrounded; a float16 run that finds no scale begins with the
    initial one."""
    run_to_end(tiny_run(training=dict(train_iters=3), checkpoint=dict(save=str(tmp_path / "fp32"))))
    half = run_to_end(
        fp16_run(
            training=dict(train_iters=3),
            checkpoint=dict(load=str(tmp_path / "fp32"), save=str(tmp_path / "fp16")),
        )
    )
    single = run_to_end(
        tiny_run(training=dict(train_iters=3), checkpoint=dict(load=str(tmp_path / "fp32")))
    )
    assert (
        half.optimizer.loss_scale is not None and half.optimizer.loss_scale.scale.item() == 1024.0
    )
    rounded = dict(half.model.named_parameters())
    for name, parameter in single.model.named_parameters():
        assert torch.equal(half.optimizer.states[name]["master"], parameter) and torch.equal(
            rounded[name], parameter.half()
        )


@pytest.mark.parametrize(
    ("scaling", "iteration"),
    [
        # 4 is lowered to 2, which cannot be lowered
        (dict(initial_loss_scale=4.0, min_loss_scale=2.0, hysteresis=1), 3),
        (dict(loss_scale=16.0), 2),
    ],
)
def test_an_overflow_that_no_lower_scale_can_mend_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, scaling: dict[str, float], iteration: int
) -> None:
    overflow_in(monkeypatch, (2, 3), num_microbatches=4)
    minimum = scaling.get("loss_scale", 2.0)
    with pytest.raises(
        TrainingError,
        match=rf"iteration {iteration}: .* with loss scale {minimum} \(at least {minimum}\)",
    ):
        run_to_end(fp16_run(scaling))


def test_a_skipped_update_does_not_advance_the_learning_rate_nor_does_a_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in Megatron, where a scale of 2^32 skips some 15 updates before the first one."""

    def run(iterations: int, **checkpoint: str) -> list[float]:
        config = fp16_run(
            dict(CALM, hysteresis=3),
            metrics=tmp_path / "metrics",
            training=dict(train_iters=iterations, eval_iters=0),
            checkpoint=checkpoint,
        )
        schedule = LrScheduleConfig(
            lr=0.01, lr_decay_style="linear", lr_warmup_iters=2, lr_decay_iters=9
        )
        run_to_end(replace(config, lr_schedule=schedule))
        return [row["learning_rate"] for row in rows(tmp_path / "metrics")]

    calm = run(6)
    assert len(set(calm)) == 6
    (tmp_path / "metrics").unlink()
    overflow_in(monkeypatch, (2, 4), num_microbatches=4)
    folder = str(tmp_path / "saved")
    held = [calm[0], calm[1], calm[1], calm[2], calm[2]]
    assert run(5, save=folder) == held
    assert run(8, load=folder, save=folder) == [*held, *calm[3:6]]
