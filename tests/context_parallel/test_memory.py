"""What a run over context-parallel ranks keeps, sends and computes, against the closed forms. No
tolerance."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

import pytest
import torch

from tests.memory.test_activations import figures, models
from tests.memory.test_activations import policies as all_policies
from tests.memory.test_collectives import by_kind_and_bytes
from tests.memory.test_collectives import policies as sending_policies
from tests.support.collectives import recorded_collectives
from tests.support.equality import LATENT, LLAMA, variant_config
from tests.support.models import (
    BATCH,
    SEQ_LENGTH,
    build_tiny_model,
    sample_tokens,
    tiny_config,
    tiny_sizes,
    tp_state,
)
from tests.support.pairs import sampled
from tests.support.ranks import run_ranks
from tests.support.traffic import plan_collectives


class Layout(NamedTuple):
    """Of tp_size x cp_size ranks."""

    tp_size: int
    cp_size: int
    sequence_parallel: bool = False
    cp_comm_type: str | tuple[str, ...] = "p2p"

    def sizes(self, dtype=torch.float32):
        return tiny_sizes(
            self.tp_size,
            sequence_parallel=self.sequence_parallel,
            cp_size=self.cp_size,
            cp_comm_type=self.cp_comm_type,
            element_bytes=dtype.itemsize,
        )


def wrong_bytes(rank, world_size, layout, every):
    """How many cases were measured, and those where prediction and measurement differ. Takes each
    `every`-th of all cases."""
    wrong = []
    can_split = layout.tp_size > 1 and not layout.sequence_parallel
    # A run refuses windows in a ring of flash attention.
    rings = layout.cp_comm_type != "a2a"
    configs = [
        config
        for config in models()
        if not (rings and config.window_size and config.attention_backend == "flash")
    ]
    cases = list(
        itertools.product(
            configs, all_policies(can_split=can_split), (torch.float32, torch.bfloat16)
        )
    )[::every]
    cases = sampled(cases, every=3, at_most=3)
    with tp_state(layout.tp_size, cp_size=layout.cp_size) as parallel:
        for config, recompute, dtype in cases:
            found = figures(
                config,
                recompute,
                parallel,
                sequence_parallel=layout.sequence_parallel,
                dtype=dtype,
                cp_comm_type=layout.cp_comm_type,
            )
            if not found.agree:
                wrong.append(f"{config} {recompute} {dtype}: {found}")
    return len(cases), wrong


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize(
    ("layout", "every"),
    [
        (Layout(1, 2), 211),
        (Layout(1, 3, cp_comm_type="allgather"), 199),
        (Layout(2, 2), 211),
        (Layout(2, 2, True, "allgather"), 211),
        (Layout(1, 2, cp_comm_type="a2a"), 199),
        (Layout(1, 2, cp_comm_type=("a2a", "p2p") * 4), 199),
    ],
)
def test_predicted_bytes_are_the_measured_ones(layout, every):
    for count, wrong in run_ranks(
        wrong_bytes, layout.tp_size * layout.cp_size, layout, every, detail=False
    ):
        assert wrong == [] and count > 10


def plans_of(layout):
    """More than two ranks run every third: they are slow."""
    plans = sending_policies(can_split=layout.tp_size > 1 and not layout.sequence_parallel)
    return dict(
        sampled(
            list(plans.items())[:: 3 if layout.tp_size * layout.cp_size > 2 else 1],
            every=4,
            at_most=3,
        )
    )


def sent(rank, world_size, layout, config):
    """By policy: what the forward sent, and what the backward did, its replays included."""
    found = {}
    with tp_state(layout.tp_size, cp_size=layout.cp_size) as parallel:
        for name, plan in plans_of(layout).items():
            model = build_tiny_model(
                config,
                parallel,
                sequence_parallel=layout.sequence_parallel,
                dtype=torch.bfloat16,
                plan=plan,
                cp_comm_type=layout.cp_comm_type,
            )
            with recorded_collectives() as forward:
                loss = model.loss(*sample_tokens(parallel=parallel)).mean()
            with recorded_collectives() as backward:
                loss.backward()
            tokens = BATCH * SEQ_LENGTH // layout.cp_size
            found[name] = tuple(
                by_kind_and_bytes(one, 2, tokens=tokens) for one in (forward, backward)
            )
    return found


LATENTS = dict(LLAMA, **LATENT, q_lora_rank=8, qk_layernorm=True, num_layers=3)
SENDING = {
    "flash": variant_config("llama", num_layers=3, attention_backend="flash"),
    "unfused": variant_config("llama", num_layers=3, attention_backend="unfused"),
    "latents": tiny_config(**LATENTS, attention_backend="flash"),
    "unfused latents": tiny_config(**LATENTS, attention_backend="unfused"),
}


@pytest.mark.runs(daily=1, ci=2)
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (Layout(1, 2), "latents"),
        (Layout(1, 2), "flash"),
        (Layout(1, 3, cp_comm_type="allgather"), "flash"),
        (Layout(1, 2), "unfused"),
        (Layout(2, 2, True), "flash"),
        (Layout(2, 2, cp_comm_type="allgather"), "flash"),
        (Layout(1, 2, cp_comm_type="a2a"), "flash"),
        (Layout(1, 2, cp_comm_type="a2a"), "unfused"),
        (Layout(2, 2, True, "a2a"), "latents"),
        (Layout(1, 2), "unfused latents"),
        (Layout(1, 2, cp_comm_type=("allgather", "p2p", "a2a")), "flash"),
    ],
)
def test_every_policy_sends_what_is_predicted(layout, model):
    config = SENDING[model]
    expected = {}
    for name, plan in plans_of(layout).items():
        exchange = plan_collectives(config, plan, layout.sizes(torch.bfloat16))
        expected[name] = Counter(exchange.forward), Counter(exchange.backward + exchange.replay)
    assert run_ranks(sent, layout.tp_size * layout.cp_size, layout, config, detail=False) == [
        expected
    ] * (layout.tp_size * layout.cp_size)
