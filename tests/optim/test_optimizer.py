"""The optimizer against torch's AdamW, SGD and clip_grad_norm_ on the unsharded model, in float32
and for bf16 weights."""

import copy
import math

import pytest
import torch
from torch import nn

from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.optim import grad_buffer
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.parameter_spec import ParameterSpec, mark, spec_of
from tests.support.equality import variant_config
from tests.support.models import build_tiny_model, on_ranks, tp_state
from tests.support.saves import same
from tests.support.torch_features import NEEDS_GRAD_DTYPE

CONFIG = dict(adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6, weight_decay=0.1)
RATES = [0.01, 0.02, 0.0, 0.015]


class Plain(nn.Module):
    """Two matrices, a norm weight and a bias; a loss that depends on all of them."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        shapes = {
            "embedding_weight": (7, 5),
            "linear_weight": (3, 5),
            "norm_weight": (5,),
            "linear_bias": (3,),
        }
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(
                name, mark(nn.Parameter(values), ParameterSpec(global_shape=shape))
            )

    def loss(self, number):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(number)).to(
            self.norm_weight.dtype
        )
        hidden = (x @ self.embedding_weight).tanh() * self.norm_weight
        return (hidden @ self.linear_weight.t() + self.linear_bias).square().mean()


SGD = dict(optimizer="sgd", sgd_momentum=0.8, weight_decay=0.1)
RULES = {"adam": CONFIG, "sgd": SGD, "sgd without momentum": dict(SGD, sgd_momentum=0.0)}


def torchs(model, config=CONFIG, **kernel):
    """torch's optimizer with Megatron's groups: vectors (norms, biases) do not decay."""
    groups = [
        {
            "params": [p for p in model.parameters() if p.dim() > 1],
            "weight_decay": config["weight_decay"],
        },
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    if "sgd_momentum" in config:
        return torch.optim.SGD(groups, momentum=config["sgd_momentum"], foreach=False)
    return torch.optim.AdamW(
        groups,
        betas=(config["adam_beta1"], config["adam_beta2"]),
        eps=config["adam_eps"],
        **(kernel or dict(foreach=False)),
    )


def step_torch(model, optimizer, rate, clip_grad, numbers):
    """One update by torch; returns the norm before clipping (0-d)."""
    optimizer.zero_grad()
    for number in numbers:
        model.loss(number).backward()
    norm = nn.utils.clip_grad_norm_(
        model.parameters(), clip_grad if clip_grad > 0.0 else float("inf")
    )
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    return norm


@pytest.mark.parametrize(
    "rule, clip_grad",
    [("adam", 0.0), ("adam", 0.05), ("adam", 1000.0), ("sgd", 0.05), ("sgd without momentum", 0.0)],
)
def test_float32_weights_follow_torchs_optimizer_and_clip(rule, clip_grad):
    """Fused against single-tensor arithmetic: a few roundings of 6e-8 per step."""
    config = RULES[rule]
    ours = Plain()
    theirs = copy.deepcopy(ours)
    reference = torchs(theirs, config)
    with tp_state(1) as parallel:
        optimizer = Optimizer(ours, OptimizerConfig(clip_grad=clip_grad, **config), parallel)
        for number, rate in enumerate(RATES):
            optimizer.zero_grad()
            for micro_batch in (2 * number, 2 * number + 1):
                ours.loss(micro_batch).backward()
            update = optimizer.step(rate)
            norm = step_torch(theirs, reference, rate, clip_grad, (2 * number, 2 * number + 1))
            assert (
                update.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
                and update.skipped.item() == 0.0
            )
            assert norm > 0.05  # so that the middle case really clips
            for (name, mine), other in zip(
                ours.named_parameters(), theirs.parameters(), strict=True
            ):
                torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6, msg=name)
    assert optimizer.num_updates == len(RATES)
    for name, parameter in theirs.named_parameters():
        expected = {**reference.state[parameter]}
        expected.pop("step", None)
        held = {key for key, value in expected.items() if value is not None}
        assert optimizer.states[name].keys() == held
        for key, value in optimizer.states[name].items():
            torch.testing.assert_close(value, reference.state[parameter][key], rtol=1e-5, atol=1e-8)


def step_with(model, optimizer, grads, rate):
    """Makes one update by torch from these gradients."""
    for name, parameter in model.named_parameters():
        parameter.grad = grads[name]
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def float32_sum_of_gradients(model, micro_batches):
    """By name, through autograd.grad: no gradient buffer, no accumulation by autograd."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    per_batch = [torch.autograd.grad(model.loss(number), parameters) for number in micro_batches]
    return {
        name: sum(grad.float() for grad in grads)
        for name, *grads in zip(names, *per_batch, strict=True)
    }


@pytest.mark.runs(ci=3)
@pytest.mark.parametrize(
    "dtype, knows_grad_dtype",
    [
        pytest.param(torch.bfloat16, True, marks=NEEDS_GRAD_DTYPE),
        (torch.bfloat16, False),
        pytest.param(torch.float16, True, marks=NEEDS_GRAD_DTYPE),
    ],
)
def test_16_bit_weights_follow_float32_masters(dtype, knows_grad_dtype, monkeypatch):
    """The oracle: the 16-bit model's gradients, summed in float32, on float32 weights; the model
    gets those rounded. A step of 1e-4 is less than half of a bf16 or fp16 step for weights of order
    1, so that without masters most would never move."""
    monkeypatch.setattr(grad_buffer, "hasattr", lambda *_: knows_grad_dtype, raising=False)
    model, masters = Plain(dtype), Plain(dtype).float()
    start = copy.deepcopy(model.state_dict())
    reference = torchs(masters)
    with tp_state(1) as parallel:
        optimizer = Optimizer(model, OptimizerConfig(clip_grad=0.0, **CONFIG), parallel)
        for _ in range(100):
            expected = float32_sum_of_gradients(model, range(3))
            optimizer.zero_grad()
            for number in range(3):
                model.loss(number).backward()
            assert same(optimizer.layout.gradients.grads, expected)
            step_with(masters, reference, expected, 1e-4)
            optimizer.step(1e-4)
            for name, parameter in masters.named_parameters():
                torch.testing.assert_close(
                    optimizer.states[name]["master"], parameter.detach(), rtol=1e-5, atol=1e-6
                )
                assert torch.equal(
                    model.get_parameter(name), optimizer.states[name]["master"].to(dtype)
                )
    moved = sum((model.get_parameter(name) != value).sum().item() for name, value in start.items())
    assert moved > 0.9 * sum(value.numel() for value in start.values())


def test_zeros_of_a_gradient_are_counted_once_over_all_ranks():
    """Every element of a fresh buffer is zero: as many as there are parameters, padding rows of the
    vocabulary included."""
    config = variant_config("gpt2")

    def work(parallel):
        optimizer = Optimizer(build_tiny_model(config, parallel), OptimizerConfig(), parallel)
        fresh = int(optimizer.num_zeros_in_grad())
        for grad in optimizer.layout.gradients.grads.values():
            grad.fill_(1.0)
        none = int(optimizer.num_zeros_in_grad())
        # on every rank the same three
        optimizer.layout.gradients.grads["decoder.final_layernorm.bias"][:3] = 0.0
        # two on each rank, others
        optimizer.layout.gradients.grads["decoder.layers.0.mlp.linear_fc1.bias"][:2] = 0.0
        return fresh, none, int(optimizer.num_zeros_in_grad())

    with tp_state(1) as parallel:
        whole = [
            spec_of(parameter).global_shape
            for parameter in build_tiny_model(config, parallel).parameters()
        ]
    parameters = sum(math.prod(shape) for shape in whole)  # without the padding of the vocabulary
    assert on_ranks(work, 2, tp_size=2) == [(parameters, 0, 3 + 2 * 2)] * 2
