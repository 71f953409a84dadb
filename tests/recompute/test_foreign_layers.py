"""Policies on layers of plain torch with every kind of output, argument, state and side channel."""

import pytest
import torch

from megatron_lite.recompute.apply import apply_policy_
from tests.support.foreign import Foreign, differences, train
from tests.support.foreign_layers import LAYERS, Chain, Mlp, chain, chain_loss
from tests.support.foreign_policies import policy_on, unclear

SHORT = ("*:full", "*:ops(matmul)", "*:full@host")


def test_two_lists_that_share_their_weights_add_up():
    class Tied(Chain):
        def __init__(self):
            super().__init__(Mlp)
            self.blocks[2].fc1.weight = self.blocks[0].fc1.weight

    foreign = Foreign(build=lambda: Tied().train(), loss=chain_loss)
    assert differences(train(foreign), train(foreign, prepare=policy_on(foreign, "*:full"))) == []


def test_the_same_layer_twice_in_a_list_has_the_gradients_of_both_or_is_refused():
    class Shared(Chain):
        def __init__(self):
            super().__init__(Mlp)
            self.blocks[2] = self.blocks[0]

    foreign = Foreign(build=lambda: Shared().train(), loss=chain_loss)
    try:
        found = train(foreign, prepare=policy_on(foreign, "*:full"))
    except ValueError as error:
        assert unclear(error) == []
        return
    assert differences(train(foreign), found) == []


@pytest.mark.parametrize("text", SHORT)
def test_without_gradients_a_layer_runs_once_and_keeps_nothing(text):
    torch.manual_seed(3)
    model = LAYERS["a tensor"].build().eval()
    expected = chain_loss(model, 0)
    apply_policy_(model, layers_fqn="blocks", policy=text)
    calls = []
    model.blocks[0].fc1.register_forward_hook(lambda *_: calls.append(None))
    with torch.no_grad():
        found = chain_loss(model, 0)
    assert torch.equal(found, expected) and not found.requires_grad and len(calls) == 1
    with torch.inference_mode():
        assert torch.equal(chain_loss(model, 0), expected) and len(calls) == 2


def test_hooks_on_gradients_run_once():
    torch.manual_seed(3)
    model = LAYERS["a tensor"].build()
    apply_policy_(model, layers_fqn="blocks", policy="*:full")
    calls = []
    layer = model.blocks[1]
    layer.register_full_backward_hook(lambda *_: calls.append("layer"))
    layer.fc1.weight.register_hook(lambda grad: calls.append("weight"))
    layer.fc1.weight.register_post_accumulate_grad_hook(
        lambda parameter: calls.append("accumulated")
    )
    chain_loss(model, 0).backward()
    assert sorted(calls) == ["accumulated", "layer", "weight"]


@pytest.mark.parametrize("text", ["*:full", "*:none@host"])
def test_a_policy_can_be_taken_off_and_another_put_on(text):
    from megatron_lite.recompute.apply import remove_policy_

    foreign = chain(Mlp)

    def put_and_taken(model):
        apply_policy_(model, layers_fqn="blocks", policy=text)
        chain_loss(model, 5).backward()
        model.zero_grad()
        assert remove_policy_(model) == 3 and remove_policy_(model) == 0
        assert not any("forward" in module.__dict__ for module in model.modules())

    def and_again(model):
        put_and_taken(model)
        apply_policy_(model, layers_fqn="blocks", policy="*:full")

    assert differences(train(foreign), train(foreign, prepare=put_and_taken)) == []
    assert differences(train(foreign), train(foreign, prepare=and_again)) == []
