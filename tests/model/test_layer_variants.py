"""A residual stream in float32: what a layer computes with it."""

import torch

from tests.support.equality import variant_config
from tests.support.models import build_tiny_model, sample_tokens, tp_state


def test_a_float32_residual_stream_is_the_exact_sum_of_its_branches():
    """The branches are computed in 16 bits, and nothing rounds their sum."""
    config = variant_config("gpt2", num_layers=2, fp32_residual_connection=True)
    seen = {}

    def note(name):
        return lambda module, inputs, output: seen.update(
            {name: output, f"input of {name}": inputs[0]}
        )

    with tp_state(1) as parallel:
        model = build_tiny_model(config, parallel, dtype=torch.bfloat16)
        for name in ("embedding", "decoder"):
            model.get_submodule(name).register_forward_hook(note(name))
        for name in ("", ".self_attention", ".mlp"):
            module = model.get_submodule(f"decoder.layers.0{name}")
            module.register_forward_hook(note(f"layer{name}"))
        model(*sample_tokens()).sum().backward()
    assert seen["embedding"].dtype == seen["layer"].dtype == torch.float32
    branches = seen["layer.self_attention"], seen["layer.mlp"]
    assert {branch.dtype for branch in branches} == {torch.bfloat16}
    expected = seen["embedding"] + branches[0].float() + branches[1].float()
    assert torch.equal(seen["layer"], expected)
    assert not torch.equal(expected, expected.bfloat16().float())
    assert seen["decoder"].dtype == torch.bfloat16
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.bfloat16}
