"""Training steps of other GPTs of the same shape, beside megatron_lite's.

    transformers         GPT2LMHeadModel with SDPA attention
    plain                GPT-2 in the shortest plain PyTorch, for a machine that has only torch

In bf16 a peer runs twice. "autocast" has float32 weights under torch.autocast and trains as ours
does. "pure" has bf16 weights, moments and gradients: less work than ours, and worse training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engines import DTYPES, LEARNING_RATE, OURS, SEED, Setting, Shape, Step, our_step
from megatron_lite.training.batches import MicroBatch


def peer_step(
    build: Callable[[Setting], nn.Module], setting: Setting, batch: MicroBatch, *, autocast: bool
) -> Step:
    """Returns a training step as PyTorch's documentation writes it.

    build: builds a model that maps token ids [b, s] to logits [b, s, V].
    """
    torch.manual_seed(SEED)
    model = (
        build(setting)
        .to(setting.device, torch.float32 if autocast else DTYPES[setting.dtype])
        .train()
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True
    )
    labels = batch.labels.reshape(-1)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with (
            torch.autocast(setting.device.type, torch.bfloat16)
            if autocast
            else contextlib.nullcontext()
        ):
            logits = model(batch.tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


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


PEERS: dict[str, Callable[[Setting], nn.Module]] = {
    "transformers": transformers_gpt2,
    "plain": PlainGPT,
}


def build_engines(setting: Setting, peers: Sequence[str]) -> dict[str, Step]:
    """Returns the training step of each engine by name, ours first."""
    batch = setting.batch()
    engines = {OURS: our_step(setting, batch)}
    for peer in peers:
        if setting.dtype == "float32":
            engines[peer] = peer_step(PEERS[peer], setting, batch, autocast=False)
        else:
            engines[f"{peer}, autocast"] = peer_step(PEERS[peer], setting, batch, autocast=True)
            engines[f"{peer}, pure"] = peer_step(PEERS[peer], setting, batch, autocast=False)
    return engines
