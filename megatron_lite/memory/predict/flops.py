"""The FLOPs of matrix multiplications, as torch's FlopCounterMode counts them.

A multiply-add counts 2, and backward counts twice the forward. Attention counts the whole s x s
square. A causal kernel may skip half of it, and context-parallel ranks skip the keys that none of
their queries may read.

    model FLOPs      forward + backward; the same under every plan
    hardware FLOPs   model FLOPs
                     + what the plan runs again
                     + the scores that flash attention rebuilds in its backward kernel
                     + the logits a second time, if the loss is computed in chunks in two passes

MFU is the model FLOPs, and HFU the hardware FLOPs, over time and peak_flops. Every figure is the
sum over all TP and CP ranks. The matmuls come from description/. Standard library only.

The sizes have the whole number of sequences as `micro_batch_size`, and `padded_vocab_size` if
logits count. How ranks split the work matters only to policies that name single operators: sharded
linears add their bias in another operator, and attention over context-parallel ranks is an operator
of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megatron_lite.description.model_ends import head_operations
from megatron_lite.description.operations import Operation
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_kinds, describe_layers
from megatron_lite.recompute.recompute_plan import RecomputePlan

from .kept_tensors import replayed_calls

# Dense peak of one GPU in TFLOP/s: (words of its CUDA name, bfloat16, float32 without TF32). The
# first match counts. The figures are from NVIDIA's data sheets, which since H100 print twice the
# bfloat16 figure ("with sparsity"). TF32 is half of bfloat16.
PEAK_TFLOPS = (
    ("GB200", 2500.0, 90.0),
    ("B200", 2250.0, 80.0),
    ("H200 NVL", 835.0, 60.0),
    ("H200", 989.0, 67.0),
    ("GH200", 989.0, 67.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("A40", 149.7, 37.4),
    ("L40S", 362.0, 91.6),
    ("L4", 121.0, 30.3),
)


@lru_cache(maxsize=1024)
def forward_flops(sizes: Sizes) -> int:
    """Returns the FLOPs of one forward pass, logits included (2205.05198, appendix A)."""
    kinds = describe_kinds(sizes, sizes.model.num_layers)
    return sum(count * _forward(layer.operations) for layer, count in kinds) + logits_flops(sizes)


def logits_flops(sizes: Sizes) -> int:
    """Returns the FLOPs of the output projection."""
    return _forward(head_operations(sizes))


def step_flops(sizes: Sizes) -> int:
    """Returns the model FLOPs of forward and backward."""
    return 3 * forward_flops(replace(_plain(sizes), tp_size=1, cp_size=1))


def replay_flops(sizes: Sizes, plan: RecomputePlan) -> int:
    """Returns the FLOPs that backward runs again under the plan."""
    layers = describe_layers(_plain(sizes), plan.tiles)
    # The description counts the FLOPs of one rank. The figure here is over all TP and CP ranks.
    return sizes.num_ranks * sum(
        matmul.flops
        for segment in plan.segments
        for _, call in replayed_calls(layers, segment, plan.skip_tail)
        for matmul in call.matmuls
    )


class PolicyFlops(NamedTuple):
    """The FLOPs of a micro-batch under a plan, over all TP and CP ranks.

    model: forward and backward. replays: what replays add. chunks: what a second pass of the loss
    adds. scores: what flash attention adds in its backward.
    """

    model: int
    replays: int
    chunks: int
    scores: int

    @property
    def hardware(self) -> int:
        """The hardware FLOPs."""
        return sum(self)

    @property
    def added(self) -> float:
        """What runs a second time, as a share of forward and backward."""
        return (self.replays + self.chunks) / self.model

    @classmethod
    def of(cls, sizes: Sizes, plan: RecomputePlan) -> PolicyFlops:
        """Returns them. plan: that of the whole model."""
        whole = replace(_plain(sizes), tp_size=1, cp_size=1)
        kinds = describe_kinds(whole, sizes.model.num_layers)
        return cls(
            step_flops(sizes),
            replay_flops(sizes, plan),
            _rebuilds(head_operations(whole)),
            # The fifth matmul of flash attention's backward, since it keeps no scores.
            sum(count * _rebuilds(layer.operations) for layer, count in kinds),
        )


def peak_flops(device_name: str, *, bf16: bool, tf32: bool = False) -> float | None:
    """Returns the dense peak, in FLOP/s, of a GPU with this CUDA name.

    bf16: the peak in 16 bits; else that in float32, by TF32 if `tf32`.
    None: the GPU is not in the table, or it is a MIG slice.
    """
    words = set(re.split(r"[\s-]+", device_name))
    for name, bf16_tflops, float32_tflops in PEAK_TFLOPS:
        if words >= set(name.split()) and "MIG" not in words:
            if bf16:
                return 1e12 * bf16_tflops
            return 1e12 * (bf16_tflops / 2 if tf32 else float32_tflops)
    return None


def _plain(sizes: Sizes) -> Sizes:
    """Returns the sizes without what splits or fuses the work in ways that do not count here."""
    return replace(
        sizes,
        sequence_parallel=False,
        cp_comm_type="p2p",
        ep_size=1,
        expert_tp_size=0,
        expert_imbalance=1.0,
        compiled=False,
    )


def _forward(operations: Iterable[Operation]) -> int:
    return sum(operation.flops for operation in operations)


def _rebuilds(operations: Iterable[Operation]) -> int:
    return sum(matmul.flops for operation in operations for matmul in operation.rebuilds)
