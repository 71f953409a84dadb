"""Which layers a stage recomputes, and how."""

import pytest

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment
from megatron_lite.recompute.schedule import plan_stage

FULL = dict(recompute_granularity="full")


def unit(first, count=1, store="device"):
    return Segment(first_layer=first, num_layers=count, unit=True, store=store)


def keep(first):
    return Segment(first_layer=first)


@pytest.mark.parametrize(
    ("flags", "segments"),
    [
        ({}, [keep(0), keep(1), keep(2), keep(3), keep(4)]),
        (
            dict(**FULL, recompute_method="uniform", recompute_num_layers=2),
            [unit(0, 2), unit(2, 2), unit(4, 1)],
        ),
        (dict(**FULL, recompute_method="block"), [unit(0), keep(1), keep(2), keep(3), keep(4)]),
        (
            dict(**FULL, recompute_method="block", recompute_num_layers=9),
            [unit(0), unit(1), unit(2), unit(3), unit(4)],
        ),
        (
            dict(
                **FULL,
                recompute_method="uniform",
                recompute_num_layers=3,
                distribute_saved_activations=True,
            ),
            [unit(0, 3, "split"), unit(3, 2, "split")],
        ),
        (
            dict(recompute_granularity="selective", recompute_modules=("mlp", "core_attn", "mlp")),
            [Segment(first_layer=n, regions=frozenset({"mlp", "core_attn"})) for n in range(5)],
        ),
    ],
)
def test_the_plan_of_five_layers(flags, segments):
    plan = plan_stage(RecomputeConfig(**flags), 5)
    assert plan == RecomputePlan(tuple(segments)) and plan.num_layers == 5
