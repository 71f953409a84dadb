"""Policies inside of DistributedDataParallel, and inside and around of torch.compile."""

from functools import partial
from itertools import product

import pytest

from tests.support.foreign import differences
from tests.support.foreign_policies import MODELS, policy_on, unclear
from tests.support.foreign_wrapped import (
    compile_around,
    compile_forwards,
    compile_layers,
    train_compiled,
    train_in_ddp,
)
from tests.support.pairs import covered
from tests.support.ranks import run_ranks

TEXTS = ("*:full", "*:ops(matmul)", "*:full@host")
WITHOUT_UNUSED = ("GPT-2", "T5", "Mixtral, router loss")
WITH_UNUSED = (*WITHOUT_UNUSED, "a tensor", "an output that nobody reads", "BatchNorm")


def _ddp(rank, world_size, names, options):
    found = []
    for name in names:
        train = partial(train_in_ddp, MODELS[name], **options)
        expected = train(None)
        for text in TEXTS:
            lines = differences(expected, train(policy_on(MODELS[name], text)))
            found += [f"{name}, {text}: {line}" for line in lines]
    return found


@pytest.mark.runs(daily=0, ci=1)
@pytest.mark.parametrize(("find_unused", "static"), [(False, False), (True, False), (False, True)])
def test_ddp_reduces_the_gradients_of_the_plain_model(find_unused, static):
    names = WITH_UNUSED if find_unused else WITHOUT_UNUSED
    options = dict(find_unused=find_unused, static=static)
    assert run_ranks(_ddp, 2, names, options) == [[], []]


def _compiled(name, text, wrap, backend, first):
    """As `faults`, for a compiled model: equal to the plain model compiled in the same way, or one
    clear error."""
    train = partial(train_compiled, MODELS[name], wrap=wrap, backend=backend, first=first)
    try:
        found = train(policy_on(MODELS[name], text))
    except (ValueError, RuntimeError) as error:
        return unclear(error)
    return differences(train(None), found)


# By place: how the model is compiled, and whether the policy is put on first.
PLACES = {
    "around the model": (compile_around, False),
    "around each layer": (compile_layers, False),
    "inside of each layer's policy": (compile_forwards, True),
}


@pytest.mark.runs(daily=0)
@pytest.mark.parametrize(
    ("name", "text", "place"),
    covered(product(["a tensor", "named tuple", "GPT-2"], [*TEXTS, "*:none@host"], PLACES)),
)
def test_a_compiled_model_with_a_policy_trains_as_without_or_says_why_not(name, text, place):
    wrap, first = PLACES[place]
    assert _compiled(name, text, wrap, "aot_eager", first) == []


@pytest.mark.runs(ci=4)
@pytest.mark.parametrize(
    ("place", "text"),
    [("inside of each layer's policy", "*:ops(matmul)"), *((place, "*:full") for place in PLACES)],
)
def test_a_compiled_chain_with_a_policy_trains_as_without(place, text):
    wrap, first = PLACES[place]
    model = MODELS["a tensor"]
    train = partial(train_compiled, model, wrap=wrap, backend="aot_eager", first=first)
    assert differences(train(None), train(policy_on(model, text))) == []


@pytest.mark.long
def test_the_default_backend_compiles_a_layer_with_a_policy():
    from torch._inductor import config

    model = MODELS["a tensor"]
    with config.patch(fallback_random=True):  # its own random numbers are others than eager's
        expected = train_compiled(model, None, wrap=compile_layers, backend="inductor")
        try:
            found = train_compiled(
                model, policy_on(model, "*:full"), wrap=compile_layers, backend="inductor"
            )
        except (ValueError, RuntimeError) as error:
            assert unclear(error) == []
            return
    for name, one in expected.gradients.items():
        other = found.gradients[name]
        assert (one is None) == (other is None)
        if one is not None and other is not None:  # fused kernels may round in another order
            assert (one - other).abs().max() <= 1e-5 * one.abs().max()
