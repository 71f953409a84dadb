"""Policies on models of transformers in their default calls: losses, gradients, buffers and random
numbers to the bit.

Everything is compared with the same model without a policy, from the same seed.
tests/support/foreign.py has the situations.
"""

import itertools
from functools import cache

import pytest
import torch

from megatron_lite.recompute.apply import apply_policy_
from tests.support.foreign import SITUATIONS, differences, train
from tests.support.foreign_families import FAMILIES, NEWER, VARIANTS, language_loss, newer, tokens
from tests.support.foreign_layers import LAYERS
from tests.support.foreign_policies import POLICIES, faults, policy_on
from tests.support.pairs import covered

EVERY_MODEL = [*FAMILIES, *VARIANTS, *LAYERS]
BRIEF = ("GPT-2", "Llama", "Mixtral, router loss", "T5")


@pytest.mark.runs(daily=24, ci=56)
@pytest.mark.parametrize("text", ["*:full", "*:ops(matmul)", "*:full@host", "*:none@host"])
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_every_model_trains_as_without_a_policy_or_is_refused(name, text):
    assert faults(name, text) == []


@pytest.mark.runs(daily=4, ci=12)
@pytest.mark.parametrize("situation", [one for one in SITUATIONS if one != "two micro-batches"])
@pytest.mark.parametrize("name", BRIEF)
def test_every_way_to_train_gives_the_gradients_of_the_plain_model(name, situation):
    assert faults(name, "*:full", situation) == []


@pytest.mark.runs(daily=0, ci=11)
@pytest.mark.parametrize("text", ["*:full", "*:ops(matmul)", "*:full@host", "*:none@host"])
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


@pytest.mark.runs(daily=0, ci=6)
@pytest.mark.parametrize("name", EVERY_MODEL)
def test_every_policy_holds_in_every_situation(name):
    found = {
        (text, situation): lines
        for model, text, situation in in_every_situation()
        if model == name and (lines := faults(name, text, situation))
    }
    assert not found


def test_generation_reads_its_cache_as_without_a_policy():
    def continued(text):
        torch.manual_seed(3)
        model = FAMILIES["Llama"].build()
        if text is not None:
            apply_policy_(model, layers_fqn="model.layers", policy=text)
        return model.eval().generate(tokens(0), max_new_tokens=5, do_sample=False)

    assert torch.equal(continued(None), continued("*:full")) and torch.equal(
        continued(None), continued("*:ops(matmul)")
    )


def test_the_names_of_the_weights_stay_and_load_either_way():
    torch.manual_seed(3)
    plain_model, model = FAMILIES["BERT"].build(), FAMILIES["BERT"].build()
    apply_policy_(model, layers_fqn="bert.encoder.layer", policy="*:full")
    assert list(model.state_dict()) == list(plain_model.state_dict())
    model.load_state_dict(plain_model.state_dict())
    torch.manual_seed(7)
    expected = language_loss(plain_model, 0)
    torch.manual_seed(7)
    assert torch.equal(language_loss(model, 0), expected)
