"""Copies weights between formats: one shard at a time, under the names of this project.

The module of a format has `source`, which opens a WeightSource, and `write`, which writes what one
reads (tools/convert.py). The tensors in between have the names, the layout and the unsharded shapes
of this project, so that each format needs one mapping, not one for every other format.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpointing.shards import FLOATS
from megatron_lite.checkpointing.step_files import NO_PROGRESS, Progress
from megatron_lite.config.checks import InputError, Values, shown
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.optimizer_settings import OptimizerConfig
from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.parameter_spec import ParameterSpec, saved_state, spec_of
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.tensor_parallel.rank_context import RankContext

LAYERS = "decoder.layers."
OF_A_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
WORDS, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
MOST_NAMED = 5  # tensors that a message lists
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """Weights that can be read. Opening a source reads no tensor.

    model: the shape of the model.
    true_vocab_size: V, without padding.
    dtypes: the dtype of each parameter.
    read: `read(name)` returns one parameter, or one of its states, whole and without padding, on
        the CPU. The name is as in a model's `named_parameters()`, such as
        "decoder.layers.3.self_attention.linear_qkv.weight", with the layer's number in the whole
        model; that of a state ends with its key, as "output_layer.weight/exp_avg".
    tokenizer: the paths of the tokenizer's files, by their names; {} if the format has none.
    token_ids: the ids of special tokens, as the config.json of Hugging Face names them.
    progress: how far the run had come that saved them; its beginning without optimizer states,
        since training starts anew.
    state_keys: the optimizer states that can be read, such as "exp_avg"; () if there are none.
        "master" is the float32 weight.
    lacking: those that some parameters do not have, each as NAME/KEY, as with Muon.
    optimizer: the one that has these states.
    num_updates: how many updates the optimizer had made; 0 without its states.
    notes: what is not taken over, in words for the user.
    """

    model: ModelConfig
    true_vocab_size: int
    dtypes: Values
    read: Callable[[str], Tensor]
    tokenizer: Mapping[str, Path] = field(default_factory=dict)
    token_ids: Mapping[str, object] = field(default_factory=dict)
    progress: Progress = NO_PROGRESS
    state_keys: tuple[str, ...] = ()
    lacking: Collection[str] = ()
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    num_updates: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.state_keys:
            vars(self).update(progress=NO_PROGRESS, num_updates=0)
        for name, dtype in self.dtypes.items():
            if dtype not in FLOATS.values():
                raise InputError(
                    f"{name} has the dtype {dtype}, and only {', '.join(FLOATS)} are read, one for "
                    "all parts of a matrix: convert quantised weights to one of them first"
                )

    @cached_property
    def specs(self) -> Mapping[str, ParameterSpec]:
        """The spec of every parameter, unsharded and without padding."""
        return parameter_specs(self.model, self.true_vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most weights: that of the embedding, since norms may have another one."""
        return self.dtypes[WORDS]

    def checked(self, name: str) -> Tensor:
        """Returns a parameter, or one of its states in float32.

        Raises InputError if it holds NaN or infinity.
        """
        tensor = self.read(name)
        if "/" in name:
            tensor = tensor.float()
        # The ends are NaN if any value is, and need no memory of the tensor's size.
        if tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):
            raise InputError(
                f"{name} holds NaN or infinity, so the model is broken: convert an earlier "
                "checkpoint"
            )
        return tensor

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The bytes of all weights, and of the optimizer states of those that are no buffers."""
        found = {}
        for name, spec in self.specs.items():
            numel = math.prod(spec.global_shape)
            found[name] = numel * self.dtypes[name].itemsize
            for key in () if is_buffer(name) else self.state_keys:
                if (state := f"{name}/{key}") not in self.lacking:
                    found[state] = numel * torch.float32.itemsize
        return found


SHARD_BYTES = 2 * 10**9


def shards_of(source: WeightSource) -> list[list[str]]:
    """Returns the names of all tensors in shards of at most SHARD_BYTES, each parameter with its
    states.

    A single parameter may exceed the bytes.
    """
    shards, left = list[list[str]](), 0
    for _, group in groupby(source.sizes, lambda name: name.partition("/")[0]):
        own = list(group)
        size = sum(source.sizes[name] for name in own)
        if size > left:
            shards.append([])
            left = SHARD_BYTES
        left -= size
        shards[-1] += own
    return shards


def parameter_specs(
    model: ModelConfig, vocab_size: int, *, tp_size: int = 1
) -> dict[str, ParameterSpec]:
    """Returns the spec of every parameter of the whole model, and of every saved buffer, by name.

    A model of two layers, the first one dense unless all layers have experts, is built on torch's
    meta device, which allocates no memory. All layers of a kind have equal parameters, so that many
    layers cost no time.

    vocab_size: the rows of the embedding.
    Raises ValueError if the model does not divide over `tp_size` ranks.
    """
    few = replace(
        model,
        num_layers=2,
        window_attn_skip_freq=None,
        no_rope_freq=None,
        moe_layer_freq=1 if model.moe_layer_freq == 1 else (0, 1),
    )
    # RngStreams seeds the default generator, which belongs to the caller.
    with torch.random.fork_rng([]):
        rng = RngStreams(torch.device("cpu"), seed=0)
    device = torch.device("meta")
    context = RankContext(rng=rng, device=device, params_dtype=torch.float32, tp_size=tp_size)
    built = GPTModel(few, context, vocab_size=vocab_size, padded_vocab_size=vocab_size)
    kinds: dict[int | None, dict[str, ParameterSpec]] = {None: {}, 0: {}, 1: {}}
    for name, tensor in saved_state(built).items():
        layer, rest = layer_of(name)
        kinds[layer][rest] = spec_of(tensor)
        spec_of(tensor).local_shape(tp_size)
    layers = {
        f"{LAYERS}{number}.{name}": spec
        for number in range(model.num_layers)
        for name, spec in kinds[model.layer_has_experts(number)].items()
    }
    return {**kinds[None], **layers}


def is_buffer(name: str) -> bool:
    """Returns whether the optimizer does not update a tensor: the router's bias of each expert."""
    return name.endswith(".expert_bias")


def layer_of(name: str) -> tuple[int | None, str]:
    """Returns the number of a parameter's layer, or None, and its name within the layer."""
    found = OF_A_LAYER.fullmatch(name)
    return (int(found[1]), found[2]) if found else (None, name)


def check_number(what: str, number: int, num_held: int, where: object) -> None:
    """Raises InputError if a model has more layers or experts than the files hold tensors or
    numbers.

    It comes before any work for each of them, of which a small file can name many.
    """
    if number > num_held:
        raise InputError(
            f"{where}: describes {number} {what}, and the files hold tensors of at most "
            f"{num_held}: they belong to different models"
        )


def check_held(where: object, held: Values, needed: Mapping[str, Shape], config: str) -> None:
    """Raises InputError for tensors that are missing, not expected, or of another shape.

    held: by name, with a `shape`.
    needed: the shapes of the model that `config` describes.
    """
    both = held.keys(), needed.keys()
    for verb, names in (("lacks", both[1] - both[0]), ("holds", both[0] - both[1])):
        if names:
            raise InputError(
                f"{where}: {verb} {shown(', '.join(sorted(names)[:MOST_NAMED]))} ({len(names)} in "
                f"all), unlike its {config}"
            )
    for name, shape in needed.items():
        if tuple(held[name].shape) != shape:
            raise InputError(
                f"{where}: {name} has the shape {tuple(held[name].shape)}, but {config} describes "
                f"{shape}: they belong to different models"
            )
