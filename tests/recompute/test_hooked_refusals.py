"""What the engine for any model cannot repeat is refused by name, and a policy that cannot apply in
the words of its API."""

import pytest
import torch

from megatron_lite.recompute.phase import is_recomputing
from megatron_lite.recompute.replay import RecomputeMismatch
from tests.support.odd_layers import (
    EACH_KIND,
    Block,
    Model,
    Norms,
    assert_changes_nothing,
    batches,
    put,
    step,
)
from tests.support.odd_state import Collector


def run_with(kind, policy, between=lambda model, hidden: None, **options):
    torch.manual_seed(3)
    model = Model(kind)
    put(model, policy, **options)
    hidden = model.embedding(batches()[0])
    given = hidden
    for layer in model.layers:
        hidden = layer(hidden)
    with torch.no_grad():
        between(model, given)
    hidden.square().mean().backward()


@pytest.mark.parametrize("policy", EACH_KIND[:3])
def test_an_object_among_the_arguments_that_a_layer_changes_is_named(policy):
    class Takes(Block):
        def forward(self, hidden, memory=None):
            if memory is not None:
                memory.log.append(hidden)
            return self.body(hidden)

    model = Model(Takes)
    put(model, policy)
    with pytest.raises(
        RuntimeError, match=r"layers\.1: its argument \['memory'\], a Collector, was changed by its"
    ):
        model.layers[1](batches()[0], memory=Collector())


class Scaled(Norms):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, hidden):
        return super().forward(hidden * self.scale)


@pytest.mark.parametrize(
    "between, message",
    [
        (
            lambda model, hidden: hidden.add_(1),
            r"layers\.0: an argument was written to after the forward",
        ),
        (
            lambda model, hidden: model.layers[1].first.bias.add_(1),
            r"layers\.1: its parameter first\.bias was written to after the forward",
        ),
        (
            lambda model, hidden: model.layers[1].scale.add_(1),
            r"layers\.1: its tensor scale was written to after the forward",
        ),
    ],
)
def test_what_a_replay_needs_and_was_written_to_is_named(between, message):
    with pytest.raises(RuntimeError, match=message):
        run_with(Scaled, "*:full", between)


def test_a_buffer_that_each_forward_changes_may_change_before_backward():
    """A copy of it is kept, so that the gradients are those of the plain model."""

    def changed_in_between(model):
        loss = model(batches()[0])
        for layer in model.layers:
            layer.norm.num_batches_tracked.zero_()
        loss.backward()
        return [loss]

    assert_changes_nothing(lambda: Model(Norms), "*:full", changed_in_between)


def test_what_the_first_forward_left_alone_and_a_later_one_writes_to_is_named_once():
    class Later(Block):
        writes = False

        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, hidden):
            if self.writes:
                self.count.add_(1)
            return self.body(hidden / (1 + self.count))

    def steps(model):
        model(batches()[0]).backward()
        model.layers[0].writes = True
        if any("forward" in vars(layer) for layer in model.layers):
            state = torch.get_rng_state()
            with pytest.raises(
                RuntimeError,
                match=r"layers\.0 wrote to its tensor count, which its first forward did not",
            ):
                model(batches()[1])
            model.layers[0].count.zero_()
            torch.set_rng_state(state)
        return step(model)

    assert_changes_nothing(lambda: Model(Later), "*:full", steps)


def test_a_layer_that_saves_more_or_less_in_a_replay_is_named():
    class Changes(Block):
        def forward(self, hidden):
            return self.body(hidden.detach() if is_recomputing() else hidden.sin())

    with pytest.raises(RecomputeMismatch, match=r"layers\.2: (the forward saved|as number)"):
        run_with(Changes, "*:full")


@pytest.mark.parametrize("policy", ["*:full", "*:ops(matmul)"])
def test_verify_sees_other_values_where_the_shapes_agree(policy):
    class Changes(Block):
        def forward(self, hidden):
            return self.body(hidden * (2.0 if is_recomputing() else 1.0))

    run_with(Changes, policy, verify=False)  # nobody compares values
    for verify in (True, "first"):
        with pytest.raises(RecomputeMismatch, match=r"layers\.2, saved tensor 0: \[5, 6\] differs"):
            run_with(Changes, policy, verify=verify)


def test_verify_sees_a_lost_edge():
    """The same values, saved in the same shapes, from a graph that reaches less."""

    class Detaches(Block):
        def forward(self, hidden):
            shift = self.second.bias
            return hidden.sin() + (shift.detach() if is_recomputing() else shift)

    with pytest.raises(
        RecomputeMismatch,
        match=r"layers\.2, its graph is not the forward's: it lost second.bias.* take the layer",
    ):
        run_with(Detaches, "*:full", verify=True)
