"""The parameters of a model, by name and in the model's order, without any of its values."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.parallel import ParallelConfig
from megatron_lite.config.stages import stages
from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.parameter_spec import ParameterSpec, spec_of
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.tensor_parallel.rank_context import RankContext

LAYERS = "decoder.layers."


def parameter_specs(
    model: ModelConfig, vocab_size: int, *, tp_size: int = 1, padded_vocab_size: int | None = None
) -> dict[str, ParameterSpec]:
    """Returns the spec of every parameter of the whole model, by name.

    The model is built on torch's meta device, which allocates no memory.

    vocab_size: V. padded_vocab_size: None: V.
    Raises ValueError if the model does not divide over `tp_size` ranks.
    """
    device, state = torch.device("meta"), torch.get_rng_state()
    # RngStreams seeds the default generator, which belongs to the caller.
    rng = RngStreams(torch.device("cpu"), seed=0)
    torch.set_rng_state(state)
    built = GPTModel(
        replace(model, norm_impl="torch"),  # apex may be missing; the parameters are the same
        RankContext(rng=rng, device=device, params_dtype=torch.float32, size=tp_size),
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size or vocab_size,
    )
    return {name: spec_of(parameter) for name, parameter in built.named_parameters()}


def pipeline_rank_of(name: str, parallel: ParallelConfig, num_layers: int) -> int:
    """Returns the pipeline rank whose files hold a parameter."""
    if name.startswith(LAYERS):
        layer = int(name.removeprefix(LAYERS).partition(".")[0])
        return next(
            stage.rank
            for stage in stages(parallel, num_layers)
            if 0 <= layer - stage.first_layer < stage.num_layers
        )
    if name.startswith("embedding."):
        return 0
    return parallel.pipeline_model_parallel_size - 1
