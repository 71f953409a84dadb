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
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from megatron_lite.config.model import ModelConfig
from megatron_lite.description.model_ends import head_operations
from megatron_lite.description.operations import Operation
from megatron_lite.description.sizes import Sizes
from megatron_lite.description.transformer_layer import describe_kinds, describe_layers
from megatron_lite.memory.predict.replays import replayed_calls
from megatron_lite.recompute.recompute_plan import RecomputePlan

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


def forward_flops(
    model: ModelConfig, *, batch: int, seq_length: int, padded_vocab_size: int
) -> int:
    """Returns the FLOPs of one forward pass of `batch` sequences, logits included (2205.05198,
    appendix A)."""
    kinds = describe_kinds(model, _sizes(batch, seq_length), model.num_layers)
    return sum(count * _forward(layer.operations) for layer, count in kinds) + logits_flops(
        model, batch=batch, seq_length=seq_length, padded_vocab_size=padded_vocab_size
    )


def logits_flops(model: ModelConfig, *, batch: int, seq_length: int, padded_vocab_size: int) -> int:
    """Returns the FLOPs of the output projection of `batch` sequences."""
    return _forward(
        head_operations(model, _sizes(batch, seq_length, padded_vocab_size=padded_vocab_size))
    )


def step_flops(model: ModelConfig, *, batch: int, seq_length: int, padded_vocab_size: int) -> int:
    """Returns the model FLOPs of forward and backward over `batch` sequences."""
    return 3 * forward_flops(
        model, batch=batch, seq_length=seq_length, padded_vocab_size=padded_vocab_size
    )


def hardware_flops(
    model: ModelConfig,
    plan: RecomputePlan,
    *,
    batch: int,
    seq_length: int,
    padded_vocab_size: int,
    device: str,
    loss_chunk_size: int | None = None,
    loss_in_one_pass: bool = False,
    tp_size: int = 1,
    cp_size: int = 1,
) -> int:
    """Returns the hardware FLOPs of forward and backward over `batch` sequences.

    device: "cpu" or "cuda".
    loss_chunk_size: the tokens whose logits exist at a time; None if the logits are kept.
    loss_in_one_pass: see Sizes.
    tp_size, cp_size: see `replayed_flops`.
    """
    head = head_operations(
        model,
        _sizes(
            batch,
            seq_length,
            padded_vocab_size=padded_vocab_size,
            device=device,
            loss_chunk_size=loss_chunk_size,
            loss_in_one_pass=loss_in_one_pass,
        ),
    )
    return (
        step_flops(model, batch=batch, seq_length=seq_length, padded_vocab_size=padded_vocab_size)
        + _rebuilds(head)
        + replay_flops(
            model,
            plan,
            batch=batch,
            seq_length=seq_length,
            device=device,
            tp_size=tp_size,
            cp_size=cp_size,
        )
        + flash_rebuild_flops(model, batch=batch, seq_length=seq_length, device=device)
    )


def replay_flops(
    model: ModelConfig,
    plan: RecomputePlan,
    *,
    batch: int,
    seq_length: int,
    device: str,
    tp_size: int = 1,
    cp_size: int = 1,
    first_layer: int = 0,
) -> int:
    """Returns the FLOPs that backward over `batch` sequences runs again under the plan.

    first_layer: the number of the plan's first layer in the whole model.
    """
    return sum(
        sum(layer.values())
        for layer in replayed_flops(
            model,
            plan,
            batch=batch,
            seq_length=seq_length,
            device=device,
            tp_size=tp_size,
            cp_size=cp_size,
            first_layer=first_layer,
        )
    )


def replayed_flops(
    model: ModelConfig,
    plan: RecomputePlan,
    *,
    batch: int,
    seq_length: int,
    device: str,
    tp_size: int = 1,
    cp_size: int = 1,
    first_layer: int = 0,
) -> list[dict[str, int]]:
    """Returns, for each layer of the plan, the FLOPs that backward runs again, by matmul.

    tp_size, cp_size: they matter only to policies that name single operators. Sharded linears add
    their bias in another operator, and attention over context-parallel ranks is an operator of its
    own.
    """
    sizes = _sizes(
        batch, seq_length, device=device, tp_size=tp_size, cp_size=cp_size, first_layer=first_layer
    )
    layers = describe_layers(model, sizes, plan.num_layers)
    # The description counts the FLOPs of one rank. The figures here are over all TP and CP ranks.
    again: list[dict[str, int]] = [{} for _ in layers]
    for segment in plan.segments:
        own = layers[segment.first_layer : segment.first_layer + segment.num_layers]
        for layer, _, call in replayed_calls(own, segment, skip_tail=plan.skip_tail):
            again[segment.first_layer + layer] |= {
                one.name: one.flops * sizes.num_ranks for one in call.matmuls
            }
    return again


def flash_rebuild_flops(model: ModelConfig, *, batch: int, seq_length: int, device: str) -> int:
    """Returns the FLOPs with which flash attention rebuilds the scores in backward.

    They are the fifth matmul of its backward, since it keeps no scores. 0 if attention is unfused.
    """
    kinds = describe_kinds(model, _sizes(batch, seq_length, device=device), model.num_layers)
    return sum(count * _rebuilds(layer.operations) for layer, count in kinds)


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


def _forward(operations: Iterable[Operation]) -> int:
    return sum(operation.flops for operation in operations)


def _rebuilds(operations: Iterable[Operation]) -> int:
    return sum(matmul.flops for operation in operations for matmul in operation.rebuilds)


def _sizes(
    batch: int,
    seq_length: int,
    *,
    padded_vocab_size: int = 0,
    device: str = "cpu",
    tp_size: int = 1,
    cp_size: int = 1,
    loss_chunk_size: int | None = None,
    loss_in_one_pass: bool = False,
    first_layer: int = 0,
) -> Sizes:
    return Sizes(
        micro_batch_size=batch,
        seq_length=seq_length,
        padded_vocab_size=padded_vocab_size,
        device=device,
        tp_size=tp_size,
        cp_size=cp_size,
        loss_chunk_size=loss_chunk_size,
        loss_in_one_pass=loss_in_one_pass,
        first_layer=first_layer,
    )
