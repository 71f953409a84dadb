"""Policies on models of transformers in their default calls and on layers of plain torch: alone,
inside of DistributedDataParallel, and inside and around of torch.compile.

Everything is compared with the same model without a policy, from the same seed, to the bit.
tests/support/foreign.py has the situations, and foreign_layers.py the layers.
"""

import itertools
from functools import cache, partial
from itertools import product

import pytest
import torch

from megatron_lite.recompute.apply import apply_policy_
from tests.support.foreign import SITUATIONS, count_unequal, differences, train
from tests.support.foreign_families import FAMILIES, NEWER, VARIANTS, newer
from tests.support.foreign_layers import LAYERS, chain_loss
from tests.support.foreign_policies import MODELS, POLICIES, faults, policy_on
from tests.support.foreign_wrapped import (
    compile_around,
    compile_forwards,
    compile_layers,
    train_compiled,
    train_in_ddp,
)
from tests.support.odd_layers import EACH_KIND
from tests.support.pairs import FULL_GRIDS, covered
from tests.support.ranks import run_ranks

EVERY_MODEL = [*FAMILIES, *VARIANTS, *LAYERS]
TEXTS = EACH_KIND[:3]
BRIEF = ("GPT-2", "Llama", "Mixtral, router loss", "T5")


@pytest.mark.runs(daily=24, ci=24)
@pytest.mark.parametrize("text", EACH_KIND)
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_every_model_trains_as_without_a_policy_or_is_refused(name, text):
    assert faults(name, text) == []


@pytest.mark.runs(daily=4, ci=8)
@pytest.mark.parametrize("situation", [one for one in SITUATIONS if one != "two micro-batches"])
@pytest.mark.parametrize("name", BRIEF)
def test_every_way_to_train_gives_the_gradients_of_the_plain_model(name, situation):
    assert faults(name, "*:full", situation) == []


@pytest.mark.runs(daily=0, ci=6)
@pytest.mark.parametrize("text", EACH_KIND)
@pytest.mark.parametrize("name", NEWER)
def test_the_default_call_of_a_newer_family_trains_as_without_a_policy(name, text):
    foreign = newer(name)
    if foreign is None:
        pytest.skip(f"the installed transformers has no {name}")
    assert differences(train(foreign), train(foreign, prepare=policy_on(foreign, text))) == []


@cache
def in_every_situation():
    """Returns cases (model, policy, situation) in which every two of the three meet."""
    return covered(itertools.product(EVERY_MODEL, POLICIES, SITUATIONS))


@pytest.mark.runs(daily=0, ci=3)
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_every_policy_holds_in_every_situation(name):
    found = {
        (text, situation): lines
        for model, text, situation in in_every_situation()
        if model == name and (lines := faults(name, text, situation))
    }
    assert not found


@pytest.mark.parametrize("text", TEXTS)
def test_without_gradients_a_layer_runs_once_and_keeps_nothing(text):
    torch.manual_seed(3)
    model = LAYERS["a tensor"].build().eval()
    expected = chain_loss(model, 0)
    apply_policy_(model, layers_fqn="layers", policy=text)
    calls = []
    model.layers[0].first.register_forward_hook(lambda *_: calls.append(None))
    with torch.no_grad():
        found = chain_loss(model, 0)
    assert torch.equal(found, expected) and not found.requires_grad and len(calls) == 1
    with torch.inference_mode():
        assert torch.equal(chain_loss(model, 0), expected) and len(calls) == 2


def test_hooks_on_gradients_run_once():
    torch.manual_seed(3)
    model = LAYERS["a tensor"].build()
    apply_policy_(model, layers_fqn="layers", policy="*:full")
    calls = []
    layer = model.layers[1]
    layer.register_full_backward_hook(lambda *_: calls.append("layer"))
    layer.first.weight.register_hook(lambda grad: calls.append("weight"))
    layer.first.weight.register_post_accumulate_grad_hook(
        lambda parameter: calls.append("accumulated")
    )
    chain_loss(model, 0).backward()
    assert sorted(calls) == ["accumulated", "layer", "weight"]


WITHOUT_UNUSED = ("GPT-2", "T5", "Mixtral, router loss")
WITH_UNUSED = (*WITHOUT_UNUSED, "a tensor", "an output that nobody reads", "BatchNorm")


def _ddp(rank, world_size, names, options):
    found = []
    for number, name in enumerate(names):
        train = partial(train_in_ddp, MODELS[name], **options)
        expected = train(None)
        for text in TEXTS if FULL_GRIDS else TEXTS[number % 3 :][:1]:
            lines = differences(expected, train(policy_on(MODELS[name], text)))
            found += [f"{name}, {text}: {line}" for line in lines]
    return found


@pytest.mark.runs(daily=0, ci=1)
@pytest.mark.parametrize("find_unused, static", [(False, False), (True, False), (False, True)])
def test_ddp_reduces_the_gradients_of_the_plain_model(find_unused, static):
    names = WITH_UNUSED if find_unused else WITHOUT_UNUSED
    options = dict(find_unused=find_unused, static=static)
    assert run_ranks(_ddp, 2, names, options) == [[], []]


# By place: how the model is compiled, and whether the policy is put on first.
PLACES = {
    "around the model": (compile_around, False),
    "around each layer": (compile_layers, False),
    "inside of each layer's policy": (compile_forwards, True),
}


@pytest.mark.runs(ci=4)
@pytest.mark.parametrize(
    "text, place, name", covered(product(EACH_KIND, PLACES, ["a tensor", "named tuple"]))
)
def test_a_compiled_model_with_a_policy_trains_as_without(name, text, place):
    wrap, first = PLACES[place]
    model = MODELS[name]
    train = partial(train_compiled, model, wrap=wrap, backend="aot_eager", first=first)
    assert differences(train(None), train(policy_on(model, text))) == []


@pytest.mark.weekly
def test_the_default_backend_compiles_a_layer_with_a_policy():
    from torch._inductor import config

    model = MODELS["a tensor"]
    train = partial(train_compiled, model, wrap=compile_layers, backend="inductor")
    with config.patch(fallback_random=True):  # its own random numbers are others than eager's
        counts = count_unequal(train(None), train(policy_on(model, "*:full")), 1e-5)
    counts.pop("rounded")  # fused kernels may round in another order
    assert not any(counts.values())
