"""A loss or a gradient that is not finite, on one rank: the update is skipped on all alike, said,
written down, and nothing else changes. A spike of the loss is skipped in the same way."""

import json
import math
import re
from contextlib import contextmanager, nullcontext

import pytest
import torch

from megatron_lite.optim.loss_scale import SETTLED, WINDOW, MeanLossState, SpikeGuard
from megatron_lite.optim.optimizer import Optimizer, OptimizerStep
from megatron_lite.training.skipped import SKIPPED_BATCHES
from tests.support.changes import with_settings
from tests.support.rank_faults import (
    NO_DROPOUT,
    SHAPES,
    Poison,
    differing,
    during_iteration,
    in_shape,
    run_until_it_ends,
)
from tests.support.ranks import run_ranks
from tests.support.runs import rows, step_bytes, tiny_run, with_checkpoint
from tests.support.saves import state_of

FINAL_NORM, TIED = "decoder.final_layernorm.weight", "embedding.word_embeddings.weight"
# layout, where the fault is on rank 1, its value, which ranks are named
CASES = [
    # counts in the norm on rank 0 alone
    ("tp2", FINAL_NORM, math.nan, f"rank 1: the gradient of {FINAL_NORM}"),
    ("pp2", FINAL_NORM, -math.inf, f"rank 1: the gradient of {FINAL_NORM}"),
    ("zero1", "gradient", -math.inf, "rank 1: its gradient"),
    ("fsdp2", "loss alone", math.nan, "rank 1: its loss"),
    # gradients are finite, on this rank and the other
    ("tp2", "loss alone", math.inf, "rank 1: its loss"),
    ("pp2", "word_embeddings.weight", math.nan, f"rank 0: the gradient of {TIED}; rank 1: the"),
    ("cp2", FINAL_NORM, math.nan, f"rank 1: its gradient of {FINAL_NORM}"),
    ("dp2", "loss", math.nan, "rank 1: its loss"),
    ("dp2-overlap", FINAL_NORM, math.nan, f"rank 1: its gradient of {FINAL_NORM}"),
    ("zero1-overlap", "loss", math.nan, "rank 1: its loss"),
    ("fsdp2", "gradient", math.inf, f"the gradient of {TIED}"),
]


def run_config(shape, **settings):
    model = NO_DROPOUT if shape == "cp2" else {}
    training = dict(train_iters=5, eval_iters=0, **settings.pop("training", {}))
    return in_shape(tiny_run(**model, **training, **settings), shape)


def _tensors_of(trainer):
    return state_of(trainer.model, trainer.optimizer)


def _poisoned(rank, world_size, config, where, value, iterations):
    """This rank's tensors at the end, what changed in the poisoned iterations, the progress, the
    error, the number of updates, and the state of the loss scale."""
    changed = []
    trainers = []

    @contextmanager
    def fault():
        before = _tensors_of(trainers[0])
        with Poison(where, value) if rank == world_size - 1 else nullcontext():
            yield
        changed.extend(differing(before, _tensors_of(trainers[0])))

    with pytest.MonkeyPatch.context() as monkeypatch:
        during_iteration(monkeypatch, iterations, fault)
        trainer, error = run_until_it_ends(config, trainers.append)
    return (
        _tensors_of(trainer),
        changed,
        trainer.progress,
        None if error is None else str(error),
        trainer.optimizer.num_updates,
        None if (scale := trainer.optimizer.loss_scale) is None else scale.state(),
    )


def _left_out(rank, world_size, config, iterations):
    """The same run, in which the optimizer does nothing in those iterations."""
    true_step = Optimizer.step

    @contextmanager
    def no_update():
        def step(optimizer, *_, **__):
            optimizer.layout.gradients.reduce_()
            nothing = torch.zeros(())
            return OptimizerStep(nothing, nothing, torch.zeros(1))

        Optimizer.step = step
        yield
        Optimizer.step = true_step

    with pytest.MonkeyPatch.context() as monkeypatch:
        during_iteration(monkeypatch, iterations, no_update)
        trainer, error = run_until_it_ends(config)
    assert error is None
    return _tensors_of(trainer)


def written(folder):
    """The rows about skipped batches."""
    return [json.loads(line) for line in (folder / SKIPPED_BATCHES).read_text().splitlines()]


def check_skips_one(shape, config, where, value, at):
    """Not a bit of weights, moments and masters changes in that iteration, and the rest of the run
    is one in which the update was never made."""
    ranks = SHAPES[shape].ranks
    found = run_ranks(_poisoned, ranks, config, where, value, (at,))
    expected = run_ranks(_left_out, ranks, with_checkpoint(config), (at,))
    for (tensors, changed, progress, error, updates, _), oracle in zip(
        found, expected, strict=True
    ):
        assert (changed, error, updates) == ([], None, config.training.train_iters - 1)
        assert (progress.skipped_iterations, progress.skipped_in_a_row) == (1, 0)
        assert differing(tensors, oracle) == []


@pytest.mark.runs
@pytest.mark.parametrize("shape, where, value, named", CASES)
def test_what_is_not_finite_on_one_rank_skips_the_update_on_all(
    tmp_path, shape, where, value, named
):
    config = run_config(
        shape,
        training=dict(max_skipped_updates=2, global_batch_size=4),
        checkpoint=dict(save=str(tmp_path / "save")),
    )
    check_skips_one(shape, config, where, value, 3)
    (row,) = written(tmp_path / "save")
    assert named in row["found_on"]
    expected = dict(iteration=3, reason="not finite", first_sample=8, num_samples=4, in_a_row=1)
    assert row.items() >= expected.items()


def test_so_many_in_a_row_stop_the_run_with_one_message_and_it_goes_on_from_its_checkpoint(
    tmp_path,
):
    """Iteration 3 alone does not; 5, 6 and 7 do. Without the fault the resumed run equals one that
    never had it."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = run_config("dp2", training=dict(max_skipped_updates=3))
    config = with_settings(config, train_iters=9)

    def run(save, load, iterations):
        fault = ("gradient", math.nan, iterations)
        return run_ranks(
            _poisoned,
            2,
            with_checkpoint(config, save=str(save), load=load and str(load), save_interval=4),
            *fault,
        )

    for _, changed, progress, error, *_ in run(parts, None, (3, 5, 6, 7)):
        assert changed == [] and (progress.iteration, progress.skipped_in_a_row) == (7, 3)
        assert re.search(r"iteration 7: .*\(rank 1: its gradient.*--max-skipped-updates 3", error)
    assert (parts / "latest_checkpointed_iteration.txt").read_text() == "4"
    run(parts, parts, ())
    run(whole, None, (3,))
    assert step_bytes(parts, 9) and step_bytes(parts, 9) == step_bytes(whole, 9)
    assert (parts / SKIPPED_BATCHES).read_text() == (whole / SKIPPED_BATCHES).read_text()
    assert len((parts / f"{SKIPPED_BATCHES}.previous").read_text().splitlines()) == 4


@pytest.mark.runs(daily=2, ci=4)
@pytest.mark.parametrize(
    "training, stops_at",
    [
        (dict(), 3),
        (dict(check_for_nan_in_loss_and_grad=False), None),
        (dict(max_skipped_updates=1), 3),
        (dict(max_skipped_updates=2), 4),
        (dict(max_skipped_updates=2, check_for_nan_in_loss_and_grad=False), 4),
    ],
)
def test_what_stops_a_run(training, stops_at):
    _, _, progress, error, *_ = _poisoned(
        0, 1, run_config("alone", training=training), "loss", math.nan, (3, 4, 5)
    )
    assert progress.iteration == (stops_at or 5) and (error is None) == (stops_at is None)
    assert error is None or f"iteration {stops_at}: the loss is nan" in error


@pytest.mark.runs
@pytest.mark.parametrize("shape", ["alone", "tp2", "pp2", "dp2"])
def test_an_overflow_of_a_float16_run_halves_the_scale_on_all_ranks_and_never_counts_in_a_row(
    tmp_path, shape
):
    config = run_config(
        shape,
        training=dict(fp16=True, max_skipped_updates=1),
        checkpoint=dict(save=str(tmp_path)),
        metrics=tmp_path / "rows",
    )
    config = with_settings(config, initial_loss_scale=1024.0, hysteresis=1)
    ranks, fault = SHAPES[shape].ranks, ("gradient", math.inf, (2, 3))
    scales = set()
    for _, changed, progress, error, updates, scale in run_ranks(_poisoned, ranks, config, *fault):
        assert (changed, error, updates) == ([], None, 3)
        assert (progress.skipped_iterations, progress.skipped_in_a_row) == (2, 0)
        scales.add(scale)
    assert [scale.scale for scale in scales] == [256.0]
    found = [(row["reason"], row["loss_scale"], row["in_a_row"]) for row in written(tmp_path)]
    assert found == [("overflow", 1024.0, 0), ("overflow", 512.0, 0)]
    logged = rows(tmp_path / "rows")
    assert [row["loss_scale"] for row in logged] == [1024.0, 1024.0, 512.0, 256.0, 256.0]
    assert [row["grad_norm"] is None for row in logged] == [False, True, True, False, False]


# Spikes.


def spike_config(shape, ratio, **settings):
    config = run_config(shape, **settings)
    return with_settings(
        config, train_iters=SETTLED + 6, global_batch_size=2, skip_update_on_spike=ratio
    )


@pytest.mark.runs
@pytest.mark.parametrize("shape", ["dp2", "tp2", "pp2", "alone", "zero1-overlap", "fsdp2"])
def test_a_spike_is_skipped_on_all_ranks_and_does_not_move_the_mean(tmp_path, shape):
    """The last rank's loss of the first micro-batch is 100 times itself. Under TP the other's is
    not: they skip all the same."""
    config = spike_config(shape, 2.0, checkpoint=dict(save=str(tmp_path)))
    at = SETTLED + 2
    check_skips_one(shape, config, "loss", 100.0, at)
    (row,) = written(tmp_path)
    assert (row["iteration"], row["reason"], row["first_sample"]) == (at, "spike", 2 * (at - 1))
    assert row["lm_loss"] > 2.0 * row["mean_loss"] or shape == "tp2"


def test_the_mean_is_that_of_the_losses_of_updates():
    """Against a plain loop, past the window."""
    guard, mean, count = SpikeGuard(3.0, torch.device("cpu")), 0.0, 0
    for number in range(2 * WINDOW):
        loss = torch.tensor(5.0 + math.sin(number))
        bad = torch.tensor(float(number % 7 == 3))
        assert guard.judge(loss, bad).item() == bad.item()
        if not bad:
            count = min(count + 1, WINDOW)
            mean += (loss.double().item() - mean) / count
    assert guard.state() == MeanLossState(mean=mean, count=WINDOW)
    assert guard.judge(torch.tensor(3.0 * mean * 1.001), torch.zeros(())).item() == 1.0
    assert guard.judge(torch.tensor(3.0 * mean * 0.999), torch.zeros(())).item() == 0.0
