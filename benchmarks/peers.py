"""The peers of benchmarks/contestants.py: plain torch, transformers, and Liger's kernels.

Each function builds one model with the weights of ours and returns its ways to compute the loss. It
raises ImportError if the library is not installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engines import DTYPES, LEARNING_RATE, Setting, Shape


class Contestant(NamedTuple):
    """One way to train the model.

    clear: drops the gradients of the step before.
    run: one forward and backward; returns the loss, 0-d.
    step: a training step: clear, run, clip the gradients at 1.0, and update with AdamW.
    """

    name: str
    clear: Callable[[], None]
    run: Callable[[], Tensor]
    step: Callable[[], Tensor]


Losses = dict[str, Callable[[], Tensor]]


def sharing(losses: Losses, parameters: Sequence[nn.Parameter]) -> list[Contestant]:
    """Returns a contestant for each way to compute a loss of the same parameters.

    They share an optimizer. In bf16 its moments, the weights and the gradients are bf16: less work
    than ours, whose sums of gradients, moments and masters are float32.
    """
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, fused=True)

    def run(loss: Callable[[], Tensor]) -> Tensor:
        value = loss()
        value.backward()
        return value.detach()

    def step(loss: Callable[[], Tensor]) -> Tensor:
        optimizer.zero_grad()
        value = run(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return value

    return [
        Contestant(name, optimizer.zero_grad, partial(run, loss), partial(step, loss))
        for name, loss in losses.items()
    ]


def of_logits(model: Any, setting: Setting) -> Callable[[], Tensor]:
    """Returns the loss of a model that maps tokens [b, s] to logits [b, s, V]."""
    batch = setting.batch()
    labels = batch.labels.reshape(-1)
    return lambda: F.cross_entropy(model(batch.tokens).float().flatten(0, 1), labels)


def compiled_too(losses: Losses, name: str, loss: Callable[..., Any], compiled: bool) -> None:
    """Adds a way to compute the loss, and the same through torch.compile."""
    losses[name] = loss
    if compiled:
        losses[f"{name}, compiled"] = torch.compile(loss)


def plain(setting: Setting, weights: list[Tensor], *, compiled: bool) -> list[Contestant]:
    """Returns GPT-2 in plain torch, and the same model compiled if `compiled`."""
    model = PlainGPT(setting).to(setting.device, DTYPES[setting.dtype]).train()
    order = [model.tokens.weight, model.positions.weight]
    for layer in model.layers:
        for part in (layer.norm1, layer.qkv, layer.proj, layer.norm2, layer.fc1, layer.fc2):
            order += [part.weight, part.bias]
    _copy(weights, [*order, model.norm.weight, model.norm.bias])
    losses: Losses = {}
    compiled_too(losses, "plain torch", of_logits(model, setting), compiled)
    return sharing(losses, list(model.parameters()))


def transformers(setting: Setting, weights: list[Tensor], *, compiled: bool) -> list[Contestant]:
    """Returns transformers' model: as it is, with its checkpoint of each layer, and on a GPU, where
    Liger is installed, with Liger's kernels. All share one set of weights."""
    family = setting.family
    build = hf_llama if family == "llama" else transformers_gpt2
    first = build(setting).to(setting.device, DTYPES[setting.dtype]).train()
    named = dict(first.named_parameters())
    own = list(named.values()) if family == "gpt" else [named[one] for one in _llama_names(setting)]
    _copy(weights, own, transposed=family == "gpt")

    def another() -> Any:
        model = build(setting).to(setting.device, DTYPES[setting.dtype]).train()
        model.load_state_dict(first.state_dict(keep_vars=True), assign=True)
        inner: Any = model.model
        if hasattr(inner, "tie_weights"):
            inner.tie_weights()
        return model

    losses: Losses = {}
    compiled_too(losses, "transformers", of_logits(first, setting), compiled)
    checkpointing = another()
    checkpointing.model.gradient_checkpointing_enable({"use_reentrant": False})
    losses["transformers, full"] = of_logits(checkpointing, setting)
    if family == "llama" and setting.device.type == "cuda":
        liger = _with_liger(another().model)
        batch = setting.batch()
        given = dict(input_ids=batch.tokens, labels=batch.labels, shift_labels=batch.labels)
        if liger is not None:
            compiled_too(
                losses,
                "transformers, Liger",
                lambda: liger(**given, use_cache=False).loss,
                compiled,
            )
    return sharing(losses, list(first.parameters()))


def _with_liger(model: Any) -> Any | None:
    """Returns the model with Liger's kernels, or None where Liger is not installed."""
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except ImportError:
        return None
    apply_liger_kernel_to_llama(model=model)
    return model


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


def canonical(weights: dict[str, Tensor], setting: Setting) -> list[Tensor]:
    """Returns the weights of ours, of each layer norm, attention, norm and MLP.

    The query, key and value rows of a head are neighbours in ours. Here all queries come first,
    then all keys, then all values; in Llama each is a tensor of its own.
    """
    heads, family = setting.shape.num_attention_heads, setting.family
    found = [weights["embedding.word_embeddings.weight"]]
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


class Logits(nn.Module):
    """A transformers model that returns its logits only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False, return_dict=True).logits


def transformers_gpt2(setting: Setting) -> nn.Module:
    """Returns transformers' GPT-2 with the gelu that is one kernel.

    Its default gelu is a chain of seven pointwise kernels, which is slower.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = setting.shape
    return Logits(
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=shape.vocab_size,
                n_positions=shape.seq_length,
                n_embd=shape.hidden_size,
                n_layer=shape.num_layers,
                n_head=shape.num_attention_heads,
                resid_pdrop=setting.dropout,
                embd_pdrop=setting.dropout,
                attn_pdrop=setting.dropout,
                activation_function="gelu_pytorch_tanh",
                attn_implementation="sdpa",
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    )


class PlainLayer(nn.Module):
    """A GPT-2 layer of nn.Linear and scaled_dot_product_attention, batch first."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        h = shape.hidden_size
        self.num_heads, self.dropout = shape.num_attention_heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv = nn.Linear(h, 3 * h)
        self.proj = nn.Linear(h, h)
        self.fc1 = nn.Linear(h, 4 * h)
        self.fc2 = nn.Linear(4 * h, h)

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, s, h = hidden_states.shape
        query, key, value = (
            self.qkv(self.norm1(hidden_states))
            .view(b, s, 3, self.num_heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        context = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=True
        )
        hidden_states = hidden_states + F.dropout(
            self.proj(context.transpose(1, 2).reshape(b, s, h)), self.dropout
        )
        intermediate = F.gelu(self.fc1(self.norm2(hidden_states)), approximate="tanh")
        return hidden_states + F.dropout(self.fc2(intermediate), self.dropout)


class PlainGPT(nn.Module):
    """GPT-2's architecture in plain PyTorch."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        shape = setting.shape
        self.dropout = setting.dropout
        self.tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.positions = nn.Embedding(shape.seq_length, shape.hidden_size)
        self.layers = nn.Sequential(
            *(PlainLayer(shape, setting.dropout) for _ in range(shape.num_layers))
        )
        self.norm = nn.LayerNorm(shape.hidden_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden_states = F.dropout(
            self.tokens(tokens) + self.positions.weight[: tokens.shape[1]], self.dropout
        )
        return F.linear(self.norm(self.layers(hidden_states)), self.tokens.weight)
