"""Runs in float16: the loss scale follows overflows, on every rank alike, through checkpoints, and
nothing else changes."""

import math
from functools import partial

import pytest

from megatron_lite.training.step import TrainingError
from tests.support.rank_faults import NO_DROPOUT, Poison, during_iteration
from tests.support.runs import rows, run_to_end, tiny_run

CALM = dict(initial_loss_scale=1024.0)  # overflows nowhere by itself
OVERFLOW = partial(Poison, "gradient", math.inf)


def fp16_run(scaling=CALM, **settings):
    return tiny_run(fp16=True, **scaling, **settings)


def test_losses_stay_near_those_of_float32(tmp_path):
    """Values are rounded to 11 bits, and the errors of 20 steps add up: 1%. The scale is not in the
    loss."""
    run_to_end(tiny_run(metrics=tmp_path / "fp32", **NO_DROPOUT))
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


@pytest.mark.parametrize(
    "scaling, iteration",
    [
        # 4 is lowered to 2, which cannot be lowered
        (dict(initial_loss_scale=4.0, min_loss_scale=2.0, hysteresis=1), 3),
        (dict(loss_scale=16.0), 2),
    ],
)
def test_an_overflow_that_no_lower_scale_can_mend_stops_the_run(monkeypatch, scaling, iteration):
    during_iteration(monkeypatch, (2, 3), OVERFLOW)
    minimum = scaling.get("loss_scale", 2.0)
    with pytest.raises(
        TrainingError,
        match=rf"iteration {iteration}: .* with loss scale {minimum} \(at least {minimum}\)",
    ):
        run_to_end(fp16_run(scaling))


def test_a_skipped_update_does_not_advance_the_learning_rate_nor_does_a_restart(
    monkeypatch, tmp_path
):
    """As in Megatron, where a scale of 2^32 skips some 15 updates before the first one."""

    def run(iterations, **checkpoint):
        run_to_end(
            fp16_run(
                dict(CALM, hysteresis=3),
                lr=0.01,
                lr_decay_style="linear",
                lr_warmup_iters=2,
                lr_decay_iters=9,
                train_iters=iterations,
                eval_iters=0,
                metrics=tmp_path / "metrics",
                **checkpoint,
            )
        )
        return [row["learning_rate"] for row in rows(tmp_path / "metrics")]

    calm = run(6)
    assert len(set(calm)) == 6
    (tmp_path / "metrics").unlink()
    during_iteration(monkeypatch, (2, 4), OVERFLOW)
    folder = str(tmp_path / "saved")
    held = [calm[0], calm[1], calm[1], calm[2], calm[2]]
    assert run(5, save=folder) == held
    assert run(8, load=folder, save=folder) == [*held, *calm[3:6]]
