"""Units of layers: chained, counted from the stage's first, equal to none where weights or inputs
are frozen, holding no tensors but those that torch knows to be kept."""

import pytest
import torch

from megatron_lite.config.regions import REGIONS as ALL_REGIONS
from megatron_lite.config.regions import RegionFacts
from megatron_lite.recompute.recompute_plan import RecomputePlan, Segment
from tests.support.models import build_tiny_model, sample_tokens, tiny_config, tp_state
from tests.support.odd_layers import assert_equal
from tests.support.planned import loss_of, planned

UNITS_OF_ONE, UNITS_OF_TWO, FIRST_TWO = "*:full", "*:full/2", "0-1:full; *:none"
REGIONS, MLP_REGION = "*:core_attn+pointwise", "*:mlp"


FROZEN = {
    "embeddings": lambda name: name.startswith("embedding."),
    "a layer in the middle": lambda name: ".layers.1." in name,
    "all biases and norms": lambda name: "bias" in name or "norm" in name,
    "all but the last layer": lambda name: ".layers.2." not in name,
}


def gradients(recompute, frozen):
    model = planned(recompute, hidden_dropout=0.1, untie_embeddings_and_output_weights=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen(name))
    loss_of(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.runs(daily=7, ci=14)
@pytest.mark.parametrize("recompute", [UNITS_OF_ONE, UNITS_OF_TWO, FIRST_TWO, REGIONS, MLP_REGION])
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_weights_get_no_gradient_and_the_others_the_same(frozen, recompute):
    expected, actual = (gradients(one, FROZEN[frozen]) for one in ("*:none", recompute))
    assert [one for one, grad in actual.items() if grad is None] == [
        *filter(FROZEN[frozen], actual)
    ]
    assert_equal([*actual.values()], [*expected.values()])


@pytest.mark.parametrize("recompute", [UNITS_OF_TWO, REGIONS])
def test_what_runs_between_forward_and_backward_changes_nothing(recompute):
    """Another micro-batch's forward, an evaluation; and the backwards in any order."""

    def outcome(recompute, first):
        model = planned(recompute, hidden_dropout=0.1, attention_dropout=0.1)
        losses = [loss_of(model, batch) for batch in (3, 4)]
        with torch.no_grad():
            assert model(*sample_tokens(5)).grad_fn is None
        losses[first].backward()
        losses[1 - first].backward()
        return [parameter.grad for parameter in model.parameters()]

    for first in (0, 1):
        assert all(map(torch.equal, outcome(recompute, first), outcome("*:none", first)))


def test_a_region_that_no_layer_calls_is_an_error_that_names_what_is_missing(monkeypatch):
    """Else its policy would save nothing, in silence."""
    monkeypatch.setitem(ALL_REGIONS, "rotary", RegionFacts(method="replay", help="a new region"))
    with tp_state(1) as parallel:
        plan = RecomputePlan((Segment(first_layer=0, regions=frozenset({"rotary"})),))
        model = build_tiny_model(
            tiny_config(num_layers=1), parallel, dtype=torch.float32, plan=plan
        )
        with pytest.raises(ValueError, match=r"region rotary saves nothing: no layer calls it"):
            model(*sample_tokens())
