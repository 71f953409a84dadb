"""The variants of a layer: what they compute, and that a pipeline of them trains as one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.model.norm import Norm
from megatron_lite.parallel.parameter_spec import spec_of
from megatron_lite.tensor_parallel.rank_context import RankContext
from tests.support.equality import difference, variant_config
from tests.support.models import build_tiny_model, sample_tokens, tiny_config, tp_state
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_a_weight_around_zero_is_that_of_a_plain_norm_less_one(norm: str) -> None:
    """All parameters and all gradients are the same but for the 1."""
    config = tiny_config(num_layers=2, normalization=norm, qk_layernorm=True)
    with tp_state(1) as parallel:
        plain = build_tiny_model(config, parallel)
        shifted = build_tiny_model(replace(config, apply_layernorm_1p=True), parallel)
        for name, parameter in shifted.named_parameters():
            is_norm = "layernorm" in name and name.endswith("weight")
            assert spec_of(parameter).init_value == 0.0
            with torch.no_grad():
                parameter.copy_(plain.get_parameter(name) - float(is_norm))
        losses = [model.loss(*sample_tokens()) for model in (plain, shifted)]
        for loss in losses:
            loss.sum().backward()
    assert difference(*losses) < 1e-14
    for name, parameter in plain.named_parameters():
        error = difference(parameter.grad, shifted.get_parameter(name).grad)  # type: ignore[arg-type]
        assert error < 1e-12, name


def all_heads(rank: int, world_size: int) -> bool:
    """Whether autograd's gradients of the formula equal those of the norm of this rank's heads."""
    config = tiny_config(qk_layernorm=True, qk_layernorm_scope="all-heads", normalization="RMSNorm")
    heads, s, b = 4, 5, 3
    torch.manual_seed(5)
    whole = torch.randn(s, b, heads, config.head_dim, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(heads, config.head_dim, dtype=torch.float64, requires_grad=True)
    grad_output = torch.randn_like(whole)
    mean = whole.square().mean((2, 3), keepdim=True)
    expected = whole * (mean + config.norm_epsilon).rsqrt() * weight
    expected.backward(grad_output)
    with tp_state(world_size) as parallel:
        context = RankContext.of(parallel, sequence_parallel=False, params_dtype=torch.float64)
        norm = Norm(heads * config.head_dim, config, context, all_heads=True)
        own = whole.detach().chunk(world_size, 2)[rank].requires_grad_()
        with torch.no_grad():
            norm.weight.copy_(weight.chunk(world_size)[rank].flatten())
        output = norm(own)
        output.backward(grad_output.chunk(world_size, 2)[rank])
        found = {
            "output": (expected.chunk(world_size, 2)[rank], output),
            "input": (whole.grad.chunk(world_size, 2)[rank], own.grad),  # type: ignore[union-attr]
            "weight": (weight.grad.chunk(world_size)[rank].flatten(), norm.weight.grad),  # type: ignore[union-attr]
        }
        return all(torch.allclose(*pair, rtol=1e-12, atol=1e-13) for pair in found.values())


@pytest.mark.runs(daily=1, ci=3)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_norm_over_all_heads_is_the_formula_on_any_number_of_ranks(world_size: int) -> None:
    assert run_ranks(all_heads, world_size, detail=False) == [True] * world_size


def test_a_float32_residual_stream_is_the_exact_sum_of_its_branches() -> None:
    """The branches are computed in 16 bits, and nothing rounds their sum."""
    config = variant_config("gpt2", num_layers=2, fp32_residual_connection=True)
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: seen.update(
            {name: output, f"input of {name}": inputs[0]}
        )

    with tp_state(1) as parallel:
        model = build_tiny_model(config, parallel, dtype=torch.bfloat16)
        for name in ("embedding", "decoder"):
            model.get_submodule(name).register_forward_hook(note(name))
        for name in ("", ".self_attention", ".mlp", ".input_layernorm"):
            module = model.get_submodule(f"decoder.layers.0{name}")
            module.register_forward_hook(note(f"layer{name}"))
        model.loss(*sample_tokens()).sum().backward()
    assert seen["embedding"].dtype == seen["layer"].dtype == torch.float32
    branches = seen["layer.self_attention"], seen["layer.mlp"]
    assert {branch.dtype for branch in branches} == {torch.bfloat16}
    expected = seen["embedding"] + branches[0].float() + branches[1].float()
    assert torch.equal(seen["layer"], expected)
    assert not torch.equal(expected, expected.bfloat16().float())
    normed = F.layer_norm(
        seen["embedding"],
        (config.hidden_size,),
        *(
            parameter.float()
            for parameter in model.get_submodule("decoder.layers.0.input_layernorm").parameters()
        ),
        config.norm_epsilon,
    )
    assert torch.equal(seen["layer.input_layernorm"], normed.bfloat16())
    assert seen["decoder"].dtype == torch.bfloat16
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}  # type: ignore[union-attr]
