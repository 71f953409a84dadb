"""Models whose layers differ, in every layout of ranks: a layer is what its number in the whole
model says, wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from megatron_lite.config.model import ModelConfig
from tests.support.equality import GQA, LLAMA, difference, differences
from tests.support.models import Outcome, build_tiny_model, loss_and_grads, tiny_config, tp_state
from tests.support.pairs import only
from tests.support.pipelines import Layout, Trained, train
from tests.support.ranks import run_ranks

# No two stages of a pipeline hold the same layers, in any layout below.
DIFFERING: dict[str, Any] = dict(
    LLAMA,
    **GQA,
    num_layers=8,
    window_size=(3, 0),
    window_attn_skip_freq=(1, 0, 0, 1, 1, 1, 0, 1),
    no_rope_freq=(0, 1, 0, 0, 0, 1, 1, 0),
)
STEPS, MICRO_BATCHES = 2, 4


def config_of(**overrides: Any) -> ModelConfig:
    return tiny_config(**{**DIFFERING, **overrides})


@dataclass(frozen=True, kw_only=True)
class Split:
    """Ranks that share the layers' tensors and the sequence."""

    tp_size: int = 1
    cp_size: int = 1
    sequence_parallel: bool = False
    cp_comm_type: str = "p2p"
    attention_backend: str = "flash"

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


SPLITS = [
    Split(tp_size=2),
    Split(tp_size=2, sequence_parallel=True),
    Split(cp_size=2, attention_backend="unfused"),
    Split(cp_size=3, attention_backend="unfused", cp_comm_type="allgather"),
    Split(cp_size=2),
    Split(
        tp_size=2,
        cp_size=2,
        sequence_parallel=True,
        attention_backend="unfused",
        cp_comm_type="allgather",
    ),
]


def outcome_of(split: Split) -> Outcome:
    """Loss and whole gradients on this rank."""
    with tp_state(split.tp_size, cp_size=split.cp_size) as parallel:
        model = build_tiny_model(
            config_of(
                num_layers=3,
                window_attn_skip_freq=(1, 0, 1),
                no_rope_freq=(0, 1, 0),
                attention_backend=split.attention_backend,
            ),
            parallel,
            sequence_parallel=split.sequence_parallel,
            cp_comm_type=split.cp_comm_type,
        )
        return loss_and_grads(model, parallel)


@pytest.mark.runs(daily=2, ci=6)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_ranks_that_share_a_layer_compute_what_one_rank_computes(split: Split) -> None:
    """Under context parallelism a layer with a window builds its scores, also where the others run
    a kernel."""
    expected = outcome_of(Split())
    for outcome in run_ranks(
        lambda rank, world_size: outcome_of(split), split.tp_size * split.cp_size, detail=False
    ):
        assert {
            name: error
            for name, error in differences(expected, outcome).items()
            if not error < 1e-13
        } == {}


LAYOUTS = [
    Layout(pp=2),
    Layout(pp=2, num_chunks=2),
    Layout(pp=2, first=3),
    Layout(pp=4, num_chunks=2),
    Layout(pp=2, tp=2, num_chunks=2, sequence_parallel=True),
]


@cache
def single_process() -> Trained:
    return train(
        Layout(), config_of(), steps=STEPS, micro_batches=MICRO_BATCHES, dtype=torch.float64
    )


@pytest.mark.runs(daily=1, ci=3)
@pytest.mark.parametrize("layout", only(LAYOUTS, 1, 2), ids=str)
def test_a_pipeline_trains_as_one_process_does(layout: Layout) -> None:
    expected = single_process()

    def work(rank: int, world_size: int) -> tuple[list[float], float, list[str]]:
        got = train(
            layout, config_of(), steps=STEPS, micro_batches=MICRO_BATCHES, dtype=torch.float64
        )
        errors = {
            f"{kind} {name}": difference(getattr(expected, kind)[name], value)
            for kind in ("first_grads", "weights")
            for name, value in getattr(got, kind).items()
        }
        return got.losses, max(errors.values()), sorted(got.weights)

    names = set()
    for losses, worst, held in run_ranks(work, layout.ranks, detail=False):
        assert losses == pytest.approx(expected.losses, rel=1e-10)
        assert worst < 1e-9
        names |= set(held)
    assert names == expected.weights.keys()
