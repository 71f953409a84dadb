"""megatron-core's GPT on a CPU, for benchmarks/side_by_side.py.

megatron-core 0.16.1 asks for CUDA devices. `on_cpu` gives it the CPU in these places, in this
process only: the current device, the causal mask, and the random states of its checkpoints. It also
lets torch's norm, which it refuses under sequence parallelism, run on a part of the tokens. It sums
the gradients of such norms after backward, in a step that is not timed. What it computes stays the
same. It is loaded with the weights of megatron_lite, whose names are the same.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.engines import DTYPES, Setting
from benchmarks.recompute_engines import Engine, Place

# by name: the settings of recomputation, and the size of the group from which on they exist
RECOMPUTE: dict[str, tuple[dict[str, Any], int]] = {
    "none": ({}, 1),
    "full": (
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        1,
    ),
    "core_attn": (dict(recompute_granularity="selective", recompute_modules=["core_attn"]), 1),
    "distributed": (
        dict(
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
            distribute_saved_activations=True,
        ),
        2,
    ),
}


def on_cpu(tp_size: int) -> None:
    """Makes megatron-core run on a CPU in this process. Call it once.

    Raises ImportError if megatron-core is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of each GPU library that is not there
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer import torch_norm, utils
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    utils.torch = _TorchOnCpu()
    random.CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()
    random._get_all_rng_states = lambda: (torch.get_rng_state(), None, None)
    random._set_all_rng_states = lambda state, *_: torch.set_rng_state(state)
    make = torch_norm.WrappedTorchNorm.__new__

    def norm(cls: type, config: Any, *args: Any, **options: Any) -> nn.Module:
        config = copy.copy(config)
        config.sequence_parallel = False
        return make(cls, config, *args, **options)

    torch_norm.WrappedTorchNorm.__new__ = norm
    parallel_state.initialize_model_parallel(tp_size)


class _TorchOnCpu:
    """The module torch, whose `ones` takes no device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def ones(self, *size: Any, device: Any = None, **options: Any) -> Tensor:
        return torch.ones(*size, **options)


def engine_names(tp_size: int, *, sequence_parallel: bool) -> list[str]:
    """Returns the names of the engines: "megatron-core ATTENTION, RECOMPUTATION"."""
    return [
        f"megatron-core {attention}, {name}"
        for name, (_, least_ranks) in RECOMPUTE.items()
        if tp_size >= least_ranks and not (name == "distributed" and sequence_parallel)
        for attention in ("stock", "SDPA")
        # SDPA keeps no scores that could be rebuilt.
        if (name, attention) != ("core_attn", "SDPA")
    ]


def megatron_engines(
    setting: Setting, place: Place, weights: Mapping[str, Tensor], names: Sequence[str]
) -> list[Engine]:
    """Returns megatron-core's engines of these names: each setting of recomputation with its own
    attention and with torch's.

    weights: this rank's weights of megatron_lite.
    """
    found = []
    for name in names:
        library, _, recomputation = name.partition(", ")
        model = _model(setting, place, RECOMPUTE[recomputation][0])
        _load(model, weights)
        if library.endswith("SDPA"):
            for layer in model.decoder.layers:
                layer.self_attention.core_attention = _Sdpa()
        found.append(_engine(name, model, setting))
    return found


def _model(setting: Setting, place: Place, flags: dict[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    shape = setting.shape
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        activation_func=lambda one: F.gelu(one, approximate="tanh"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=DTYPES[setting.dtype],
        bf16=setting.dtype == "bf16",
        pipeline_dtype=DTYPES[setting.dtype],
        tensor_model_parallel_size=place.parallel.tp_size,
        sequence_parallel=place.sequence_parallel,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        **flags,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        shape.vocab_size,
        shape.seq_length,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    )
    return model.to(DTYPES[setting.dtype]).train()


def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies the weights. Raises KeyError if one has no counterpart."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


class _Sdpa(nn.Module):
    """torch's attention in the place of megatron-core's. Tensors are [s, b, heads, head size]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any
    ) -> Tensor:
        query, key, value = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        context = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=1.0 / math.sqrt(query.shape[-1])
        )
        return context.permute(2, 0, 1, 3).flatten(2)


def _engine(name: str, model: Any, setting: Setting) -> Engine:
    batch = setting.batch()
    positions = torch.arange(setting.shape.seq_length).expand_as(batch.tokens)

    def forward() -> Tensor:
        return model(batch.tokens, positions, None, labels=batch.labels).mean()

    return Engine(name=name, forward=forward, parameters=tuple(model.parameters()))
