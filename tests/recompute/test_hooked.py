"""The engine for any model: layers with every kind of output, side channel and state give the bits
of the plain layers."""

import copy
import gc
import pickle

import pytest
import torch

from megatron_lite.parallel.collectives import results_may_be_kept
from megatron_lite.recompute import hooked
from megatron_lite.recompute.apply import remove_policy_
from megatron_lite.recompute.phase import is_recomputing, recomputing
from tests.support.odd_layers import (
    POLICIES,
    Block,
    InOrder,
    Model,
    Norms,
    SetsAux,
    assert_changes_nothing,
    assert_equal,
    batches,
    outcome,
    put,
    step,
)


def twice(model):
    loss = model(batches()[0])
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss]


def second_order(model):
    """A gradient penalty: the loss holds a gradient."""
    x = batches()[0].requires_grad_()
    loss = model(x)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()
    return [loss, gradient, x.grad]


class Outer(InOrder):
    """A layer with layers of its own, which get a policy, too."""

    def __init__(self):
        super().__init__(Norms)

    def forward(self, hidden):
        return super().forward(hidden).sin()


@pytest.mark.runs(daily=3, ci=6)
@pytest.mark.parametrize("run", [step, twice, second_order])
@pytest.mark.parametrize("inner", ["*:full", "*:ops(matmul)", "0:full@host"])
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_nest(policy, inner, run):
    def nested():
        model = Model(Outer)
        for layer in model.layers:
            put(layer, inner)
        return model

    assert_equal(outcome(nested, policy, run), outcome(lambda: Model(Outer), None, run))


@pytest.mark.runs(daily=3, ci=6)
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_of_a_model_has_the_policy_and_is_on_its_own(policy, duplicate):
    def copied():
        model = Model(Norms)
        put(model, policy)
        state = torch.get_rng_state()
        model(batches()[0]).backward()
        torch.set_rng_state(state)
        again = duplicate(model)
        again.load_state_dict(fresh.state_dict())
        again.zero_grad()
        return again

    torch.manual_seed(3)
    fresh = Model(Norms)
    assert_equal(outcome(copied, None, step), outcome(lambda: Model(Norms), None, step))


def test_a_graph_outlives_its_policy():
    def taken_off(model):
        loss = model(batches()[0])
        remove_policy_(model)
        loss.backward()
        return [loss]

    assert_changes_nothing(lambda: Model(Norms), "*:full", taken_off)


@pytest.mark.runs(ci=4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_of_a_forward_outlives_it(policy, backward):
    """Also without a backward, and though the layers hold a tensor with its graph in an
    attribute."""
    model = Model(SetsAux)
    put(model, policy)
    before = len(calls_alive())
    for batch in batches() * 2:
        loss = model(batch)
        if backward:
            loss.backward()
        del loss
    # the attributes hold the last forward's graph, and no earlier one
    assert len(calls_alive()) - before <= (0 if backward else 3)


def test_what_a_backward_did_not_read_does_not_outlive_it():
    """A backward that needs one output only leaves the rebuilt tensors of the other one unread."""

    class Two(Block):
        def forward(self, hidden):
            return self.body(hidden), hidden.sin()

    model = Model(Two)
    put(model, "0:full")
    used, unused = model.layers[0](batches()[0].requires_grad_())
    used.sum().backward(retain_graph=True)
    values = [each._values for each in calls_alive()]
    assert values and not any(values) and unused.grad_fn is not None


def calls_alive():
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is hooked._LayerCall]


def test_a_replay_knows_that_it_is_one_and_ends_where_backward_has_all_it_reads(capsys):
    def seen():
        return capsys.readouterr().out.split()

    class Notes(Block):
        def forward(self, hidden):
            print("again" if is_recomputing() else "forward")  # no replay undoes it
            hidden = self.body(hidden)
            hidden = hidden * hidden.sin()  # what it saves last has gradients, so it is computed
            print("end")
            return hidden.view(-1, 6) + 1

    model = Model(Notes)
    put(model, "0:full")
    model(batches()[0]).backward()  # the first replay finds out whether later ones may end early
    assert seen() == ["forward", "end"] * 3 + ["again", "end"]
    for verify in (False, True):
        remove_policy_(model)
        put(model, "0:full", verify=verify)
        model(batches()[0]).backward()
        seen()
        model(batches()[0]).backward()
        assert seen() == ["forward", "end"] * 3 + ["again"] + ["end"] * verify
    assert not is_recomputing()
    with recomputing():
        with recomputing():
            pass  # one inside of another one does not end it
        assert is_recomputing()


@pytest.mark.parametrize("policy", ["1:full", "1:ops(matmul)"])
def test_other_errors_in_a_layer_are_its_own(policy):
    class Fails(Block):
        def forward(self, hidden):
            hidden = self.body(hidden)
            if is_recomputing():
                raise KeyError("not again")
            return hidden.exp().sin()

    model = Model(Fails)
    put(model, policy, verify=True)
    loss = model(batches()[0])
    state, attributes = torch.get_rng_state(), dict(vars(model.layers[1]))
    with pytest.raises(KeyError, match="not again"):
        loss.backward()
    assert (
        not (is_recomputing() or results_may_be_kept())
        and torch.equal(torch.get_rng_state(), state)
        and vars(model.layers[1]) == attributes
    )
