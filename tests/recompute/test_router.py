"""Routers that choose otherwise in a replay: the forward's choice is kept under every policy.

The oracle is the plain model, whose backward uses the choice of its only forward. The noise comes
from a list that every call goes on in, so that no replay can repeat it.
"""

import itertools

import pytest
import torch
from torch import nn

from megatron_lite.memory.measure.live_storages import LiveStorages
from megatron_lite.memory.measure.meter import kept_for_backward
from megatron_lite.recompute.apply import apply_policy_
from tests.support.foreign_families import DECODER, language_loss, made
from tests.support.odd_layers import InOrder, assert_equal, put
from tests.support.storages import addresses

real_topk = torch.topk
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=16)
# The prefix of the classes of transformers, and options.
FAMILIES = {
    "Mixtral": dict(num_local_experts=4),
    "Qwen3Moe": dict(MOE, num_experts=4, norm_topk_prob=True),
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "DeepseekV3": dict(
        MOE,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
    "Olmoe": dict(num_experts=4, num_experts_per_tok=2),
}
POLICIES = ["*:full", "*:full+router", "*:ops(matmul)+router", "every-2:full@host"]


def noise(monkeypatch):
    """Makes top-k choose by scores with noise, and returns their values without it.

    Returns a function that starts the noise anew.
    """
    numbers = [itertools.count()]

    def noisy(scores, k, dim=-1, **options):
        generator = torch.Generator().manual_seed(next(numbers[0]))
        added = torch.rand(scores.shape, generator=generator, dtype=torch.float32)
        indices = real_topk(scores.detach() + 10 * added.to(scores), k, dim, **options)[1]
        return scores.gather(dim, indices), indices

    monkeypatch.setattr(torch, "topk", noisy)
    return lambda: numbers.__setitem__(0, itertools.count())


def build(name):
    torch.manual_seed(3)
    return made(name, **DECODER, **FAMILIES[name])


def gradients(model, restart):
    """Returns those of three steps of one batch each."""
    found = []
    for number in range(3):
        restart()
        torch.manual_seed(number)
        model.zero_grad()
        language_loss(model, number).backward()
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return found


@pytest.mark.runs(daily=5, ci=5)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_router_with_noise_trains_as_in_the_plain_model(name, policy, monkeypatch):
    model, restart = build(name), noise(monkeypatch)
    expected = gradients(model, restart)
    apply_policy_(model, layers_fqn="model.layers", policy=policy)
    assert_equal(gradients(model, restart), expected)
    gates = [p.grad for n, p in model.named_parameters() if "gate.w" in n or "router.w" in n]
    assert gates and all(each is not None and each.abs().sum() > 0 for each in gates)


class Routed(nn.Module):
    """A layer of two experts of four for each token. Its noise is in the choice alone."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, hidden):
        weights, chosen = torch.topk(self.gate(hidden).softmax(-1), 2)
        output = hidden
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            part = torch.tanh(expert(hidden[token])) * weights[token, place, None]
            output = output.index_add(0, token, part)
        return output


def squares(model, number):
    hidden = torch.randn(7, 6, generator=torch.Generator().manual_seed(number))
    return model(hidden.requires_grad_()).square().mean()


def test_a_choice_costs_its_indices_and_survives_a_second_backward(monkeypatch):
    kept, found, restart = [], [], noise(monkeypatch)
    for policy in ("*:full", "*:none"):
        torch.manual_seed(1)
        model = InOrder(Routed)
        put(model, policy, verify=True)
        restart()
        with kept_for_backward(exclude=model.parameters()) as meter, LiveStorages() as live:
            loss = squares(model, 0)
            known = meter.storages().keys() | addresses([loss])
            kept.append(meter.total_bytes() + live.bytes_beside(known))
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([each.grad for each in model.parameters()])
    assert_equal(*found)
    hidden, indices, generator = 7 * 6 * 4, 7 * 2 * 8, torch.get_rng_state().numel()
    assert kept[0] == 2 * (hidden + indices + generator) + hidden < kept[1] + 2 * generator


def test_a_layer_inside_a_layer_keeps_what_the_replay_of_the_outer_one_chose(monkeypatch):
    found, restart = [], noise(monkeypatch)
    for policy in ("*:full", "*:none"):
        torch.manual_seed(1)
        model = InOrder(lambda: InOrder(Routed))
        for each in (model, *model.layers):
            put(each, policy)
        restart()
        squares(model, 0).backward()
        found.append([each.grad for each in model.parameters()])
    assert_equal(*found)


def test_a_layer_without_top_k_pays_nothing_and_a_policy_that_says_router_tells_it():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    apply_policy_(model, layers_fqn="", policy="*:full+router")
    with pytest.warns(UserWarning, match=r"says \+router calls top-k"):
        model(torch.ones(2, 6)).sum().backward()
    modes = []
    model[0].register_forward_hook(
        lambda *_: modes.append(len(torch.overrides._get_current_function_mode_stack()))
    )
    model(torch.ones(3, 6)).sum().backward()  # call 2 is verified
    model(torch.ones(3, 6)).sum().backward()
    assert modes[-1] == 0
