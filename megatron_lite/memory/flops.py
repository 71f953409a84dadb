"""FLOPs of matrix multiplications, as torch's FlopCounterMode counts them: 2 per multiply-add, attention over the whole s x s
square (a causal kernel may skip half of it, and context-parallel ranks skip what none of their queries may read), backward twice
the forward.

    model FLOPs      forward + backward: what the model asks for, the same under every plan
    hardware FLOPs   model FLOPs + what the plan runs again + the scores that flash attention rebuilds in its backward kernel
                     + the logits again where the loss is computed in chunks

MFU and HFU are these over time and peak_flops. Every figure is over all TP and CP ranks. Standard library only.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.memory.layer_operators import repeated_results
from megatron_lite.memory.layer_tensors import Sizes
from megatron_lite.recompute.plan import CORE_ATTENTION, MLP_REGION, RecomputePlan, Segment

# Dense peak of one GPU in TFLOP/s, without sparsity: (words of its CUDA name, bfloat16, float32 without TF32), first match
# first. From NVIDIA's data sheets, which print twice the bfloat16 figure ("with sparsity") since H100. TF32 is half of bfloat16.
PEAK_TFLOPS = (
    ("GB200", 2500.0, 90.0), ("B200", 2250.0, 80.0),
    ("H200 NVL", 835.0, 60.0), ("H200", 989.0, 67.0), ("GH200", 989.0, 67.0),
    ("H100 NVL", 835.0, 60.0), ("H100 PCIe", 756.0, 51.0), ("H100", 989.0, 67.0),
    ("A100", 312.0, 19.5), ("A40", 149.7, 37.4), ("L40S", 362.0, 91.6), ("L4", 121.0, 30.3),
)


class LayerFlops(NamedTuple):
    """Forward of one layer by matmul. scores: Q K^T; context: softmax times V; both in one kernel under flash attention."""

    qkv: int
    scores: int
    context: int
    projection: int
    fc1: int
    fc2: int


def layer_flops(model: ModelConfig, *, batch: int, seq_length: int) -> LayerFlops:
    """One forward pass of one layer over `batch` sequences."""
    doubled_tokens = 2 * batch * seq_length
    attention_width = model.num_attention_heads * model.head_dim
    attention = doubled_tokens * seq_length * attention_width
    mlp = doubled_tokens * model.hidden_size * model.ffn_size
    return LayerFlops(qkv=doubled_tokens * model.hidden_size * (attention_width + 2 * model.query_groups * model.head_dim),
                      scores=attention, context=attention, projection=doubled_tokens * attention_width * model.hidden_size,
                      fc1=mlp * (2 if model.activation == "swiglu" else 1), fc2=mlp)


def forward_flops(model: ModelConfig, *, batch: int, seq_length: int, padded_vocab_size: int) -> int:
    """One forward pass of `batch` sequences, logits included (2205.05198 appendix A)."""
    return (model.num_layers * sum(layer_flops(model, batch=batch, seq_length=seq_length))
            + logits_flops(model, batch=batch, seq_length=seq_length, padded_vocab_size=padded_vocab_size))


def logits_flops(model: ModelConfig, *, batch: int, seq_length: int, padded_vocab_size: int) -> int:
    """The output projection of `batch` sequences."""
    return 2 * batch * seq_length * model.hidden_size * padded_vocab_size


def step_flops(model: ModelConfig, *, batch: int, seq_length: int, padded_vocab_size: int) -> int:
    """Model FLOPs of forward and backward over `batch` sequences."""
    return 3 * forward_flops(model, batch=batch, seq_length=seq_length, padded_vocab_size=padded_vocab_size)


def hardware_flops(model: ModelConfig, plan: RecomputePlan, *, batch: int, seq_length: int, padded_vocab_size: int,
                   device: str, loss_chunk_size: int | None = None, tp_size: int = 1, cp_size: int = 1) -> int:
    """Hardware FLOPs of forward and backward over `batch` sequences. device: "cpu" or "cuda". tp_size, cp_size: see
    replayed_layers."""
    shape = dict(batch=batch, seq_length=seq_length, padded_vocab_size=padded_vocab_size)
    return (step_flops(model, **shape)
            + (0 if loss_chunk_size is None else logits_flops(model, **shape))
            + replay_flops(model, plan, batch=batch, seq_length=seq_length, device=device, tp_size=tp_size, cp_size=cp_size)
            + flash_rebuild_flops(model, batch=batch, seq_length=seq_length, device=device))


def replay_flops(model: ModelConfig, plan: RecomputePlan, *, batch: int, seq_length: int, device: str, tp_size: int = 1,
                 cp_size: int = 1) -> int:
    """What backward over `batch` sequences runs again under the plan."""
    return sum(map(sum, replayed_layers(model, plan, batch=batch, seq_length=seq_length, device=device, tp_size=tp_size,
                                        cp_size=cp_size)))


def replayed_layers(model: ModelConfig, plan: RecomputePlan, *, batch: int, seq_length: int, device: str,
                    tp_size: int = 1, cp_size: int = 1) -> list[LayerFlops]:
    """What backward runs again of each layer of the plan. The regions layernorm and activation hold no matmul: zeros.

    tp_size, cp_size: matter only to policies that name single operators: sharded linears add their bias apart, and attention
    over context-parallel ranks is an operator of its own.
    """
    layer, flash = layer_flops(model, batch=batch, seq_length=seq_length), not model.builds_scores(device)
    sizes = Sizes(micro_batch_size=batch, seq_length=seq_length, padded_vocab_size=0, tp_size=tp_size, cp_size=cp_size,
                  device=device)
    return [again for segment in plan.segments for again in (
        [_not_kept(model, layer, segment, sizes, skip_tail=plan.skip_tail)] if segment.ops
        else _replayed(layer, segment, skip_tail=plan.skip_tail, flash=flash))]


def flash_rebuild_flops(model: ModelConfig, *, batch: int, seq_length: int, device: str) -> int:
    """Flash attention keeps no scores: its backward kernel has them as a fifth matmul. 0 where attention is unfused."""
    layer = layer_flops(model, batch=batch, seq_length=seq_length)
    return 0 if model.builds_scores(device) else model.num_layers * layer.scores


def peak_flops(device_name: str, *, bf16: bool, tf32: bool = False) -> float | None:
    """FLOP/s that a GPU of this CUDA name can do, dense, in 16-bit or float32. None: not in the table, or a MIG slice."""
    words = set(re.split(r"[\s-]+", device_name))
    for name, bf16_tflops, float32_tflops in PEAK_TFLOPS:
        if words >= set(name.split()) and "MIG" not in words:
            return 1e12 * (bf16_tflops if bf16 else bf16_tflops / 2 if tf32 else float32_tflops)
    return None


def _replayed(layer: LayerFlops, segment: Segment, *, skip_tail: bool, flash: bool) -> list[LayerFlops]:
    if segment.unit:  # backward reads everything but the output of the unit's last matmul
        return [layer] * (segment.num_layers - 1) + [layer._replace(fc2=0) if skip_tail else layer]
    core, mlp = CORE_ATTENTION in segment.regions, MLP_REGION in segment.regions
    again = LayerFlops(qkv=0, projection=0,
                       scores=layer.scores if core else 0,
                       context=layer.context if core and (flash or not skip_tail) else 0,  # flash's backward reads its output
                       fc1=layer.fc1 if mlp else 0,
                       fc2=layer.fc2 if mlp and not skip_tail else 0)
    return [again] * segment.num_layers


def _not_kept(model: ModelConfig, layer: LayerFlops, segment: Segment, sizes: Sizes, *, skip_tail: bool) -> LayerFlops:
    repeated = repeated_results(model, segment.ops, sizes, skip_tail=skip_tail)
    names = {matmul for result in repeated for matmul in result.matmuls}
    return LayerFlops(*(flops if name in names else 0 for name, flops in zip(layer._fields, layer, strict=True)))
