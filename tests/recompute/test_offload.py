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
from megatron_lite.recompute.checkpoint import checkpoint
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


def views(weight: Tensor, hidden: Tensor, _: Regions) -> Tensor:
    """Saves one storage as it is, transposed, in part and detached, and a weight with a view of
    it."""
    y = (hidden @ weight).view(6, 2, 2)
    part, turned = y[1:, :, 0], y.transpose(0, 1)
    return (
        part.square().sum() + (turned * y.detach().transpose(0, 1)).sum() + y[0].exp().sum()
    ) * (hidden @ weight.t()).tanh()


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


def test_all_views_of_a_storage_go_once_and_come_back_once(rng: RngStreams) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(2)))
    module.forward = partial(views, module.weight)
    copy_streams = Noting()
    assert equal(
        grads_of(module, "*:none@host", rng, copy_streams),
        grads_of(module, "*:none", rng, CopyStreams()),
    )
    whole, scalar = 6 * 4 * 4, 4
    sizes = [num_bytes for event, num_bytes in copy_streams.events if event == "out"]
    # hidden; hidden @ weight, whose views are saved; exp of a part; tanh; the factor before it
    assert sorted(sizes) == sorted([whole, whole, 2 * 2 * 4, whole, scalar])
    assert [event for event, _ in copy_streams.events].count("back") == len(sizes)


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


def test_what_a_layer_kept_comes_back_before_the_layers_backward_in_its_order(
    rng: RngStreams,
) -> None:
    """All of the layer, then all of the one before: the first read starts both."""
    copy_streams, stores = Noting(), Stores(CPU)
    stores.copy_streams = copy_streams

    def layer(number: int, hidden: Tensor, _: Regions) -> Tensor:
        return hidden.repeat(number + 2, 1).tanh().repeat(2, 1).sin().sum(0, keepdim=True)

    output = run_layers(
        plan_stage(config_of("0-1:none@host; 2:none; *:none@host"), 4),
        [partial(layer, number) for number in range(4)],
        torch.ones(1, 1, requires_grad=True),
        rng=rng,
        tp_group=None,
        stores=stores,
    )
    copy_streams.events.clear()
    output.sum().backward()
    rows = [size // 4 for _, size in copy_streams.events]
    assert rows == [10, 5, 6, 3, 4, 2]


def test_the_model_may_itself_run_in_a_checkpoint(rng: RngStreams) -> None:
    """Whose replay moves what it saves, and gives it back in the same backward."""
    model, plain = build("*:none@host"), build("*:none")
    for each in (model, plain):
        draw_alike(each)
        checkpoint(
            lambda tokens, labels, each=each: each.loss(tokens, labels).mean(),
            *sample_tokens(),
            rng=each.context.rng,
        ).backward()
    assert equal(*[[parameter.grad for parameter in each.parameters()] for each in (model, plain)])  # type: ignore[arg-type]
    assert model.decoder.stores.host_bytes == 0
