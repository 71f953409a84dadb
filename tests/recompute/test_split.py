"""--distribute-saved-activations: each rank keeps its part of a unit's input, and backward gathers
them, one ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.parallel.state import ParallelState
from megatron_lite.recompute import checkpoint as engine
from megatron_lite.recompute.checkpoint import checkpoint
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.recompute.schedule import plan_stage
from tests.support.collectives import Sent, recorded_collectives
from tests.support.models import (
    BATCH,
    SEQ_LENGTH,
    build_tiny_model,
    sample_tokens,
    tiny_config,
    tp_state,
)
from tests.support.ranks import run_ranks

NUM_LAYERS, FIRST_LAYERS = 5, (0, 2, 4)  # units of 2, 2 and 1 layers
CONFIG = tiny_config(num_layers=NUM_LAYERS, hidden_dropout=0.1)
ELEMENTS = SEQ_LENGTH * BATCH * CONFIG.hidden_size


def units_of_two(*, split: bool) -> RecomputeConfig:
    return RecomputeConfig(
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=2,
        distribute_saved_activations=split,
    )


def _callers_tensor(rank: int, world_size: int, grad: bool) -> tuple[bool, bool]:
    with tp_state(world_size) as parallel, torch.set_grad_enabled(grad):
        hidden = torch.arange(24.0).view(4, 6).requires_grad_()
        kept, memory = hidden.detach().clone(), hidden.data_ptr()
        output = checkpoint(torch.tanh, hidden, rng=parallel.rng, split_group=parallel.tp_group)
        if grad:
            output.sum().backward()
        return torch.equal(hidden, kept) and hidden.data_ptr() == memory, torch.equal(
            output, kept.tanh()
        )


@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
def test_the_callers_tensor_is_left_alone(grad: bool) -> None:
    assert run_ranks(_callers_tensor, 2, grad) == [(True, True)] * 2


@dataclass(frozen=True)
class Step:
    """What one rank saw of a step."""

    freed: list[bool]  # between forward and backward, the whole input of each unit
    sent: list[Sent]  # by both backwards
    # of the first backward: "gather" where one starts, "layer N" where a unit's replay does
    events: list[str]
    grads: list[list[Tensor]]  # after each backward


@contextmanager
def noted_gathers(events: list[str]) -> Iterator[None]:
    start = engine.start_all_gather_first_dim
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine,
            "start_all_gather_first_dim",
            lambda *args: (events.append("gather"), start(*args))[1],
        )
        yield


def step_of(parallel: ParallelState, recompute: RecomputeConfig) -> Step:
    """One forward and two backwards."""
    model = build_tiny_model(
        CONFIG, parallel, dtype=torch.float32, plan=plan_stage(recompute, NUM_LAYERS)
    )
    inputs, events, sent, grads = [], [], [], []

    def before_layer(number: int):  # type: ignore[no-untyped-def]
        def note(_: object, args: tuple[Tensor, ...]) -> None:
            if is_recomputing():
                events.append(f"layer {number}")
            else:
                inputs.append(StorageWeakRef(args[0].untyped_storage()))

        return note

    for number in FIRST_LAYERS:
        model.decoder.layers[number].register_forward_pre_hook(before_layer(number))
    loss = model.loss(*sample_tokens()).mean()
    freed = [memory.expired() for memory in inputs]
    for again in (True, False):
        with noted_gathers(events), recorded_collectives() as collectives:
            loss.backward(retain_graph=again)
        sent += collectives
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    return Step(freed, sent, events[: len(events) // 2], grads)


def _steps(rank: int, world_size: int) -> list[Step]:
    steps = []
    for recompute in (RecomputeConfig(), units_of_two(split=False), units_of_two(split=True)):
        with tp_state(world_size) as parallel:  # its streams start anew
            steps.append(step_of(parallel, recompute))
    return steps


def gathers(step: Step) -> int:
    return sum(
        one.name == "_allgather_base_" and torch.Size(one.shape).numel() == ELEMENTS
        for one in step.sent
    )


def test_whole_inputs_are_freed_and_gathered_once_a_unit_one_ahead_of_the_replay() -> None:
    for kept, whole, split in run_ranks(_steps, 2, detail=False):
        assert (whole.freed, split.freed) == ([False] * 3, [True] * 3)
        assert (gathers(kept), gathers(whole), gathers(split)) == (0, 0, 2 * len(FIRST_LAYERS))
        assert len(split.sent) == len(whole.sent) + 2 * len(FIRST_LAYERS)
        assert split.events == ["gather", "gather", "layer 4", "gather", "layer 2", "layer 0"]
        # the second is added to the first
        for expected, actual in zip(kept.grads, split.grads, strict=True):
            assert all(
                torch.equal(mine, other) for mine, other in zip(expected, actual, strict=True)
            )
