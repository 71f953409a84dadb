"""The parameters of a rank, and the bytes that it holds from step to step for them.

                 weights          masters          gradients        optimizer states
    replicated   whole            whole            whole buckets    whole
    ZeRO-1       whole buckets    1/n              whole buckets    1/n
    FSDP2        1/n              -                1/n              1/n

n is the number of data-parallel and context-parallel ranks. Weights have the dtype of the run,
except that FSDP2 keeps its rows in float32. Masters exist only beside 16-bit weights, and in host
memory. All else is float32, or what --use-precision-aware-optimizer chooses. Every figure is exact:
buckets and pieces are those that training allocates. AdamW's step counters, 4 bytes for each
parameter, and the scales of float16 are not counted.

The memory that the end of a step needs besides the states: after the last backward.

    AdamW                          none: it updates in place
    rounded states                 float32 copies of a part of a parameter
    Muon                           temporaries of the largest matrix (optim/muon_update.py)
    --grad-reduce-in-bf16          a bfloat16 copy of the gradients
    --use-distributed-optimizer    over gloo: a copy of what is reduced, then one of the weights
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.optimizer_settings import FLOAT32, FORMATS, MUON, PART, SMALL, together
from megatron_lite.config.run import RunConfig
from megatron_lite.config.stages import Stage
from megatron_lite.description.gradient_buckets import bucket_layouts
from megatron_lite.description.model_ends import embedding_operations, head_operations
from megatron_lite.description.operations import Operation, Parameter
from megatron_lite.description.sizes import Sizes, allocated
from megatron_lite.description.transformer_layer import describe_kinds, describe_layers

LAYERS = "decoder.layers."


class RankStates(NamedTuple):
    """The bytes on the device of one rank, between two steps and during each of them.

    masters: the weights that the optimizer updates, where they are not the weights.
    gradients: under FSDP2 they exist from the first backward of a step to its end.
    optimizer: the states of the update rule, such as the two moments of AdamW.
    on_host: the masters and states in host memory, the places of gradients there, and the buffers
        through which weights pass.
    rounding: the bytes that CUDA's allocator adds to the tensors on the device.
    pieces: the elements of each piece that the device updates. part: those of the largest part in
        host memory.
    sent: the elements of the buckets whose gradients a step sends: of all but experts that no other
        rank has.
    """

    weights: int
    masters: int
    gradients: int
    optimizer: int
    on_host: int = 0
    rounding: int = 0
    pieces: tuple[int, ...] = ()
    part: int = 0
    sent: int = 0

    @property
    def total(self) -> int:
        """The bytes on the device."""
        return sum(self[:4])

    @classmethod
    def of(cls, *tensors: list[int]) -> RankStates:
        """Returns the sums of the bytes of the tensors of each kind, in the order of the fields."""
        on_device = [size for sizes in tensors[:4] for size in sizes]
        rounding = sum(allocated(size, "cuda") - size for size in on_device)
        sums: list[Any] = [*map(sum, tensors)]
        return cls(*sums)._replace(rounding=rounding)


def rank_states(
    config: RunConfig, pp_rank: int, *, dp_cp_size: int, dp_cp_rank: int = 0
) -> RankStates:
    """Returns the bytes of one rank. The vocabulary size must be known.

    pp_rank: the pipeline rank.
    dp_cp_size, dp_cp_rank: the number of ranks that share the states, over data and context
        parallelism together, and the number of this rank among them.
    """
    return _states(_Settings.of(config), pp_rank, dp_cp_size, dp_cp_rank)


@dataclass(frozen=True)
class _Settings:
    """A run, of which only the settings that decide the states count in comparisons."""

    key: tuple[Hashable, ...]
    config: RunConfig = field(compare=False)

    @classmethod
    def of(cls, config: RunConfig) -> _Settings:
        shape = config.model, config.parallel, config.data_parallel, config.tokenizer
        return cls((*shape, config.optimizer, config.training.precision), config)


@lru_cache(maxsize=1024)
def _states(settings: _Settings, pp_rank: int, dp_cp_size: int, dp_cp_rank: int) -> RankStates:
    config = settings.config
    held = [one for stage in config.stages_of_rank(pp_rank) for one in _parameters(config, stage)]
    element = FORMATS[config.training.precision]
    parallel, shards = config.parallel, config.shards(dp_cp_size)
    rank, is_shared = dp_cp_rank % shards, shards > 1
    if config.data_parallel.use_torch_fsdp2 and is_shared:
        return _fully_sharded(config, held, shards, rank)
    # The ranks with the same experts. TP ranks that hold whole experts are among them.
    unit = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel
    copies = dp_cp_size * parallel.tensor_model_parallel_size // unit
    held = [one._replace(of_experts=one.of_experts and parallel.spreads_experts) for one in held]
    buckets = bucket_layouts(
        held,
        bucket_size=config.data_parallel.bucket_size(dp_cp_size) if dp_cp_size > 1 else None,
        shards=shards,
        expert_shards=config.shards(copies) if is_shared else 1,
    )
    # ZeRO-1's weights are views of buckets (optim/layouts.py), so their padding counts too.
    in_buckets = [bucket.num_elements for bucket in buckets]
    weights = in_buckets if is_shared else [one.num_elements for one in held]
    own_ranks = [rank * bucket.shards // shards for bucket in buckets]  # of copies of experts too
    known = {one.name: one for one in held}
    pieces = [
        (name, known[name].is_matrix, part.stop - part.start)
        for bucket, own in zip(buckets, own_ranks, strict=True)
        for name in bucket.places
        for part in (bucket.own_part(name, own),)
        if part.start < part.stop
    ]
    options, grad = config.optimizer, FORMATS[config.optimizer.main_grads_dtype]
    hosted = options.on_host(pieces)
    main = FORMATS[options.main_params_dtype] if element < FLOAT32 else FLOAT32
    here, there = (
        [piece[1:] for piece, moved in zip(pieces, hosted, strict=True) if moved == on_host]
        for on_host in (False, True)
    )
    part = min(PART, max((number for _, number in there), default=0))
    taken = part
    if options.overlap_cpu_optimizer_d2h_h2d:  # each gradient has its place
        taken = sum(number for _, number in there)
    return RankStates.of(
        [element * number for number in weights],
        [main * number for _, number in here if element < FLOAT32],
        [grad * number for number in in_buckets],
        _optimizer_tensors(config, here),
        [
            *(main * number for _, number in there),
            *_optimizer_tensors(config, there),
            *(taken * grad, 2 * part * element),
        ],
    )._replace(
        pieces=tuple(number for _, number in here),
        part=part,
        sent=sum(
            bucket.num_elements
            for bucket in buckets
            if copies > 1 or not known[next(iter(bucket.places))].of_experts
        ),
    )


def _fully_sharded(config: RunConfig, held: list[Parameter], shards: int, rank: int) -> RankStates:
    """Returns the bytes under FSDP2, which splits the rows of a parameter like torch.chunk.

    Every rank allocates as many rows of the weight, and of its gradient, as the first rank has.
    """
    allocates, pieces = [], []
    for one in held:
        rows, *others = one.shape
        per_rank = -(-rows // shards)
        mine = max(0, min(per_rank, rows - rank * per_rank)) * math.prod(others)
        allocates.append(FLOAT32 * per_rank * math.prod(others))
        if mine:
            pieces.append((one.is_matrix, mine))
    return RankStates.of(allocates, [], allocates, _optimizer_tensors(config, pieces))


def _optimizer_tensors(config: RunConfig, pieces: list[tuple[bool, int]]) -> list[int]:
    """Returns the bytes of the tensors that the update rule keeps.

    pieces: (whether it is a matrix, elements) of each piece that the rank updates.
    """
    return [
        size * number
        for is_matrix, number in pieces
        for size in config.optimizer.state_bytes(of_matrix=is_matrix)
    ]


def _parameters(config: RunConfig, stage: Stage) -> Iterator[Parameter]:
    """Yields the parameters of a stage on one TP rank with their whole names, in the order of the
    model."""
    sizes = Sizes.of(config, "cpu", stage)
    layers, first = describe_layers(sizes, [1] * stage.num_layers), stage.first_layer
    parts: list[tuple[str, Sequence[Operation]]] = [
        ("", embedding_operations(sizes)),
        *((f"{LAYERS}{number}", layer.registered()) for number, layer in enumerate(layers, first)),
        ("", head_operations(sizes)),
    ]
    for prefix, operations in parts:
        for operation in operations:
            for one in operation.parameters:
                names = prefix, operation.module, one.name
                yield one._replace(name=".".join(filter(None, names)))


def parameter_count(model: ModelConfig, vocab_size: int) -> int:
    """Returns how many parameters the whole model has. Tied word embeddings count once."""
    sizes = Sizes(model=model, micro_batch_size=1, seq_length=1, padded_vocab_size=vocab_size)
    return _count(sizes, model.num_layers)


def rank_parameter_count(config: RunConfig, rank: int) -> int:
    """Returns how many parameters all stages of a pipeline rank have, on one TP rank.

    The vocabulary size must be known.
    """
    return sum(stage_parameters(config, stage) for stage in config.stages_of_rank(rank))


def stage_parameters(config: RunConfig, stage: Stage, of_experts: bool | None = None) -> int:
    """Returns how many parameters one rank of a stage holds: all, those of experts, or others.

    A last stage that is not the first holds a copy of tied word embeddings, which counts.
    """
    parallel = config.parallel
    tp_size = parallel.tensor_model_parallel_size
    sizes = Sizes(
        model=config.model,
        micro_batch_size=1,
        seq_length=1,
        padded_vocab_size=config.tokenizer.rows(tp_size),
        tp_size=tp_size,
        ep_size=parallel.expert_model_parallel_size,
        expert_tp_size=parallel.expert_tensor_parallel,
        has_embedding=stage.is_first,
        has_head=stage.is_last,
        first_layer=stage.first_layer,
    )
    return _count(sizes, stage.num_layers, of_experts)


@lru_cache(4096)
def _count(sizes: Sizes, num_layers: int, of_experts: bool | None = None) -> int:
    ends = embedding_operations(sizes) + head_operations(sizes)
    parts = [(ends, 1)]
    parts += [(one.operations, times) for one, times in describe_kinds(sizes, num_layers)]
    return sum(
        times * parameter.num_elements
        for operations, times in parts
        for operation in operations
        for parameter in operation.parameters
        if of_experts in (None, parameter.of_experts)
    )


BFLOAT16 = 2


class UpdateMemory(NamedTuple):
    """The most bytes besides the states, and what needs them.

    is_exact: whether it is to the byte. Otherwise it depends on where pieces of matrices end.
    """

    where: str
    num_bytes: int
    is_exact: bool


def update_memory(
    config: RunConfig, stages: Iterable[Stage], states: RankStates, *, dp_cp_size: int, device: str
) -> UpdateMemory:
    """Returns the memory of the end of a step. stages: those of the rank."""
    found = [UpdateMemory("update", 0, True)]
    sharding, shards = config.data_parallel, config.shards(dp_cp_size)
    element, grad = FORMATS[config.training.precision], FORMATS[config.optimizer.main_grads_dtype]
    in_bf16 = sharding.grad_reduce_in_bf16 and config.optimizer.main_grads_dtype == "fp32"
    if dp_cp_size > 1:  # FSDP2 sends none of it
        copied = device == "cpu" and shards > 1
        name = "reduction of gradients" + " in bfloat16" * in_bf16
        sent_bytes = states.sent * (BFLOAT16 if in_bf16 else grad)
        found.append(UpdateMemory(name, sent_bytes * (in_bf16 + copied), True))
        found.append(UpdateMemory("gather of weights", states.sent * element * copied, True))
    if config.optimizer.is_rounded:
        found.append(UpdateMemory("update of a part", _part(config, states, device), False))
    if config.optimizer.optimizer == MUON:
        found.append(UpdateMemory("update of a matrix", _muon(config, stages, shards), False))
    return max(found, key=lambda one: one.num_bytes)


def _part(config: RunConfig, states: RankStates, device: str) -> int:
    """Returns the most bytes of the float32 copies of a part of a parameter (optim/stored.py): in
    its update, as a scale divides it, or as the weights are chosen from the new and the old.

    Some pieces are updated together: all, or the small ones, if the others have a compiled kernel
    each. Scales are of one piece. Parts in host memory are updated one by one, there.
    """
    options, has_kernels = config.optimizer, config.uses_compiler(device)
    copies = sum(kind != "fp32" for kind in options.formats)
    scales = "fp16" in options.formats
    divided = scales + 7 * options.stochastic_rounding  # numbers of 64 bits
    chosen = 3 * (options.main_params_dtype != "fp32")
    most = max(copies + (options.main_grads_dtype != "fp32"), copies + divided, chosen)
    parts = [
        min(PART, number - start) for number in states.pieces for start in range(0, number, PART)
    ]
    if not scales:
        several = (number for number in parts if number < SMALL or not has_kernels)
        parts = [sum(group) for group in together(several, int)]
    return FLOAT32 * most * max(*parts, states.part * (device == "cpu"), 0)


def _muon(config: RunConfig, stages: Iterable[Stage], shards: int) -> int:
    """Returns the most bytes of Muon's temporaries for a parameter."""
    model = config.model
    qkv: tuple[int, ...] = (1,)
    if config.optimizer.muon_split_qkv:
        qkv = (model.num_attention_heads // model.query_groups, 1, 1)
    found = (
        _matrices(config, sizes, shards, one.shape, qkv if operation.name == "linear_qkv" else (1,))
        for stage in stages
        for sizes in (Sizes.of(config, "cpu", stage),)
        for layer, _ in describe_kinds(sizes, stage.num_layers)
        for operation in layer.operations
        for one in operation.parameters
        if one.is_matrix
    )
    return max(found, default=0)


def _matrices(
    config: RunConfig, sizes: Sizes, shards: int, shape: tuple[int, ...], parts: Sequence[int]
) -> int:
    """Returns the bytes of Muon's temporaries for a parameter. parts: the rows of its matrices.

    A matrix is copied out of several, unless their query group is the only one here. Then there
    are iterates in bfloat16, and its result, first unscaled and then scaled, in float32. Several
    results are joined.
    """
    optimizer, (rows, columns) = config.optimizer, shape
    whole, done, most = FLOAT32 * rows * columns, 0, 0
    for part in parts:
        own = rows * part // sum(parts)
        result = FLOAT32 * own * columns
        used = 2 * result + result * (len(parts) > 1 and sizes.model.query_groups > sizes.tp_size)
        if optimizer.muon_fp32_matmul_prec == "medium":
            used += result  # two in bfloat16
        else:
            used += 2 * FLOAT32 * min(own, columns) ** 2
        if optimizer.muon_tp_mode == "duplicated":
            used += 3 * BFLOAT16 * own * columns * (sizes.tp_size - 1)
        most, done = max(most, done + used), done + result
    direction = whole if optimizer.muon_nesterov else 0
    alone = direction + max(most, done + whole)
    if shards == 1:
        return alone
    # The direction is gathered: padded, as a part for every rank, and joined.
    share = whole // shards if config.data_parallel.use_torch_fsdp2 else whole
    return max(share + shards * share + whole + direction, alone + whole)
