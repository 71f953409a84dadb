"""Counts and predicts the bytes that one rank receives in a step.

The count observes the collectives that torch dispatches. The prediction uses the parameters'
shapes. A gather or reduce-scatter of a whole tensor of B bytes over n ranks brings each rank
(n-1)/n B, and an all-reduce brings twice that. This holds for the ring that NCCL and gloo use for
large tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.config.data_parallel import DataParallelConfig
from megatron_lite.description.gradient_buckets import Gradient, bucket_layouts

ALL_REDUCE, GATHER, REDUCE_SCATTER, SEND = "all-reduce", "all-gather", "reduce-scatter", "send"
KINDS = {
    "allreduce_": ALL_REDUCE,
    "_allgather_base_": GATHER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "send": SEND,
    "alltoall_base_": REDUCE_SCATTER,
}  # a part of a reduce-scatter (parallel/collectives.py)
UNCOUNTED = ("recv_", "barrier")  # a message is counted where it is sent
FLOAT32 = 4


def received(kind: str, whole_bytes: int, group_size: int) -> int:
    """Returns the bytes that one rank receives in one collective."""
    if kind == SEND:
        return whole_bytes
    return (2 if kind == ALL_REDUCE else 1) * whole_bytes * (group_size - 1) // group_size


class Traffic(TorchDispatchMode):
    """Counts the collectives inside a `with` block.

    bytes: the received bytes by kind. messages: the number of collectives by kind.
    Raises ValueError for a collective that it does not know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().split("::")[1]
            if name in KINDS:
                self._count(KINDS[name], args)
            elif name not in UNCOUNTED:
                raise ValueError(f"a collective that is not counted: {func.name()}")
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, args: tuple[Any, ...]) -> None:
        leaves = tree_leaves(args)
        whole = max(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        group = next(
            dist.ProcessGroup.unbox(leaf) for leaf in leaves if isinstance(leaf, torch.ScriptObject)
        )
        self.bytes[kind] += received(kind, whole, group.size())
        self.messages[kind] += 1


def foretold(
    config: DataParallelConfig,
    shapes: Mapping[str, Sequence[int]],
    *,
    ranks: int,
    micro_batches: int,
    element_bytes: int,
) -> Counter[str]:
    """Returns the bytes that a rank receives in a step, by kind of collective.

    It is for `ranks` > 1 data-parallel ranks at tensor-parallel size 1.
    shapes: the shapes of all parameters by name, in the order of the model.
    element_bytes: the bytes of one element of the weights that the model computes with.
    Besides gradients and weights, the sum of the losses counts. If ranks hold different pieces, the
    sum of their squared norms counts too.
    """
    # The mean loss is one float32. The squared gradient norm is another, if no rank has all pieces.
    found: Counter[str] = Counter({ALL_REDUCE: received(ALL_REDUCE, FLOAT32, ranks)})
    if config.use_torch_fsdp2 or config.use_distributed_optimizer:
        found[ALL_REDUCE] += received(ALL_REDUCE, FLOAT32, ranks)
    if config.use_torch_fsdp2:
        for unit, members in _units(config, shapes).items():
            # FSDP2 shards the first dimension and pads it to a multiple of the ranks. It reduces
            # the gradients of every micro-batch, in contrast to the buckets below.
            elements = sum(
                -(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for shape in members
            )
            found[REDUCE_SCATTER] += micro_batches * received(
                REDUCE_SCATTER, elements * FLOAT32, ranks
            )
            gathers = _gathers(config, unit, tied="output_layer.weight" not in shapes)
            found[GATHER] += (
                micro_batches * gathers * received(GATHER, elements * element_bytes, ranks)
            )
        return found
    for elements in _buckets(config, shapes, ranks):
        if config.use_distributed_optimizer:
            found[REDUCE_SCATTER] += received(REDUCE_SCATTER, elements * FLOAT32, ranks)
            found[GATHER] += received(GATHER, elements * element_bytes, ranks)
        else:
            found[ALL_REDUCE] += received(ALL_REDUCE, elements * FLOAT32, ranks)
    return found


def _buckets(
    config: DataParallelConfig, shapes: Mapping[str, Sequence[int]], ranks: int
) -> list[int]:
    """Returns the number of elements of each gradient bucket, with padding."""
    gradients = [Gradient(name, math.prod(shape)) for name, shape in shapes.items()]
    shards = ranks if config.use_distributed_optimizer else 1
    layouts = bucket_layouts(gradients, bucket_size=config.bucket_size(ranks), shards=shards)
    return [layout.num_elements for layout in layouts]


def _units(
    config: DataParallelConfig, shapes: Mapping[str, Sequence[int]]
) -> dict[str, list[Sequence[int]]]:
    """Returns the shapes of the parameters that FSDP2 gathers together, by unit.

    The units are "3" for a layer, "embedding", "output", and "" for the rest.
    """
    units: dict[str, list[Sequence[int]]] = {}
    for name, shape in shapes.items():
        layer = (
            name.removeprefix("decoder.layers.").partition(".")[0]
            if name.startswith("decoder.layers.")
            else ""
        )
        alone = {
            "embedding.word_embeddings.weight": "embedding",
            "output_layer.weight": "output",
        }.get(name, "")
        units.setdefault(
            layer or (alone if config.fsdp_memory_efficient_wrapping else ""), []
        ).append(shape)
    return units


def _gathers(config: DataParallelConfig, unit: str, *, tied: bool) -> int:
    """Returns how often FSDP2 gathers a unit in one micro-batch.

    The backward of an embedding needs no weight. A tied embedding is also the output's weight.
    """
    if unit == "embedding":
        return 2 if tied else 1
    return 2 if unit.isdigit() and config.torch_fsdp2_reshard_after_forward else 1
