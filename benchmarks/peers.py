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
from megatron_lite.recompute.recompute_plan import RecomputePlan


class Contestant(NamedTuple):
    """One way to train the model.

    clear: drops the gradients of the step before.
    run: clear, one forward and backward; returns the loss, 0-d.
    step: a training step: clear, run, clip the gradients at 1.0, and update with AdamW.
    plan: what ours recomputes.
    """

    name: str
    clear: Callable[[], None]
    run: Callable[[], Tensor]
    step: Callable[[], Tensor]
    plan: RecomputePlan | None = None

    def ms(self, clock, action):
        """Returns the time of `run` or `step`, with no gradients before."""
        self.clear()
        ms = clock.ms(action)
        self.clear()
        return ms


FULL = "transformers, full"


def sharing(losses, parameters, *, compiled):
    """Returns a contestant for each way to compute a loss of the same parameters.

    compiled: whether each but FULL is there through torch.compile too.

    They share an optimizer. In bf16 its moments, the weights and the gradients are bf16: less work
    than ours, whose sums of gradients, moments and masters are float32.
    """
    if compiled:
        ways = losses.items()
        losses |= {f"{name}, compiled": torch.compile(way) for name, way in ways if name != FULL}
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
    """Returns the loss of a model that maps tokens [b, s] to logits [b, s, V]."""
    batch = setting.batch()
    labels = batch.labels.reshape(-1)
    return lambda: F.cross_entropy(model(batch.tokens).float().flatten(0, 1), labels)


def plain(setting, weights, *, compiled):
    """Returns GPT-2 in plain torch, and the same model compiled if `compiled`."""
    with setting.device:
        model = PlainGPT(setting).to(DTYPES[setting.dtype]).train()
    parameters = list(model.parameters())  # in the order of ours
    with torch.no_grad():
        for parameter, (name, weight) in zip(parameters, weights.items(), strict=True):
            if ".linear_qkv." in name:  # ours has the rows of a head together
                rows = weight.unflatten(0, (setting.shape.num_attention_heads, 3, -1))
                weight = rows.transpose(0, 1).flatten(0, 2)
            parameter.copy_(weight)
    return sharing({"plain torch": of_logits(model, setting)}, parameters, compiled=compiled)


def transformers(setting, weights, *, compiled):
    """Returns transformers' model: as it is, with its checkpoint of each layer, and on a GPU, where
    Liger is installed, with Liger's kernels. All share one set of weights."""
    first, theirs = transformers_model(setting), as_transformers(weights, setting)
    with torch.no_grad():
        for name, parameter in first.model.named_parameters():
            parameter.copy_(theirs[name])

    checkpointing = transformers_model(setting, like=first, use_reentrant=False)
    losses = {"transformers": of_logits(first, setting), FULL: of_logits(checkpointing, setting)}
    if setting.family == "llama" and setting.device.type == "cuda":
        with contextlib.suppress(ImportError):
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            liger, batch = transformers_model(setting, like=first).model, setting.batch()
            apply_liger_kernel_to_llama(model=liger)
            given = dict(input_ids=batch.tokens, labels=batch.labels, shift_labels=batch.labels)
            losses["transformers, Liger"] = lambda: liger(**given, use_cache=False).loss
    return sharing(losses, list(first.parameters()), compiled=compiled)


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
    return sharing(
        {"litgpt": of_logits(model, setting)}, list(model.parameters()), compiled=compiled
    )


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
    more = dict(
        gathers=False,  # as their loss takes them
        hidden_dropout=setting.dropout,
        attention_dropout=setting.dropout,
        bf16=setting.dtype == "bf16",
        bias_activation_fusion=True,
    )
    model = their_model(
        setting.model_config(), dtype=DTYPES[setting.dtype], padded=shape.vocab_size, **more
    ).to(setting.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    positions = torch.arange(shape.seq_length, device=setting.device).expand_as(batch.tokens)

    def loss():
        return model(batch.tokens, positions, None, labels=batch.labels).float().mean()

    return sharing({"megatron-core": loss}, list(model.parameters()), compiled=False)


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
    """Returns transformers' model of the shape, on its device, which returns its logits only.

    like: another one, whose weights it shares. use_reentrant: of its checkpoint of each layer;
        None: it has none.
    The gelu is the one that is one kernel. Its default is a chain of seven pointwise kernels.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = to_hf(setting.model_config(), setting.shape.vocab_size, setting.family)
    if setting.family == "gpt2":
        config["activation_function"] = "gelu_pytorch_tanh"
    made = AutoConfig.for_model(**config, bos_token_id=0, eos_token_id=0)
    with setting.device:
        model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    model = Logits(model).to(DTYPES[setting.dtype]).train()
    if like is not None:
        model.load_state_dict(like.state_dict(keep_vars=True), assign=True)
        model.model.tie_weights()
    if use_reentrant is not None:
        renamed = getattr(model.model, "activation_checkpointing_enable", None)  # transformers 6
        (renamed or model.model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})
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


class Logits(nn.Module):
    """A transformers model that returns its logits only."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens, use_cache=False, return_dict=True).logits


class PlainLayer(nn.Module):
    """A GPT-2 layer of nn.Linear and scaled_dot_product_attention, batch first."""

    def __init__(self, shape, dropout):
        super().__init__()
        h = shape.hidden_size
        self.num_heads, self.dropout = shape.num_attention_heads, dropout
        self.norm1 = nn.LayerNorm(h)
        self.qkv = nn.Linear(h, 3 * h)
        self.proj = nn.Linear(h, h)
        self.norm2 = nn.LayerNorm(h)
        self.fc1 = nn.Linear(h, 4 * h)
        self.fc2 = nn.Linear(4 * h, h)

    def forward(self, hidden_states):
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

    def __init__(self, setting):
        super().__init__()
        shape = setting.shape
        self.dropout = setting.dropout
        self.tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.positions = nn.Embedding(shape.seq_length, shape.hidden_size)
        self.layers = nn.Sequential(
            *(PlainLayer(shape, setting.dropout) for _ in range(shape.num_layers))
        )
        self.norm = nn.LayerNorm(shape.hidden_size)

    def forward(self, tokens):
        hidden_states = F.dropout(
            self.tokens(tokens) + self.positions.weight[: tokens.shape[1]], self.dropout
        )
        return F.linear(self.norm(self.layers(hidden_states)), self.tokens.weight)
