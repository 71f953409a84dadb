"""The peers of benchmarks/contestants.py: plain torch, transformers and litgpt.

Each function builds one model, loads it with the weights of ours, and returns its contestants. It
raises ImportError if the library is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engines import DTYPES, Setting
from benchmarks.peer_engines import Logits, PlainGPT


class Contestant(NamedTuple):
    """One way to train the model.

    clear: drops the gradients of the step before.
    run: one forward and backward; returns the loss, 0-d.
    """

    name: str
    clear: Callable[[], None]
    run: Callable[[], Tensor]


def of_logits(name: str, model: nn.Module, setting: Setting) -> Contestant:
    """Returns a contestant whose model maps tokens [b, s] to logits [b, s, V]."""
    batch = setting.batch()
    labels = batch.labels.reshape(-1)

    def clear() -> None:
        for parameter in model.parameters():
            parameter.grad = None

    def run() -> Tensor:
        loss = F.cross_entropy(model(batch.tokens).float().flatten(0, 1), labels)
        loss.backward()
        return loss.detach()

    return Contestant(name, clear, run)


def plain(setting: Setting, weights: list[Tensor], *, compiled: bool) -> list[Contestant]:
    """Returns GPT-2 in plain torch, and the same model compiled if `compiled`."""
    model = PlainGPT(setting).to(setting.device, DTYPES[setting.dtype]).train()
    order = [model.tokens.weight, model.positions.weight]
    for layer in model.layers:
        for part in (layer.norm1, layer.qkv, layer.proj, layer.norm2, layer.fc1, layer.fc2):
            order += [part.weight, part.bias]
    _copy(weights, [*order, model.norm.weight, model.norm.bias])
    found = [of_logits("plain torch, none", model, setting)]
    if compiled:
        whole: Any = torch.compile(model)
        found.append(of_logits("plain torch, compiled", whole, setting))
    return found


def transformers(
    name: str, build: Callable[[], nn.Module], setting: Setting, weights: list[Tensor]
) -> list[Contestant]:
    """Returns transformers' model without recomputation, and with its checkpoint of each layer.

    Both share one set of weights. weights: those of `canonical`.
    """
    first = build().to(setting.device, DTYPES[setting.dtype]).train()
    is_gpt2 = "GPT-2" in name
    named = dict(first.named_parameters())
    own = list(named.values()) if is_gpt2 else [named[one] for one in _llama_names(setting)]
    _copy(weights, own, transposed=is_gpt2)
    second = build().to(setting.device, DTYPES[setting.dtype]).train()
    second.load_state_dict(first.state_dict(keep_vars=True), assign=True)
    inner: Any = second.model
    if hasattr(inner, "tie_weights"):
        inner.tie_weights()
    inner.gradient_checkpointing_enable({"use_reentrant": False})
    return [of_logits(f"{name}, none", first, setting), of_logits(f"{name}, full", second, setting)]


def _llama_names(setting: Setting) -> Iterator[str]:
    """Yields the names of transformers' Llama in the order of `canonical`."""
    attention = [f"self_attn.{one}_proj" for one in "qkvo"]
    mlp = [f"mlp.{one}_proj" for one in ("gate", "up", "down")]
    yield "model.model.embed_tokens.weight"
    for number in range(setting.shape.num_layers):
        for part in ("input_layernorm", *attention, "post_attention_layernorm", *mlp):
            yield f"model.model.layers.{number}.{part}.weight"
    yield from ("model.model.norm.weight", "model.lm_head.weight")


def hf_llama(setting: Setting) -> nn.Module:
    """Returns transformers' Llama, which returns its logits only."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, config = setting.shape, setting.model_config()
    return Logits(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=shape.vocab_size,
                hidden_size=shape.hidden_size,
                intermediate_size=config.ffn_size,
                num_hidden_layers=shape.num_layers,
                num_attention_heads=shape.num_attention_heads,
                num_key_value_heads=shape.num_attention_heads,
                max_position_embeddings=shape.seq_length,
                rms_norm_eps=config.norm_epsilon,
                tie_word_embeddings=False,
                attn_implementation="sdpa",
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    )


def litgpt(setting: Setting, weights: list[Tensor]) -> list[Contestant]:
    """Returns litgpt's Llama. weights: those of `canonical`."""
    from litgpt.config import Config
    from litgpt.model import GPT

    shape, config = setting.shape, setting.model_config()
    model = GPT(
        Config(
            name="benchmark",
            n_layer=shape.num_layers,
            n_embd=shape.hidden_size,
            n_head=shape.num_attention_heads,
            block_size=shape.seq_length,
            vocab_size=shape.vocab_size,
            padded_vocab_size=shape.vocab_size,
            bias=False,
            norm_class_name="RMSNorm",
            norm_eps=config.norm_epsilon,
            mlp_class_name="LLaMAMLP",
            rotary_percentage=1.0,
            rope_base=config.rotary_base,
            parallel_residual=False,
            intermediate_size=config.ffn_size,
        )
    )
    model = model.to(setting.device, DTYPES[setting.dtype]).train()
    named = dict(model.named_parameters())
    order = [named["transformer.wte.weight"]]
    for number in range(shape.num_layers):
        names = ("norm_1", "attn.qkv", "attn.proj", "norm_2", "mlp.fc_1", "mlp.fc_2", "mlp.proj")
        order += [named[f"transformer.h.{number}.{name}.weight"] for name in names]
    order += [named["transformer.ln_f.weight"], named["lm_head.weight"]]
    fused: list[Tensor] = []  # litgpt keeps query, key and value in one matrix
    rest = list(weights)
    for parameter in order:
        one = rest.pop(0)
        while one.shape != parameter.shape:
            one = torch.cat((one, rest.pop(0)))
        fused.append(one)
    _copy(fused, order)
    return [of_logits("litgpt, none", model, setting)]


def canonical(weights: dict[str, Tensor], setting: Setting, family: str) -> list[Tensor]:
    """Returns the weights of ours, of each layer norm, attention, norm and MLP.

    The query, key and value rows of a head are neighbours in ours. Here all queries come first,
    then all keys, then all values; in Llama each is a tensor of its own.
    """
    heads, found = setting.shape.num_attention_heads, [weights["embedding.word_embeddings.weight"]]
    if family == "gpt":
        found.append(weights["embedding.position_embeddings.weight"])
    parts = (
        "input_layernorm",
        "self_attention.linear_qkv",
        "self_attention.linear_proj",
        "pre_mlp_layernorm",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
    for number in range(setting.shape.num_layers):
        own: dict[str, list[Tensor]] = {}
        for part in parts:
            for kind in ("weight", "bias")[: 2 if family == "gpt" else 1]:
                one = weights[f"decoder.layers.{number}.{part}.{kind}"]
                pieces = [one]
                if part.endswith("qkv"):
                    apart = one.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(1, 2)
                    pieces = [apart.flatten(0, 1)] if family == "gpt" else [*apart]
                elif part.endswith("fc1") and family == "llama":
                    pieces = list(one.chunk(2))
                own.setdefault(part, []).extend(pieces)
        found += [one for part in parts for one in own[part]]
    found += [
        weights[f"decoder.final_layernorm.{kind}"]
        for kind in ("weight", "bias")[: 2 if family == "gpt" else 1]
    ]
    return found + ([] if family == "gpt" else [weights["output_layer.weight"]])


def _copy(
    weights: Sequence[Tensor], parameters: Sequence[Tensor], *, transposed: bool = False
) -> None:
    """Copies weights into parameters of the same order. transposed: matrices of layers are [in,
    out]."""
    with torch.no_grad():
        for number, (weight, parameter) in enumerate(zip(weights, parameters, strict=True)):
            is_layer = number > 1 and weight.dim() == 2
            parameter.copy_(weight.t() if transposed and is_layer else weight)
