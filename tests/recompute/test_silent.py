"""Layers and callers that recomputation used to train wrongly without an error.

Each one is now equal to the plain model, or ends in an error, with the default arguments.
"""

import contextvars
import copy
import itertools
from threading import Thread

import pytest
import torch
from torch import nn

from megatron_lite.recompute import hooked
from megatron_lite.recompute.contents import Contents
from megatron_lite.recompute.replay import RecomputeMismatch
from tests.support.foreign import Foreign
from tests.support.odd_layers import EACH_KIND, Block, Model, assert_equal, batches, outcome, put
from tests.support.odd_state import (
    CONTEXTS,
    STATES,
    UNLISTED,
    CountsTogether,
    OnlyCounts,
    Routes,
    case,
    plainly,
    scripted,
)

CASES = {**STATES, **CONTEXTS, **UNLISTED}


def trained(foreign, policy, **options):
    """Returns the result of nine steps, so that the calls 2, 4 and 8 are among them."""

    def run(model):
        losses = []
        for number in range(9):
            losses.append(foreign.loss(model, number % 3))
            losses[-1].backward()
        return losses

    return outcome(foreign.build, policy, run, **options)


def trained_or_error(foreign, policy, **options):
    try:
        return trained(foreign, policy, **options)
    except RuntimeError:
        return None


def test_a_replay_does_not_end_before_an_operator_has_filled_what_it_saves(monkeypatch):
    """RReLU saves its noise, and fills it then. New memory may hold the forward's noise, so equal
    hashes (here: none) prove nothing. Here it holds NaN."""
    monkeypatch.setattr(hooked, "hash_last", lambda *_: [])
    foreign = CASES["RReLU, before a sum"]
    torch.use_deterministic_algorithms(True)  # new tensors are filled with NaN
    try:
        assert_equal(trained(foreign, "*:full", verify=False), trained(foreign, None))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_verified_call_sees_a_weight_that_changed_without_a_version():
    model = Model(Block)
    put(model, "0:full", verify=True)
    loss = model(batches()[0])
    loss.backward(retain_graph=True)
    model.layers[0].first.weight.data.mul_(2)
    with pytest.raises(RecomputeMismatch, match="first.weight is not what it was after"):
        loss.backward()


def test_a_thread_changes_by_itself():
    """tqdm has one, which functions of peft name."""
    layer = Block()
    layer.thread = Thread()
    held = Contents.of_layer(layer)
    layer.thread.daemon = True
    assert not [*held.changed()]


@pytest.mark.runs(daily=24, ci=48)
@pytest.mark.parametrize("verify", ["first", False])
@pytest.mark.parametrize("policy", EACH_KIND)
@pytest.mark.parametrize("name", CASES)
def test_it_is_equal_or_refused(name, policy, verify):
    foreign = CASES[name]
    verify = verify or ("first" if foreign.may_refuse else False)  # it alone sees these
    expected = trained_or_error(foreign, None)
    assert (expected is None) == (name == "a saved result that it writes afterwards")
    found = trained_or_error(foreign, policy, verify=verify)
    if found is None:
        assert expected is None or (foreign.may_refuse and policy != "*:none@host")
    else:
        assert expected is not None, "plain torch refuses"
        assert_equal(found, expected)


@pytest.mark.parametrize("policy", ["*:full", "*:ops(matmul)"])
def test_a_router_that_chooses_otherwise_is_named(policy):
    with pytest.raises(
        RecomputeMismatch, match=r"saved tensor \d+: .*chose otherwise, as a router"
    ):
        trained(case(Routes), policy)


@pytest.mark.runs(daily=2, ci=5)
@pytest.mark.parametrize(
    "policy, verify", [*zip(EACH_KIND, ["first", False] * 2, strict=True), ("*:full", False)]
)
def test_what_only_counts_is_counted_once(policy, verify):
    counted = []

    def build():
        OnlyCounts.everyone.__init__()
        model = Model(CountsTogether)
        counted[:] = [OnlyCounts.everyone, *(layer.stats for layer in model.layers)]
        return model

    trained(Foreign(build=build, loss=plainly), policy, verify=verify)
    assert counted[0].total == counted[0].log[-1] == counted[0].kinds["call"] == 27
    assert [stats["call"] for stats in counted[1:]] == [9, 9, 9]


def test_a_scripted_function_that_no_search_finds_is_refused():
    """Its first replay is its second run, and later calls would agree."""

    class Calls(Block):
        def __init__(self):
            super().__init__()
            self.hidden = [scripted()]

        def forward(self, hidden):
            return self.body(self.hidden[0](hidden))

    with pytest.raises(RecomputeMismatch, match="the same tensors in another order, from saved"):
        trained(case(Calls), "*:full")


def test_bits_that_differ_once_are_not_forgotten():
    """Nothing can tell whether backward read them."""
    runs = itertools.count()

    class SavesOnce(Block):
        def forward(self, hidden):
            return self.body(hidden) + _Saves.apply(hidden, float(next(runs) == 0))

    model = Model(SavesOnce)
    put(model, "0:full")
    with pytest.warns(UserWarning, match=r"layers\.0: saved tensor \d of an earlier replay"):
        for _ in range(2):
            model(batches()[0]).backward()


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, value):
        ctx.save_for_backward(torch.full((2,), value))
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + ctx.saved_tensors[0].sum(), None


def test_a_copy_whose_forward_is_called_by_itself_is_refused():
    """The call does not tell for which of the two modules it is."""
    model = Model(Block)
    put(model, "*:full")
    layer, x = model.layers[1], model.embedding(batches()[0])
    holder = nn.Module()
    holder.forward_of_another = layer.forward  # which is no copy
    for _ in range(5):
        layer.forward(x)
    other = copy.copy(layer)
    with pytest.raises(RuntimeError, match=r"layers\.1: a copy .* copy\.deepcopy"):
        other.forward(x)
    copy.deepcopy(model.layers[0]).forward(x)


DRAWS = itertools.count()


class DrawsMoreInReplays(Block):
    """Moves torch's generator as another thread does: no tensor depends on it."""

    def forward(self, hidden):
        output = self.body(hidden)
        torch.rand(1 + next(DRAWS) % 2)
        return output


def test_a_generator_that_moves_alone_is_no_error_but_for_those_who_verify_all():
    def run(verify):
        torch.manual_seed(0)
        model = Model(DrawsMoreInReplays)
        put(model, "*:full", verify=verify)
        model(batches()[0]).backward()
        return [each.grad for each in model.parameters()]

    with pytest.warns(UserWarning, match="all tensors agree: another thread draws"):
        found = run("first")
    assert_equal(found, run(False))
    with pytest.raises(RecomputeMismatch, match="RNG stream"):
        run(True)


COLLECTED = contextvars.ContextVar("collected", default=None)


class Collects(Block):
    """Gives its result to the caller's collection as well, as the layers of transformers do."""

    def forward(self, hidden):
        result = self.body(hidden)
        if (found := COLLECTED.get()) is not None:
            found.append(result)
        return result


def test_a_replay_adds_nothing_to_what_a_context_variable_collects():
    model = Model(Collects)
    put(model, "*:full")
    token = COLLECTED.set(found := [])
    loss = plainly(model, 0)
    COLLECTED.reset(token)
    (loss + found[0].sum()).backward()
    assert len(found) == 3
