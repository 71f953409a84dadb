"""The peaks of an evaluation and of a save, in real runs on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpointing import snapshot as snapshot_module
from megatron_lite.config.run import RunConfig
from megatron_lite.memory.measure.allocator_peak import allocator_peak
from megatron_lite.memory.predict.save_peak import save_peak
from megatron_lite.memory.predict.step_peak import step_peak
from megatron_lite.parallel.state import parallel_state
from megatron_lite.training.batches import MicroBatches
from megatron_lite.training.build_trainer import build_trainer
from megatron_lite.training.peak_memory import PeakMeter
from megatron_lite.training.step import StageRunner
from tests.support.runs import tiny_run

LARGE = dict(num_layers=4, hidden_size=128)
FULL = dict(recompute_granularity="full", recompute_method="uniform")


def run_of(tmp_path: Path, *, full: bool = False, **settings: Any) -> RunConfig:
    run = tiny_run(
        model=LARGE,
        training=dict(micro_batch_size=4, global_batch_size=4, train_iters=2, **settings),
        checkpoint=dict(save=str(tmp_path / "save")),
    )
    return replace(run, recompute=replace(run.recompute, **FULL)) if full else run


def measured(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Returns the bytes at the peak of an evaluation, and those that a save copies at most."""
    found: dict[str, int] = {}

    def take_snapshot(*args: Any, **options: Any) -> Any:
        with allocator_peak() as copied:
            snapshot = snapshot_module.take_snapshot(*args, **options)
        found["copy"] = copied.peak_bytes
        return snapshot

    monkeypatch.setattr("megatron_lite.training.loop.take_snapshot", take_snapshot)
    with parallel_state(config.parallel, seed=1) as parallel:
        trainer = build_trainer(config, parallel)
        meter = PeakMeter(trainer.model, trainer.optimizer, parallel.device)
        trainer.run()
        batches = MicroBatches(
            dataset=trainer.datasets.train,
            consumed_samples=0,
            num_microbatches=1,
            micro_batch_size=4,
            parallel=parallel,
        )
        runner = StageRunner.of(config, trainer.model, parallel)
        with meter.step():
            runner.evaluate(batches)
        assert meter.peak_bytes is not None
        found["evaluation"] = meter.peak_bytes
    return found


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_an_evaluation_needs_less_than_a_step_and_a_save_copies_what_is_predicted(
    tmp_path: Path, bf16: bool, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of(tmp_path, full=full, bf16=bf16)
    step = step_peak(config, 0, device="cpu", dp_cp_size=1, num_microbatches=1)
    found = measured(config, monkeypatch)
    assert found["evaluation"] < step.num_bytes
    save = save_peak(config, step, device="cpu", dp_cp_size=1)
    assert save is not None
    # The rows of padded ids are not saved, and the allocator rounds each tensor up to 64 bytes.
    assert 0.95 * save.terms[-1].num_bytes < found["copy"] < 1.01 * save.terms[-1].num_bytes


def test_no_save_and_no_cpu_have_no_peak_of_their_own(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    step = step_peak(config, 0, device="cpu", dp_cp_size=1, num_microbatches=1)
    assert save_peak(config, step, device="cuda", dp_cp_size=1) is None
    without = replace(config, checkpoint=replace(config.checkpoint, save=None))
    assert save_peak(without, step, device="cpu", dp_cp_size=1) is None
