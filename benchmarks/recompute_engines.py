"""Builds one GPT under every recompute policy of ours, and under others' activation checkpointing.

ours            `policies` by name, as flags; all share one set of weights
torch ..        our model and weights with torch.utils.checkpoint around each layer, MLP or core
                attention
transformers    GPT2LMHeadModel of the same shape, without and with
                gradient_checkpointing_enable
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from benchmarks.engines import SEED, our_model
from benchmarks.peers import of_logits, transformers_model
from megatron_lite.config.recompute import RecomputeConfig
from megatron_lite.recompute.schedule import plan_stage

NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A model under one kind of recomputation.

    forward: returns the loss, 0-d, with its graph.
    rival: the policy of ours that keeps the same tensors. None for an engine of ours.
    """

    name: str
    forward: Callable[[], Tensor]
    model: nn.Module
    rival: str | None = None

    def step(self):
        """Drops the gradients, then runs forward, loss and backward.

        It leaves out the optimizer, which is the same for all engines.
        """
        self.model.zero_grad()
        self.forward().backward()


def policies(num_layers):
    """Returns our policies by name."""
    regions = ("core_attn", "mlp", "layernorm+activation", "core_attn+layernorm+activation")
    as_named = (
        "*:pointwise",
        "*:pointwise+core_attn",
        "every-2:full",
        "*:ops(matmul,attention)",
        "*:ops(matmul/2,attention)",
        "*:full@host",
        "*:pointwise@host",
        "*:none@host",
    )
    texts = {
        NONE: "*:none",
        "uniform 1": "*:full",
        "uniform 2": "*:full/2",
        f"block {num_layers // 2}": f"0-{num_layers // 2 - 1}:full",
        **{name: f"*:{name}" for name in (*regions, "core_attn+layernorm+mlp")},
        **{text: text for text in as_named},
        "every-2:full, else pointwise": "every-2:full; *:pointwise+core_attn",
    }
    table = {name: RecomputeConfig(recompute_policy=text) for name, text in texts.items()}
    whole = replace(table["uniform 1"], recompute_tail_skip=False)
    return {**table, "uniform 1, no tail skip": whole}


# Peers with torch.utils.checkpoint: the policy of ours that rebuilds the same, the module of a
# layer that the checkpoint wraps, and n for every n-th layer, as torchtune does it.
TORCH_PEERS = {
    "torch layers": ("uniform 1", lambda layer: layer, 1),
    "torch every-2": ("every-2:full", lambda layer: layer, 2),
    "torch core_attn": ("core_attn", lambda layer: layer.self_attention.core_attention, 1),
    "torch mlp": ("mlp", lambda layer: layer.mlp, 1),
}
MODES = {"reentrant": True, "non-reentrant": False}


def engine_names(num_layers):
    """Returns the names of all rows that some setting has."""
    peers = {f"{name}, {mode}" for name in (*TORCH_PEERS, "transformers") for mode in MODES}
    return {*policies(num_layers), *peers, f"transformers, {NONE}"}


def build_engines(setting, parallel, skipped):
    """Returns the engines that can run here, NONE first. skipped: gets the others, and why."""
    engines = []
    ours = partial(_ours, setting, parallel, engines)
    for name, config in policies(setting.shape.num_layers).items():
        if name.endswith("@host") and setting.device.type == "cpu":
            skipped[name] = "on a CPU the host's memory is the device's"
        else:
            engines.append(ours(name, config))
    for name, (rival, part, step) in TORCH_PEERS.items():
        for mode, use_reentrant in MODES.items():
            prepare = partial(_checkpoint_layers, part=part, step=step, use_reentrant=use_reentrant)
            plain = RecomputeConfig()
            engines.append(ours(f"{name}, {mode}", plain, rival=rival, prepare=prepare))
    try:
        engines += _transformers(setting)
    except ImportError as reason:
        skipped["transformers"] = str(reason)
    return engines


def _ours(setting, parallel, engines, name, config, *, rival=None, prepare=lambda model: None):
    """Returns an engine of our model. It uses the same weight tensors as the first of `engines`.

    prepare: changes the model, for example to put a checkpoint around each layer.
    """
    plan = plan_stage(config, setting.shape.num_layers)
    weights = dict(engines[0].model.named_parameters()) if engines else None
    model = our_model(setting, parallel, plan=plan, weights=weights)
    prepare(model)
    batch = setting.batch()
    return Engine(
        name=name,
        forward=lambda: model.loss(batch.tokens, batch.labels).mean(),
        rival=rival,
        model=model,
    )


def _checkpoint_layers(model, *, part, step, use_reentrant):
    """Puts torch.utils.checkpoint around one module of every `step`-th layer.

    It restores the generator's state but not our named streams. With dropout its replays of
    attention therefore draw other masks than the forward. The time is the same, but a training
    would be wrong.
    """
    for layer in list(model.decoder.layers)[::step]:
        module = part(layer)
        module.forward = partial(torch_checkpoint, module.forward, use_reentrant=use_reentrant)


def _transformers(setting):
    first = None
    for mode, use_reentrant in {NONE: None, **MODES}.items():
        torch.manual_seed(SEED)
        model = transformers_model(setting, like=first, use_reentrant=use_reentrant)
        first = first or model
        yield Engine(
            name=f"transformers, {mode}",
            forward=of_logits(model, setting),
            model=model,
            rival=NONE if use_reentrant is None else "uniform 1",
        )
