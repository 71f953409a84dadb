"""Copies weights between formats: one whole tensor at a time, under the names of this project.

A function `FORMAT_source` opens a WeightSource, and `write_FORMAT` writes what it reads. The
tensors in between have the names, the layout and the unsharded shapes of this project, so that each
format needs one mapping, not one for every other format. Only one tensor is in memory at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpointing.metadata import Progress
from megatron_lite.checkpointing.shards import FLOATS
from megatron_lite.config.checks import InputError
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.plain import shown
from megatron_lite.config.stages import Stage
from megatron_lite.model.gpt import GPTModel
from megatron_lite.parallel.parameter_spec import ParameterSpec, saved_state, spec_of
from megatron_lite.parallel.rng import RngStreams
from megatron_lite.tensor_parallel.rank_context import RankContext

LAYERS = "decoder.layers."
WORDS, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
MOST_NAMED = 5  # tensors that a message lists
WEIGHT = ""  # the key of a parameter's own values, beside those of its optimizer states
Advance = Callable[[int], None]  # called with the bytes of each tensor, for the progress bar


@dataclass(frozen=True, kw_only=True)
class Described:
    """Everything about weights but their values.

    model: the shape of the model.
    true_vocab_size: V, without padding.
    dtypes: the dtype of each parameter. Optimizer states are in float32.
    tokenizer: the files of the tokenizer; () if the format has none.
    token_ids: the ids of special tokens, as the config.json of Hugging Face names them.
    progress: how far the run had come that saved them.
    state_keys: the optimizer states that can be read for every parameter, such as "exp_avg"; () if
        there are none. "master" is the float32 weight.
    num_updates: how many updates the optimizer had made.
    notes: what is not taken over, in words for the user.
    """

    model: ModelConfig
    true_vocab_size: int
    dtypes: Mapping[str, torch.dtype]
    tokenizer: tuple[Path, ...] = ()
    token_ids: Mapping[str, Any] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    state_keys: tuple[str, ...] = ()
    num_updates: int = 0
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, dtype in self.dtypes.items():
            if dtype not in FLOATS.values():
                raise InputError(
                    f"{name} is {dtype}, and only {', '.join(FLOATS)} are read: convert quantised "
                    "weights to one of them first"
                )

    @cached_property
    def specs(self) -> Mapping[str, ParameterSpec]:
        """The spec of every parameter, unsharded and without padding."""
        return parameter_specs(self.model, self.true_vocab_size)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most weights."""
        counts: Counter[torch.dtype] = Counter()
        for name, spec in self.specs.items():
            counts[self.dtypes[name]] += math.prod(spec.global_shape)
        return counts.most_common(1)[0][0]

    def dtype_of(self, name: str, key: str) -> torch.dtype:
        """The dtype of a parameter (WEIGHT), or of one of its states."""
        return torch.float32 if key else self.dtypes[name]

    def keys_of(self, name: str) -> tuple[str, ...]:
        """Returns the keys of all that is read for a parameter, or for a buffer: no states."""
        return (WEIGHT, *(() if is_buffer(name) else self.state_keys))

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights and states."""
        return sum(
            math.prod(spec.global_shape) * self.dtype_of(name, key).itemsize
            for name, spec in self.specs.items()
            for key in self.keys_of(name)
        )


class WeightSource(NamedTuple):
    """Weights that can be read. Opening one reads no tensor.

    described: everything about the weights but their values.
    read: `read(name, key=WEIGHT)` returns one parameter, or one of its states in float32, whole and
        without padding, on the CPU. The name is as in a model's `named_parameters()`, such as
        "decoder.layers.3.self_attention.linear_qkv.weight", with the layer's number in the whole
        model. It raises InputError, with tensor and shapes, if the tensor has another shape.
    """

    described: Described
    read: Callable[..., Tensor]


def copy_tensors(
    source: WeightSource,
    put: Callable[[str, str, Tensor], None],
    advance: Advance,
    keys: Iterable[str] | None = None,
) -> None:
    """Calls `put(name, key, tensor)` for each parameter and each of its states, one at a time.

    keys: what is copied of each parameter; None: all.
    Raises InputError for a tensor that holds NaN or infinity.
    """
    for name in source.described.specs:
        for key in source.described.keys_of(name) if keys is None else keys:
            tensor = source.read(name, key)
            # The ends are NaN if any value is, and need no memory of the tensor's size.
            if tensor.numel() and not all(end.isfinite() for end in tensor.aminmax()):
                raise InputError(
                    f"{name}{key and f' ({key})'} holds NaN or infinity, so the model is broken: "
                    "convert an earlier checkpoint"
                )
            put(name, key, tensor)
            advance(tensor.nbytes)
            del tensor


def parameter_specs(
    model: ModelConfig, vocab_size: int, *, tp_size: int = 1, padded_vocab_size: int | None = None
) -> dict[str, ParameterSpec]:
    """Returns the spec of every parameter of the whole model, and of every saved buffer, by name.

    A model of two layers, one of which has experts if the model has any, is built on torch's meta
    device, which allocates no memory. All layers of a kind have equal parameters, so that many
    layers cost no time.

    vocab_size: V. padded_vocab_size: None: V.
    Raises ValueError if the model does not divide over `tp_size` ranks.
    """
    device, state = torch.device("meta"), torch.get_rng_state()
    # RngStreams seeds the default generator, which belongs to the caller.
    rng = RngStreams(torch.device("cpu"), seed=0)
    torch.set_rng_state(state)
    built = GPTModel(
        replace(
            model,
            num_layers=2,
            norm_impl="torch",  # apex may be missing, and the parameters are the same
            window_attn_skip_freq=None,
            no_rope_freq=None,
            moe_layer_freq=1 if model.num_experts is None else (0, 1),
        ),
        RankContext(rng=rng, device=device, params_dtype=torch.float32, size=tp_size),
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size or vocab_size,
    )
    specs = {name: spec_of(tensor) for name, tensor in saved_state(built).items()}
    for spec in specs.values():
        spec.local_shape(tp_size)
    kinds: tuple[dict[str, ParameterSpec], ...] = ({}, {})
    outer: dict[str, ParameterSpec] = {}
    for name, spec in specs.items():
        kind, rest = layer_of(name)
        (outer if kind is None else kinds[kind])[rest] = spec
    # In the order of the model: `outer` has the embeddings again, whose places stay.
    return {
        **{name: spec for name, spec in outer.items() if name.startswith("embedding.")},
        **{
            f"{LAYERS}{number}.{name}": spec
            for number in range(model.num_layers)
            for name, spec in kinds[model.layer_has_experts(number)].items()
        },
        **outer,
    }


@contextmanager
def refused(flags: str) -> Iterator[None]:
    """Makes an InputError, which names the flags, of a ValueError in the block."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{flags}: {error}") from error


def shard(whole: Tensor, spec: ParameterSpec, tp_rank: int, tp_size: int) -> Tensor:
    """Returns the part of a whole tensor that a TP rank holds, with zeros as padding."""
    if spec.tp_dim is None:
        return whole
    part = whole.new_zeros(spec.local_shape(tp_size))
    for theirs, own in _rows(whole, part, spec, tp_rank, tp_size):
        own.copy_(theirs)
    return part


def joined(parts: Sequence[Tensor], spec: ParameterSpec) -> Tensor:
    """Returns the whole tensor, without padding, of which each TP rank has a part."""
    if spec.tp_dim is None:
        return parts[0].contiguous()
    whole = parts[0].new_empty(spec.global_shape)
    for rank, part in enumerate(parts):
        for theirs, own in _rows(whole, part, spec, rank, len(parts)):
            theirs.copy_(own)
    return whole


def _rows(
    whole: Tensor, part: Tensor, spec: ParameterSpec, tp_rank: int, tp_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the same rows of a whole tensor and of a TP rank's part of it."""
    dim = spec.tp_dim or 0
    for span in spec.spans(tp_rank, tp_size):
        yield (
            whole.narrow(dim, span.global_start, span.length),
            part.narrow(dim, span.local_start, span.length),
        )


def is_buffer(name: str) -> bool:
    """Returns whether the optimizer does not update a tensor: the router's bias of each expert."""
    return name.endswith(".expert_bias")


def layer_of(name: str) -> tuple[int | None, str]:
    """Returns the number of a parameter's layer, or None, and its name within the layer."""
    number, _, rest = name.removeprefix(LAYERS).partition(".")
    return (int(number), rest) if name.startswith(LAYERS) and number.isdecimal() else (None, name)


def is_held(name: str, stage: Stage) -> bool:
    """Returns whether a pipeline stage holds a parameter."""
    layer, _ = layer_of(name)
    if layer is not None:
        return 0 <= layer - stage.first_layer < stage.num_layers
    return stage.is_first if name.startswith("embedding.") else stage.is_last


def check_layers(num_layers: int, num_held: int, where: object) -> None:
    """Raises InputError if a model has more layers than the files hold tensors or numbers.

    It comes before any work for each layer, of which a small file can name many.
    """
    if num_layers > num_held:
        raise InputError(
            f"{where}: describes {num_layers} layers, and the files hold tensors of at most "
            f"{num_held}: they belong to different models"
        )


def check_names(where: object, held: Set[str], needed: Set[str], what: str) -> None:
    """Raises InputError for tensors that are missing, or not expected. what: what needs them."""
    for verb, names in (("lacks", needed - held), ("holds", held - needed)):
        if names:
            first = shown(", ".join(sorted(names)[:MOST_NAMED]))
            raise InputError(f"{where}: {verb} {first} ({len(names)} in all), unlike {what}")
