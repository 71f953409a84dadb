"""The peers of benchmarks/contestants.py: plain torch, transformers, Liger's kernels, litgpt and
megatron-core.

Each function builds one model with the weights of ours and returns its ways to compute the loss. It
raises ImportError if the library is not installed.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engines import DTYPES, LEARNING_RATE, SEED
from megatron_lite.config.hf_config import to_hf


class Contestant(NamedTuple):
    """One way to train the model.

    clear: drops the gradients of the step before.
    run: clear, one forward and backward; returns the loss, 0-d.
    step: a training step: clear, run, clip the gradients at 1.0, and update with AdamW.
    """

    name: str
    clear: Callable[[], None]
    run: Callable[[], Tensor]
    step: Callable[[], Tensor]

    def ms(self, clock, action):
        """Returns the time of `run` or `step`, and leaves no gradients."""
        ms = clock(action)
        self.clear()
        return ms


FULL = "transformers, full"


def sharing(losses, model, *, compiled):
    """Returns a contestant for each way to compute a loss of the same model's parameters.

    compiled: whether each but FULL is there through torch.compile too.

    They share an optimizer. In bf16 its moments, the weights and the gradients are bf16: less work
    than ours, whose sums of gradients, moments and masters are float32.
    """
    losses |= {
        f"{name}, compiled": torch.compile(loss)
        for name, loss in losses.items()
        if compiled and name != FULL
    }
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, fused=True)

    def run(loss):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value.detach()

    def step(loss):
        value = run(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return value

    return [
        Contestant(name, optimizer.zero_grad, partial(run, loss), partial(step, loss))
        for name, loss in losses.items()
    ]


def of_logits(model, setting):
    """Returns the loss of a model that maps tokens [b, s] to logits [b, s, V], or to an output that
    has them."""
    batch = setting.batch()

    def loss():
        found = model(batch.tokens)
        logits = getattr(found, "logits", found)
        return F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten())

    return loss


def plain(setting, weights, *, compiled):
    """Returns GPT-2 in plain torch, and the same model compiled if `compiled`."""
    with setting.device:
        model = PlainGPT(setting).to(DTYPES[setting.dtype]).train()
    with torch.no_grad():  # its parameters are in the order of ours
        for parameter, (name, weight) in zip(model.parameters(), weights.items(), strict=True):
            if ".linear_qkv." in name:  # ours has the rows of a head together
                rows = weight.unflatten(0, (setting.shape.num_attention_heads, 3, -1))
                weight = rows.transpose(0, 1).flatten(0, 2)
            parameter.copy_(weight)
    return sharing({"plain torch": of_logits(model, setting)}, model, compiled=compiled)


def transformers(setting, weights, *, compiled):
    """Returns transformers' model: on a GPU, where Liger is installed, with Liger's kernels, as it
    is, and with its checkpoint of each layer. All share one set of weights."""
    first = transformers_model(setting)
    first.load_state_dict(as_transformers(weights, setting), strict=False)
    checkpointing, losses = transformers_model(setting, like=first, use_reentrant=False), {}
    if setting.family == "llama" and setting.device.type == "cuda":
        with contextlib.suppress(ImportError):
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            liger, batch = transformers_model(setting, like=first), setting.batch()
            apply_liger_kernel_to_llama(model=liger)
            given = dict(input_ids=batch.tokens, labels=batch.labels, shift_labels=batch.labels)
            losses["transformers, Liger"] = lambda: liger(**given).loss
    losses |= {"transformers": of_logits(first, setting), FULL: of_logits(checkpointing, setting)}
    return sharing(losses, first, compiled=compiled)


def litgpt(setting, weights, *, compiled):
    """Returns litgpt's Llama, and the same model compiled if `compiled`."""
    from litgpt.model import GPT, Config

    shape, ours = setting.shape, setting.model_config()
    config = Config(
        block_size=shape.seq_length,
        padded_vocab_size=shape.vocab_size,
        n_layer=shape.num_layers,
        n_embd=shape.hidden_size,
        n_head=shape.num_attention_heads,
        intermediate_size=ours.ffn_size,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        norm_eps=ours.norm_epsilon,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )
    with setting.device:
        model = GPT(config).to(DTYPES[setting.dtype]).train()
    theirs = as_transformers(weights, setting)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for own, of_transformers in LITGPT_NAMES.items():
                name = name.replace(own, of_transformers)
            parts = "qkv" if ".qkv." in name else " "
            parameter.copy_(
                torch.cat([theirs[name.replace("qkv", f"{one}_proj")] for one in parts])
            )
    return sharing({"litgpt": of_logits(model, setting)}, model, compiled=compiled)


def megatron(setting, weights, *, compiled):
    """Returns megatron-core's model, whose weights have the names of ours, for a GPU. It computes
    by torch's operators, and is not compiled: its own kernels need Transformer Engine or apex."""
    if setting.device.type != "cuda":
        raise ImportError("it needs a GPU")
    from megatron.core import parallel_state, tensor_parallel

    from tests.support.megatron_core import their_model

    shape, batch = setting.shape, setting.batch()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        state = torch.cuda.get_rng_state()  # that of our random streams
        tensor_parallel.model_parallel_cuda_manual_seed(SEED)
        torch.cuda.set_rng_state(state)
    model = their_model(
        setting.model_config(),
        dtype=DTYPES[setting.dtype],
        padded=shape.vocab_size,
        gathers=False,  # as their loss takes them
        hidden_dropout=setting.dropout,
        attention_dropout=setting.dropout,
        bf16=setting.dtype == "bf16",
        bias_activation_fusion=True,
    ).to(setting.device)
    model.load_state_dict(weights, strict=False)  # without its extra states
    positions = torch.arange(shape.seq_length, device=setting.device).expand_as(batch.tokens)

    def loss():
        return model(batch.tokens, positions, None, labels=batch.labels).float().mean()

    return sharing({"megatron-core": loss}, model, compiled=False)


def as_transformers(weights, setting):
    """Returns the weights of ours by the names, and in the layouts, of transformers."""
    from megatron_lite.convert.hf import row_of  # needs safetensors

    found = {}
    model = setting.model_config()
    for name, weight in weights.items():
        if ".experts." in name:  # theirs are in one tensor, too
            for ours, own in EXPERT_NAMES.items():
                name = name.replace(ours, own)
            found[name] = weight
        else:
            found |= row_of(setting.family, name, model).split(weight)
    return found


def transformers_model(setting, *, like=None, use_reentrant=None):
    """Returns transformers' model of the shape, on its device.

    like: another one, whose weights it shares. use_reentrant: of its checkpoint of each layer;
        None: it has none.
    The gelu is the one that is one kernel. Its default is a chain of seven pointwise kernels.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = to_hf(setting.model_config(), setting.shape.vocab_size, setting.family)
    if setting.family == "gpt2":
        config["activation_function"] = "gelu_pytorch_tanh"
    made = AutoConfig.for_model(**config, use_cache=False, bos_token_id=0, eos_token_id=0)
    with setting.device:
        model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    model.to(DTYPES[setting.dtype]).train()
    if like is not None:
        model.load_state_dict(like.state_dict(keep_vars=True), assign=True)
        model.tie_weights()
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model


EXPERT_NAMES = {
    "decoder.": "model.",
    "linear_fc1.weight": "gate_up_proj",
    "linear_fc2.weight": "down_proj",
}
# Parts of litgpt's names, and those of transformers' Llama.
LITGPT_NAMES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.h.": "model.layers.",
    "transformer.ln_f": "model.norm",
    "norm_1": "input_layernorm",
    "norm_2": "post_attention_layernorm",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.o_proj",
    "mlp.fc_1": "mlp.gate_proj",
    "mlp.fc_2": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
}


class PlainLayer(nn.Module):
    """A GPT-2 layer of nn.Linear and scaled_dot_product_attention, batch first."""

    def __init__(self, shape, dropout):
        super().__init__()
        h = shape.hidden_size
        self.num_heads, self.dropout = shape.num_attention_heads, dropout
        self.qkv = nn.Sequential(nn.LayerNorm(h), nn.Linear(h, 3 * h))
        self.proj = nn.Linear(h, h)
        self.mlp = nn.Sequential(
            nn.LayerNorm(h), nn.Linear(h, 4 * h), nn.GELU("tanh"), nn.Linear(4 * h, h)
        )

    def forward(self, hidden_states):
        qkv = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1))
        context = F.scaled_dot_product_attention(
            *qkv.permute(2, 0, 3, 1, 4), dropout_p=self.dropout, is_causal=True
        )
        attended = self.proj(context.transpose(1, 2).flatten(2))
        hidden_states = hidden_states + F.dropout(attended, self.dropout)
        return hidden_states + F.dropout(self.mlp(hidden_states), self.dropout)


class PlainGPT(nn.Module):
    """GPT-2's architecture in plain PyTorch."""

    def __init__(self, setting):
        super().__init__()
        shape, self.dropout = setting.shape, setting.dropout
        self.tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.positions = nn.Embedding(shape.seq_length, shape.hidden_size)
        self.layers = nn.Sequential(
            *(PlainLayer(shape, self.dropout) for _ in range(shape.num_layers)),
            nn.LayerNorm(shape.hidden_size),
        )

    def forward(self, tokens):
        embedded = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        hidden_states = self.layers(F.dropout(embedded, self.dropout))
        return F.linear(hidden_states, self.tokens.weight)
