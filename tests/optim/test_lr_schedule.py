"""Learning-rate schedules: those of megatron-core, stored and refused."""

import itertools
from types import SimpleNamespace

import pytest

from megatron_lite.config.batch_schedule import BatchSchedule
from megatron_lite.config.optimizer_settings import (
    LR_DECAY_STYLES,
    WSD_DECAY_STYLES,
    LrScheduleConfig,
)
from megatron_lite.optim.lr_schedule import LrSchedule


def schedule(num_iterations=10, batch_size=4, **config):
    return LrSchedule.build(
        LrScheduleConfig(**{"lr": 1.0, **config}),
        train_samples=num_iterations * batch_size,
        batches=BatchSchedule(steps=((0, batch_size),)),
    )


def test_a_warm_up_may_be_a_share_of_the_decay():
    lr = schedule(lr_decay_style="linear", lr_warmup_fraction=0.25)
    assert [lr.at(consumed) for consumed in (5, 10, 25)] == pytest.approx([0.5, 1.0, 0.5])


STYLES = pytest.mark.parametrize(
    "style, wsd_style",
    [
        (style, wsd_style)
        for style in LR_DECAY_STYLES
        for wsd_style in (WSD_DECAY_STYLES if style == "WSD" else WSD_DECAY_STYLES[:1])
    ],
)


def configs(style, wsd_style):
    """With and without warm-up, a floor, and a decay shorter or longer than a run of 20
    iterations."""
    for warmup, min_lr, decay_iters in itertools.product((0, 3), (0.0, 1e-5), (None, 11, 31)):
        yield LrScheduleConfig(
            lr=3e-4,
            min_lr=min_lr,
            lr_decay_style=style,
            lr_decay_iters=decay_iters,
            lr_warmup_iters=warmup,
            lr_warmup_init=1e-6 if warmup else 0.0,
            lr_wsd_decay_style=wsd_style,
            lr_wsd_decay_iters=4 if style == "WSD" else None,
        )


def megatrons_scheduler(config, groups, *, decay=120, **options):
    """OptimizerParamScheduler of a run of 20 iterations of 6 samples."""
    return pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler(
        SimpleNamespace(param_groups=groups),
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_iters * 6,
        lr_decay_steps=decay,
        lr_decay_style=config.lr_decay_style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=120,
        wd_incr_style="constant",
        wsd_decay_steps=24,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
        **options,
    )


@STYLES
def test_a_schedule_taken_from_a_checkpoint_equals_megatron_core(style, wsd_style):
    """What the checkpoint has: rates, warm-up, decay and style. What the flags keep: the rate at
    the start of the warm-up, and the WSD decay."""
    for saved in configs(style, wsd_style):
        config = LrScheduleConfig(
            lr=0.5,
            lr_decay_style="WSD",
            lr_wsd_decay_iters=4,
            lr_wsd_decay_style="linear",
            lr_warmup_init=1e-4,
        )
        decay = (saved.lr_decay_iters or 20) * 6
        groups = [{}]
        state = megatrons_scheduler(saved, [{}], decay=decay).state_dict()
        oracle = megatrons_scheduler(config, groups, use_checkpoint_opt_param_scheduler=True)
        oracle.load_state_dict(state)
        built = [
            LrSchedule.build(one, train_samples=120, batches=BatchSchedule(steps=((0, 6),)))
            for one in (config, saved)
        ]
        lr = built[0].taken_from(built[1])
        for consumed in range(0, 41 * 6, 6):
            assert lr.at(consumed) == pytest.approx(groups[0]["lr"], rel=1e-12, abs=1e-20)
            oracle.step(6)


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(lr=None), "--lr is not set"),
        (
            dict(lr_warmup_iters=10),
            r"warm-up \(40 samples\) must be shorter than the decay \(40 samples\)",
        ),
        (
            dict(lr_decay_style="WSD", lr_wsd_decay_iters=9, lr_warmup_iters=2),
            r"--lr-wsd-decay-iters \(36 samples\).*32 samples",
        ),
    ],
)
def test_lengths_that_do_not_fit_are_errors(config, message):
    with pytest.raises(ValueError, match=message):
        schedule(**config)
