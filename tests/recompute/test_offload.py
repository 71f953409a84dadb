"""Host offload: the same bits back, originals freed in time, copies back early enough, whatever the
device's haste."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.recompute.layer_runner import run_layers
from megatron_lite.recompute.offload import CopyStreams
from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.recompute.region_runner import Regions
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.recompute.stores import Stores
from tests.support.models import sample_tokens
from tests.support.offload import (
    CONTIGUOUS,
    CPU,
    POLICIES,
    Late,
    Noting,
    build,
    config_of,
    draw_alike,
    equal,
    step,
)

Layer = Callable[..., Tensor]


@pytest.fixture
def rng() -> RngStreams:
    return RngStreams(CPU, seed=3)


@pytest.mark.runs(daily=3, ci=10)
@pytest.mark.parametrize("policy", [*POLICIES, CONTIGUOUS])
def test_copies_that_are_made_as_late_as_they_may_be_change_no_gradient(policy: str) -> None:
    """Two steps of two micro-batches in flight, so that buffers are used again."""
    copy_streams = Late()
    ours, plain = build(policy, copy_streams), build("*:none")
    ours.decoder.stores.micro_batches = 2
    for batches in ((3, 4), (4, 5)):
        assert (
            equal(step(ours, batches=batches), step(plain, batches=batches))
            and copy_streams.faults == []
        )
    assert copy_streams.count > 0


@pytest.mark.parametrize("policy", ["*:full/2@host", "*:none@host", "*:pointwise@host", CONTIGUOUS])
def test_two_backwards_through_a_retained_graph_equal_those_without(policy: str) -> None:
    def outcome(model: GPTModel) -> list[Tensor]:
        draw_alike(model)
        loss = model.loss(*sample_tokens()).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

    copy_streams = Late()
    assert (
        equal(outcome(build(policy, copy_streams)), outcome(build("*:none")))
        and copy_streams.faults == []
    )


def grads_of(layer: Layer, policy: str, rng: RngStreams, copy_streams: CopyStreams) -> list[Tensor]:
    """Of a leaf, through one layer that calls no region."""
    leaf = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    stores = Stores(CPU)
    stores.copy_streams = copy_streams
    run_layers(
        plan_stage(config_of(policy), 1), [layer], leaf * 1, rng=rng, tp_group=None, stores=stores
    ).sum().backward()
    assert stores.host_bytes == 0
    return [leaf.grad]


def test_a_layer_may_run_a_backward_of_its_own_in_its_forward(rng: RngStreams) -> None:
    """It reads what is still on its way."""

    def layer(hidden: Tensor, _: Regions) -> Tensor:
        energy = hidden.tanh().exp().sum()
        (force,) = torch.autograd.grad(energy, hidden, create_graph=True)
        return force.square() + hidden.sin()

    copy_streams = Late()
    assert (
        equal(
            grads_of(layer, "*:none@host", rng, copy_streams),
            grads_of(layer, "*:none", rng, CopyStreams()),
        )
        and copy_streams.faults == []
    )


def test_a_tensor_that_is_written_to_on_its_way_is_an_error(rng: RngStreams) -> None:
    """As it is without offload."""

    def layer(hidden: Tensor, _: Regions) -> Tensor:
        y = hidden * 1
        z = y.square()
        y.add_(1.0)
        return z

    for policy in ("*:none@host", "*:none"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grads_of(layer, policy, rng, Late())


def test_parameters_tables_and_states_of_generators_stay(rng: RngStreams) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(4, 4))
    table = torch.ones(6, 4)

    def forward(hidden: Tensor, tables: tuple[Tensor, Tensor], regions: Regions) -> Tensor:
        return regions.run(
            "core_attn",
            lambda x, skip_tail: x.tanh(),
            hidden @ module.weight.t() * tables[0][:, :4],
        )

    module.forward = forward
    copy_streams, stores = Noting(), Stores(CPU)
    stores.copy_streams = copy_streams
    leaf = torch.ones(6, 4, requires_grad=True)
    plan = plan_stage(config_of("*:core_attn@host"), 1)
    output = run_layers(
        plan, [module], leaf * 1, (table, table), rng=rng, tp_group=None, stores=stores
    )
    # the layer's input and the region's
    assert [size for _, size in copy_streams.events] == [6 * 4 * 4] * 2
    output.sum().backward()


def watched(
    number: int,
    alive: dict[int, weakref.ref[torch.UntypedStorage]],
    events: list[Any],
    hidden: Tensor,
    _: Regions,
) -> Tensor:
    """Saves one tensor, of number + 1 rows."""
    events.append(
        (
            "replay" if is_recomputing() else "forward",
            number,
            [one for one, memory in alive.items() if memory()],
        )
    )
    kept = hidden.repeat(number + 1, 1)
    alive[number] = weakref.ref(kept.untyped_storage())
    return hidden + kept.square().sum(0)


def test_originals_are_freed_one_segment_later_and_all_of_them_when_the_forward_ends(
    rng: RngStreams,
) -> None:
    def alive_at(policy: str) -> list[list[int]]:
        alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        events: list[Any] = []
        stores = Stores(CPU)
        stores.copy_streams = Late()
        output = run_layers(
            plan_stage(config_of(policy), 4),
            [partial(watched, number, alive, events) for number in range(4)],
            torch.ones(1, 4, requires_grad=True),
            rng=rng,
            tp_group=None,
            stores=stores,
        )
        found = [
            *(before for *_, before in events),
            [number for number, memory in alive.items() if memory()],
        ]
        output.sum().backward()
        return found

    assert alive_at("*:none@host") == [[], [0], [1], [2], []]
    # what the test would see otherwise
    assert alive_at("*:none") == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_the_unit_before_comes_back_while_a_unit_is_replayed_and_no_other(rng: RngStreams) -> None:
    copy_streams, stores = Noting(), Stores(CPU)
    stores.copy_streams = copy_streams
    events: list[Any] = copy_streams.events

    def layer(number: int, hidden: Tensor, _: Regions) -> Tensor:
        if is_recomputing():
            events.append(("replay", number))
        return hidden.repeat(2, 1).tanh()  # the input of unit n has 2**n rows of 4 bytes

    output = run_layers(
        plan_stage(config_of("*:full@host"), 4),
        [partial(layer, number) for number in range(4)],
        torch.ones(1, 1, requires_grad=True) * 1,
        rng=rng,
        tp_group=None,
        stores=stores,
    )
    events.clear()
    output.sum().backward()
    assert events == [
        ("back", 32),
        ("back", 16),
        ("replay", 3),
        ("back", 8),
        ("replay", 2),
        ("back", 4),
        ("replay", 1),
        ("replay", 0),
    ]
