"""The contestants of benchmarks/side_by_side.py: one model, built by every library that can.

Two models: "gpt" has learned positions, LayerNorm, biases, gelu and tied embeddings; "llama" has
rotary positions, RMSNorm, swiglu, no biases and an output layer of its own. All contestants of a
model have the weights of ours, so their losses are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engines import (
    DTYPES,
    Logits,
    PlainGPT,
    Setting,
    our_model,
    our_optimizer,
    transformers_gpt2,
)
from benchmarks.recompute_engines import Engine, Place, policies
from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.model.stage_models import ModelStages
from megatron_lite.recompute.schedule import plan_stage
from megatron_lite.training.compiler import compile_layers_
from megatron_lite.training.micro_batches import StageRunner
from megatron_lite.training.observe import Observer

OURS = "ours, none"
PEERS = ("megatron-core", "plain", "transformers", "litgpt", "ours, compiled")
OUR_POLICIES = {
    "none": "none",
    "full": "uniform 1",
    "core_attn": "core_attn",
    "pointwise": "*:pointwise",
    "distributed": "uniform 1, distribute",
}


@dataclass(frozen=True)
class Contestant:
    """One way to train the model.

    clear: drops the gradients of the step before.
    run: one forward and backward; returns the loss, 0-d.
    is_compiled: whether torch.compile hides its operators.
    """

    name: str
    clear: Callable[[], None]
    run: Callable[[], Tensor]
    parameters: Sequence[nn.Parameter]
    is_compiled: bool = False


class LlamaSetting(Setting):
    """The setting of the Llama model."""

    def model_config(self) -> ModelConfig:
        return replace(
            super().model_config(),
            normalization="RMSNorm",
            swiglu=True,
            position_embedding_type="rope",
            add_bias_linear=False,
            untie_embeddings_and_output_weights=True,
            ffn_hidden_size=self.ffn_size,
        )

    @property
    def ffn_size(self) -> int:
        """The width of the MLP: 8/3 of the hidden size, in multiples of 64."""
        return -(-8 * self.shape.hidden_size // (3 * 64)) * 64


def build_contestants(
    family: str, setting: Setting, place: Place, *, compiled: bool, peers: Sequence[str] = PEERS
) -> tuple[list[Contestant], dict[str, str]]:
    """Returns the contestants, ours without recomputation first, and who is left out and why.

    peers: the libraries to compare with.
    """
    model = our_model(setting, place.parallel, sequence_parallel=place.sequence_parallel)
    weights = {name: one.detach() for name, one in model.named_parameters()}
    found = list(_ours(model, setting, place))
    skipped: dict[str, str] = {}
    builders: dict[str, Callable[[], Sequence[Contestant]]] = {}
    if family == "gpt":
        builders["megatron-core"] = partial(_megatron_core, setting, place, weights)
    if place.parallel.tp_size == 1:
        canonical = partial(_canonical, weights, setting, family)
        if family == "gpt":
            builders["plain"] = lambda: _plain(setting, canonical(), compiled=compiled)
            builders["transformers"] = lambda: _transformers(
                "transformers GPT-2", partial(transformers_gpt2, setting), setting, canonical()
            )
        else:
            builders["transformers"] = lambda: _transformers(
                "transformers Llama", partial(_hf_llama, setting), setting, canonical()
            )
            builders["litgpt"] = lambda: _litgpt(setting, canonical())
        if compiled:
            builders["ours, compiled"] = lambda: _ours_compiled(setting, place)
    for name, build in builders.items():
        if name not in peers:
            continue
        try:
            found += build()
        except (ImportError, torch.OutOfMemoryError) as reason:
            skipped[name] = str(reason).splitlines()[0]
    return found, skipped


def _ours(
    model: Any, setting: Setting, place: Place, *, names: Sequence[str] = tuple(OUR_POLICIES)
) -> Iterator[Contestant]:
    """Yields our policies. They share one model and the gradient buffer of its optimizer."""
    stages = ModelStages([model])
    optimizer = our_optimizer(stages, place.parallel, DataParallelConfig())
    runner = StageRunner(stages, place.parallel)
    batch = setting.batch()
    table = policies(
        setting.shape.num_layers,
        tp_size=place.parallel.tp_size,
        sequence_parallel=place.sequence_parallel,
    )

    def run(plan: Any) -> Tensor:
        model.decoder.plan = plan
        return runner.train(
            (batch,), loss_factor=1.0, observer=Observer(), before_last=optimizer.sync_next_backward
        )

    for name in names:
        if OUR_POLICIES[name] in table:
            config = RecomputeConfig(**table[OUR_POLICIES[name]])
            plan = plan_stage(config, setting.shape.num_layers)
            yield Contestant(
                f"ours, {name}", optimizer.zero_grad, partial(run, plan), list(model.parameters())
            )


def _ours_compiled(setting: Setting, place: Place) -> list[Contestant]:
    model = our_model(setting, place.parallel, sequence_parallel=place.sequence_parallel)
    compile_layers_(model)
    (one,) = _ours(model, setting, place, names=["none"])
    return [replace(one, name="ours, compiled", is_compiled=True)]


def _megatron_core(setting: Setting, place: Place, weights: dict[str, Tensor]) -> list[Contestant]:
    from benchmarks.megatron_engines import megatron_engines

    return [_peer(engine) for engine in megatron_engines(setting, place, weights)]


def _peer(engine: Engine, *, is_compiled: bool = False) -> Contestant:
    def clear() -> None:
        for parameter in engine.parameters:
            parameter.grad = None

    def run() -> Tensor:
        loss = engine.forward()
        loss.backward()
        return loss.detach()

    return Contestant(engine.name, clear, run, engine.parameters, is_compiled)


def _of_logits(name: str, model: nn.Module, setting: Setting, **more: bool) -> Contestant:
    """Returns a contestant whose model maps tokens [b, s] to logits [b, s, V]."""
    batch = setting.batch()
    labels = batch.labels.reshape(-1)

    def forward() -> Tensor:
        return F.cross_entropy(model(batch.tokens).float().flatten(0, 1), labels)

    engine = Engine(name=name, forward=forward, parameters=tuple(model.parameters()))
    return _peer(engine, **more)


def _plain(setting: Setting, weights: list[Tensor], *, compiled: bool) -> list[Contestant]:
    model = PlainGPT(setting).to(setting.device, DTYPES[setting.dtype]).train()
    order = [model.tokens.weight, model.positions.weight]
    for layer in model.layers:
        for part in (layer.norm1, layer.qkv, layer.proj, layer.norm2, layer.fc1, layer.fc2):
            order += [part.weight, part.bias]
    _copy(weights, [*order, model.norm.weight, model.norm.bias])
    found = [_of_logits("plain torch, none", model, setting)]
    if compiled:
        whole: Any = torch.compile(model)
        found.append(_of_logits("plain torch, compiled", whole, setting, is_compiled=True))
    return found


def _transformers(
    name: str, build: Callable[[], nn.Module], setting: Setting, weights: list[Tensor]
) -> list[Contestant]:
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
    return [
        _of_logits(f"{name}, none", first, setting),
        _of_logits(f"{name}, full", second, setting),
    ]


def _llama_names(setting: Setting) -> Iterator[str]:
    """Yields the names of transformers' Llama in the order of `_canonical`."""
    attention = [f"self_attn.{one}_proj" for one in "qkvo"]
    mlp = [f"mlp.{one}_proj" for one in ("gate", "up", "down")]
    yield "model.model.embed_tokens.weight"
    for number in range(setting.shape.num_layers):
        for part in ("input_layernorm", *attention, "post_attention_layernorm", *mlp):
            yield f"model.model.layers.{number}.{part}.weight"
    yield from ("model.model.norm.weight", "model.lm_head.weight")


def _hf_llama(setting: Setting) -> nn.Module:
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


def _litgpt(setting: Setting, weights: list[Tensor]) -> list[Contestant]:
    from litgpt.config import Config
    from litgpt.model import GPT

    shape, config = setting.shape, setting.model_config()
    model = GPT(
        Config(
            name="side by side",
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
    return [_of_logits("litgpt, none", model, setting)]


def _canonical(weights: dict[str, Tensor], setting: Setting, family: str) -> list[Tensor]:
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
