"""megatron-core's GPT with our weights: the same logits, loss and gradients, with windows and
rotation on some layers alone.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.support.equality import LATENT, difference
from tests.support.models import (
    VOCAB_SIZE,
    build_tiny_model,
    sample_tokens,
    tiny_config,
    tp_state,
    whole_tensor,
)
from tests.support.ranks import run_ranks

pytest.importorskip("megatron.core")

MODELS = {
    "full attention": {},
    "every layer": dict(window_size=(3, 0)),
    "every second layer": dict(window_size=(3, 0), window_attn_skip_freq=2, no_rope_freq=2),
    "lists": dict(
        window_size=(2, 0), window_attn_skip_freq=(0, 1, 1, 0), no_rope_freq=(1, 0, 1, 0)
    ),
    "neighbours": dict(rotary_interleaved=True),
    "latents": dict(LATENT, q_lora_rank=8, qk_layernorm=True, rope_type="rope"),
    "a latent of keys and values": dict(
        LATENT,
        q_lora_rank=None,
        rotary_scaling_factor=3.0,
        original_max_position_embeddings=20,
        mscale=0.8,
        mscale_all_dim=0.4,
    ),
}


def our_config(name):
    return tiny_config(
        num_layers=4,
        position_embedding_type="rope",
        normalization="RMSNorm",
        squared_relu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        **MODELS[name],
    )


def their_model(name):
    from tests.support import megatron_core

    differing = {
        field: list(value) if field != "window_size" and isinstance(value, tuple) else value
        for field, value in MODELS[name].items()
    }
    return megatron_core.their_model(
        our_config(name),
        dtype=torch.float64,
        padded=VOCAB_SIZE,
        activation_func=lambda x: x.relu().square(),
        **differing,
    )


def results(model, logits, labels):
    """Logits, and the loss's gradient of each parameter by its name."""
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    return {
        "logits": logits.detach(),
        **{name: parameter.grad for name, parameter in model.named_parameters()},
    }


def errors(rank, world_size):
    """By model and tensor: the largest error, relative to the largest value."""
    from tests.support.megatron_core import on_cpu

    with on_cpu(1):
        return {
            f"{name}: {key}": error for name in MODELS for key, error in errors_of(name).items()
        }


def errors_of(name):
    tokens, labels = sample_tokens()
    with tp_state(1) as parallel:
        ours = build_tiny_model(our_config(name), parallel)
        weights = {
            key: whole_tensor(value, value, parallel) for key, value in ours.named_parameters()
        }
        theirs = their_model(name)
        loaded = theirs.load_state_dict(weights, strict=False)
        assert not loaded.unexpected_keys and all(
            "_extra_state" in key for key in loaded.missing_keys
        ), loaded
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        expected = results(theirs, theirs(tokens, positions, None), labels)
        got = results(ours, ours(tokens), labels)
        for key, parameter in ours.named_parameters():
            got[key] = whole_tensor(got[key], parameter, parallel)
    assert expected.keys() == got.keys()
    return {key: difference(value, got[key]) for key, value in expected.items()}


def test_logits_and_gradients_equal_those_of_megatron_core():
    (found,) = run_ranks(errors, 1)
    assert (
        len(found) > 4 * 25
        and {name: error for name, error in found.items() if not error < 1e-12} == {}
    )
