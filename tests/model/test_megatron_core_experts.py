"""megatron-core's router and mixture-of-experts layer with our weights, over four steps.

Its layer wants CUDA. These stand-ins take the place of what a CPU lacks, and none of the layer's
mathematics: the device (`on_cpu`), the grouped product (its SequentialMLP computes expert by
expert, and on one rank without the sum over ranks, after which adding a bias fails), the precision
of its scores (float64 instead of float32), and `torch.topk` of whole numbers, whose equal values
come in any order, so that "the first tokens" would not be the first.
"""

import pytest
import torch

from tests.model.test_experts import DEEPSEEK, B, H, S, config_of, layer_of, regions_of
from tests.support.equality import difference
from tests.support.ranks import run_ranks

pytest.importorskip("megatron.core.models.gpt")  # once, and not in each process

STEPS, MICRO_BATCHES, SCALE, RATE = 4, 2, 0.5, 0.01
SIGMOID = {**DEEPSEEK, "moe_shared_expert_intermediate_size": None}
LOSSES = dict(moe_aux_loss_coeff=0.25, moe_z_loss_coeff=0.125)
EVERY_LOSS = dict(
    moe_router_load_balancing_type=("seq_aux_loss", "aux_loss", "global_aux_loss"),
    moe_aux_loss_coeff=(0.25, 0.5, 0.125),
)
TIGHT = dict(moe_expert_capacity_factor=0.8, moe_router_topk=3)
CASES = {
    "aux_loss": LOSSES,
    "seq_aux_loss": {**LOSSES, "moe_router_load_balancing_type": "seq_aux_loss"},
    "global_aux_loss": {**LOSSES, "moe_router_load_balancing_type": "global_aux_loss"},
    "none": {**LOSSES, "moe_router_load_balancing_type": "none"},
    "every loss, sigmoid": {**SIGMOID, **EVERY_LOSS, "moe_router_bias_update_rate": 0.1},
    "pre-softmax": dict(moe_router_pre_softmax=True, moe_router_topk_scaling_factor=1.7, **LOSSES),
    "biases": dict(add_bias_linear=True, **LOSSES),
    "probs": {**TIGHT, **LOSSES},
    "position": dict(moe_token_drop_policy="position", **TIGHT),
    "dropped, sigmoid": {**SIGMOID, **EVERY_LOSS, "moe_expert_capacity_factor": 0.9},
    "padded": dict(moe_pad_expert_input_to_capacity=True, **TIGHT, **LOSSES),
    "padded, position, biases": dict(
        moe_pad_expert_input_to_capacity=True,
        moe_token_drop_policy="position",
        add_bias_linear=True,
        moe_expert_capacity_factor=1.3,
    ),
    "one place": dict(moe_expert_capacity_factor=0.01, add_bias_linear=True),
    "every expert": dict(moe_router_topk=8, moe_expert_capacity_factor=0.5),
    "sinkhorn": dict(moe_router_load_balancing_type="sinkhorn", moe_z_loss_coeff=0.1),
    "sinkhorn, one": dict(moe_router_load_balancing_type="sinkhorn", moe_router_topk=1),
    "jitter": dict(moe_input_jitter_eps=0.3, moe_expert_capacity_factor=1.0, **LOSSES),
}


def their_layer(ours):
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    from tests.support.megatron_core import biases_work_, their_config

    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    experts = ModuleSpec(module=SequentialMLP, submodules=linears)
    layer = MoELayer(their_config(ours.config), MoESubmodules(experts=experts), layer_number=1)
    with torch.no_grad():
        for name, parameter in named(layer):
            parameter.copy_(whole(ours, name))
    biases_work_(layer)
    return layer


def named(layer):
    return list(layer.named_parameters())


def whole(ours, name, of="data"):
    """The part of our parameter, or of its gradient, that theirs of this name is."""
    found = dict(ours.named_parameters())
    _, expert, own = name.partition("local_experts.")
    if not expert:
        return getattr(found[name], of)
    number, _, rest = own.partition(".")
    return getattr(found[f"experts.{rest}"], of)[int(number)]


def topk_of_first(of, k, dim=-1, plain=torch.topk, **more):
    if of.is_floating_point():
        return plain(of, k, dim, **more)
    found = of.sort(dim=dim, descending=True, stable=True)
    return found.values.narrow(dim, 0, k), found.indices.narrow(dim, 0, k)


def softmax(of, dim, plain=torch.softmax, **_):
    return plain(of, dim)


def errors(rank, world_size, case):
    """By step and tensor: the largest error, relative to the largest value."""
    from megatron.core.transformer.moe.moe_utils import (
        MoEAuxLossAutoScaler,
        get_updated_expert_bias,
    )

    from tests.support.megatron_core import on_cpu

    config = config_of(**{"moe_ffn_hidden_size": 24, **CASES[case]})
    found = {}
    with on_cpu(1), layer_of(config) as (ours, regions):
        torch.topk, torch.softmax = topk_of_first, softmax
        torch.Tensor.float = torch.Tensor.double
        for name, parameter in named(ours):
            if name.endswith(".bias"):  # zeros would hide mistakes
                parameter.data += 0.3 * torch.randn_like(parameter)
        theirs = their_layer(ours)
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(SCALE))
        for step in range(STEPS):
            ours.router.start_step(SCALE)
            theirs.router.reset_global_aux_loss_tracker()
            for micro_batch in range(MICRO_BATCHES):
                torch.manual_seed(MICRO_BATCHES * step + micro_batch)
                x = torch.randn(S, B, H, dtype=torch.float64, requires_grad=True)
                y = x.detach().clone().requires_grad_()
                factor, noise = torch.randn_like(x), 1 + 0.3 * (2 * torch.rand_like(x) - 1)
                if config.moe_input_jitter_eps is not None:
                    torch.Tensor.uniform_ = lambda x, *_, all=noise: x.copy_(all.view_as(x))
                    theirs.router.input_jitter = lambda shape, all=noise: all
                output = ours(x, regions_of(regions.rng))
                expected, _ = theirs(y)
                (output * factor).sum().backward()
                (expected * factor).sum().backward()
                place = f"step {step}, micro-batch {micro_batch}"
                found[f"{place}: output"] = difference(expected, output)
                found[f"{place}: input"] = difference(y.grad, x.grad)
            for name, parameter in named(theirs):
                grad = whole(ours, name, "grad")
                # an expert that no token chose
                expected = torch.zeros_like(grad) if parameter.grad is None else parameter.grad
                found[f"step {step}: {name}"] = difference(expected, grad)
            for parameter in [*theirs.parameters(), *ours.parameters()]:
                if parameter.grad is not None:
                    parameter.data -= RATE * parameter.grad
                    parameter.grad = None
            if ours.router.expert_bias is not None:
                ours.router.update_bias(torch.zeros(()))
                counts = theirs.router.local_tokens_per_expert
                theirs.router.expert_bias = get_updated_expert_bias(
                    counts, theirs.router.expert_bias, config.moe_router_bias_update_rate
                )
                counts.zero_()
                assert torch.equal(theirs.router.expert_bias, ours.router.expert_bias)
                assert step or ours.router.expert_bias.any()
    return found


@pytest.mark.runs(daily=4, ci=8)
@pytest.mark.parametrize("case", CASES)
def test_four_steps_equal_those_of_megatron_core(case):
    (found,) = run_ranks(errors, 1, case)
    assert len(found) >= STEPS * (2 * MICRO_BATCHES + 17)
    assert {name: error for name, error in found.items() if not error < 1e-9} == {}
