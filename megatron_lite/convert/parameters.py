"""The parameters of a model, by name and in the model's order, without any of its values."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_lite.config.checks import InputError
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

    A model of one layer is built on torch's meta device, which allocates no memory. The layers of a
    model have equal parameters, so that many layers cost no time.

    vocab_size: V. padded_vocab_size: None: V.
    Raises ValueError if the model does not divide over `tp_size` ranks.
    """
    device, state = torch.device("meta"), torch.get_rng_state()
    # RngStreams seeds the default generator, which belongs to the caller.
    rng = RngStreams(torch.device("cpu"), seed=0)
    torch.set_rng_state(state)
    built = GPTModel(
        # apex may be missing, and layers may differ: the parameters are the same
        replace(
            model, num_layers=1, norm_impl="torch", window_attn_skip_freq=None, no_rope_freq=None
        ),
        RankContext(rng=rng, device=device, params_dtype=torch.float32, size=tp_size),
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size or vocab_size,
    )
    specs = {name: spec_of(parameter) for name, parameter in built.named_parameters()}
    first = f"{LAYERS}0."
    of_layer = [name.removeprefix(first) for name in specs if name.startswith(first)]
    whole: dict[str, ParameterSpec] = {}
    for name, spec in specs.items():
        if not name.startswith(first):
            whole[name] = spec
        elif name == first + of_layer[0]:
            whole |= {
                f"{LAYERS}{layer}.{part}": specs[first + part]
                for layer in range(model.num_layers)
                for part in of_layer
            }
    return whole


def check_layers(num_layers: int, num_held: int, where: object) -> None:
    """Raises InputError if a model has more layers than the files hold tensors or numbers.

    It comes before any work for each layer, of which a small file can name many.
    """
    if num_layers > num_held:
        raise InputError(
            f"{where}: describes {num_layers} layers, and the files hold tensors of at most "
            f"{num_held}: they belong to different models"
        )


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
